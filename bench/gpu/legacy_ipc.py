"""The same weights the way that other engines' caches pass them on: torch's legacy CUDA IPC, one handle a tensor.

    python -m bench.gpu.legacy_ipc [--gib 120] [--tensors 2000] [--engines 3] [--json FILE]

One process holds the tensors, a fresh one opens them all. The CUDA context comes before the time.
"""

import statistics
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler

from bench.gpu.device import GIB, REPOSITORY, environment
from bench.gpu.report import Report, parser

CHILD = """
import pickle, sys, time
import torch
import torch.multiprocessing
torch.zeros(1, device="cuda:0")
data = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
started = time.perf_counter()
tensors = pickle.loads(data)
torch.cuda.synchronize()
opened = time.perf_counter()
last = float(tensors[-1].view(torch.int16)[-1].to(torch.float64).sum())
print(1e3 * (opened - started), len(tensors), last, flush=True)
"""


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=120)
    arguments.add_argument("--tensors", type=int, default=2000)
    arguments.add_argument("--engines", type=int, default=3)
    args = arguments.parse_args()
    report = Report("legacy_ipc", args.json)
    if args.fake:
        report.note("there is no CUDA IPC in host memory: skipped")
        return 0
    import torch
    import torch.multiprocessing  # teaches the pickler what a tensor on a GPU is

    from bench.gpu.model import random_model

    model = random_model(args.tensors, int(args.gib * GIB), torch.device("cuda:0"), seed=0)
    tensors = [parameter.data for parameter in model.parameters()]
    torch.cuda.synchronize()
    times_ms = []
    for _ in range(args.engines):
        # Anew for each: handles that two processes open break torch's reference counts.
        started = time.perf_counter()
        data = bytes(ForkingPickler.dumps(tensors))
        report.figure("export", 1e3 * (time.perf_counter() - started), "ms", bytes=len(data))
        with subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            output = child.communicate(f"{len(data)}\n".encode() + data, timeout=120)[0].decode().split()
        if len(output) != 3:
            report.check("a fresh process opens every tensor", False, f"it ended with {child.returncode}")
            continue
        times_ms.append(float(output[0]))
        expected = float(tensors[-1].view(torch.int16)[-1].to(torch.float64).sum())
        report.check("a fresh process opens every tensor", float(output[2]) == expected, f"{output[1]} tensors")
    if times_ms:
        report.figure(
            "fresh process: total",
            statistics.median(times_ms),
            "ms",
            least=min(times_ms),
            most=max(times_ms),
            gib=args.gib,
        )
    return int(report.failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
