"""How long an engine takes to get weights that are resident, what the keeper costs, and what packing needs.

    python -m bench.gpu.attach [--gib 120] [--tensors 2000] [--slab-gib N] [--engines 5] [--json FILE] [--fake]

A real keeper process holds the shard, a loader stand-in filled it from random weights, and each engine stand-in is a
fresh process. Times are from connecting to the keeper's socket to every tensor bound; the CUDA context, the imports and
the skeleton on the meta device come before it.
"""

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench.gpu.device import GIB, visible
from bench.gpu.report import Report, parser
from bench.gpu.rig import Rig, running_keeper, started
from bench.gpu.sampler import used_bytes

MIB = 1 << 20
ALONE_TIMEOUT_S = 10.0
TIMES = ("total", "describe", "receive", "bind", "map", "first_use", "context")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=120)
    arguments.add_argument("--tensors", type=int, default=2000)
    arguments.add_argument("--slab-gib", type=float)
    arguments.add_argument("--engines", type=int, default=5)
    args = arguments.parse_args()
    report = Report("attach", args.json)
    gpu = visible(fake=args.fake)[0]
    slab_bytes = None if args.slab_gib is None else int(args.slab_gib * GIB)
    base_bytes = used_bytes(gpu)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rig = Rig(Path(folder), (gpu,), args.tensors, int(args.gib * GIB), slab_bytes)
        rig.write()
        with running_keeper(rig) as keeper:
            try:
                status = rig.wait_resident(timeout_s=180)
            except TimeoutError as error:
                report.check("the loader fills the keeper", False, f"{error}\n{rig.log()}")
                return 1
            _wait_alone()
            size_bytes = status["size_bytes"]
            report.note(f"{args.tensors} tensors, {size_bytes / GIB:.2f} GiB in {status['shards'][0]['slabs']} slabs")
            _packing(report, rig)
            _keeper(report, keeper, gpu, size_bytes=size_bytes, base_bytes=base_bytes)
            results = [_engine(rig) for _ in range(args.engines)]
            for name in TIMES:
                _spread(report, f"fresh process: {name}", [lines[0][f"{name}_ms"] for lines in results])
            _spread(report, "same process again: total", [line["total_ms"] for lines in results for line in lines[1:]])
            report.check("every attach has the donated checksums", all(line["intact"] for ls in results for line in ls))
            _held(report, rig, gpu)
            _scrubbed(report, rig)
        _freed(report, gpu, base_bytes)
    return int(report.failures > 0)


def _wait_alone() -> None:
    """Return once the loader has left the GPU: what a process gives back at its end takes the driver a while."""
    from appliance.gpus import gpu_states

    deadline = time.monotonic() + ALONE_TIMEOUT_S
    while any(state.processes for state in gpu_states()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _packing(report: Report, rig: Rig) -> None:
    rank = rig.donated(0)
    report.figure("pack", rank["pack_s"], "s", GBps=rank["size_bytes"] / rank["pack_s"] / 1e9)
    report.figure("checksums at donation, kernel compiled", 1e3 * rank["checksum_s"], "ms")
    weights, slab = rank["weights_bytes"], rank["slab_bytes"]
    report.figure("packing: peak beside the weights", (rank["peak_bytes"] - weights) / MIB, "MiB", slab_MiB=slab / MIB)
    # What torch's allocator and the driver round up to is in the weights' own share already.
    limit = weights + slab + 256 * MIB
    report.check(
        "packing needs at most one slab beside the weights",
        rank["peak_bytes"] <= limit,
        str({**rank, "checksums": "..."}),
    )


def _keeper(report: Report, keeper: "subprocess.Popen[bytes]", gpu: str, *, size_bytes: int, base_bytes: int) -> None:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{keeper.pid}/status").read_text().splitlines() if ":" in line
    )
    rss_mb = int(status["VmRSS"].split()[0]) * 1024 / 1e6
    report.figure("keeper: resident memory", rss_mb, "MB", limit=50)
    report.check("the keeper stays under 50 MB", rss_mb < 50)
    mapped = Path(f"/proc/{keeper.pid}/maps").read_text()
    report.check("the keeper has mapped neither torch nor CUDA", not any(n in mapped for n in ("libtorch", "libcuda")))
    links = {str(entry.readlink()) for entry in Path(f"/proc/{keeper.pid}/fd").iterdir()}
    report.note(f"the keeper's descriptors: {sorted(link.split(':')[0] for link in links)}")
    # The loader is gone, no engine is here: all that is in use beside what was before is the shard.
    extra = (used_bytes(gpu) - base_bytes - size_bytes) / MIB
    report.figure("device memory beyond the shard while only the keeper has it", extra, "MiB")
    from appliance.gpus import gpu_states

    pids = [process.pid for state in gpu_states() for process in state.processes]
    report.check("NVML lists no process of ours", keeper.pid not in pids, f"processes: {pids}")


def _engine(rig: Rig) -> list[dict[str, float]]:
    with started(rig, rig.engine_argv("--repeat", "4"), stdout=subprocess.PIPE) as process:
        output = process.communicate(timeout=120)[0]
    lines = [json.loads(line) for line in output.splitlines()]
    if len(lines) != 4:
        raise RuntimeError(f"an engine ended early: {rig.log()}")
    return lines


def _held(report: Report, rig: Rig, gpu: str) -> None:
    """Tell what one attached engine adds to the memory in use: its context, and no second copy."""
    before = used_bytes(gpu)
    argv = rig.engine_argv("--hold")
    with (rig.folder / "log").open("ab") as log:
        from bench.gpu.device import REPOSITORY, environment

        process = subprocess.Popen(
            argv, cwd=REPOSITORY, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    report.figure("device memory that an attached engine adds", (used_bytes(gpu) - before) / MIB, "MiB")
    process.communicate(timeout=60)


def _scrubbed(report: Report, rig: Rig) -> None:
    argv = (rig.python, "-m", "bench.gpu.scrubber", str(rig.folder / "rig.json"))
    with started(rig, argv, stdout=subprocess.PIPE) as process:
        output = process.communicate(timeout=120)[0]
    if not report.check("a scrub of what the keeper holds", process.returncode == 0, rig.log()[-300:]):
        return
    found = json.loads(output)
    size_bytes = found["size_bytes"]
    report.figure("scrub in a fresh process: mapped, kernel compiled, read", 1e3 * found["first_s"], "ms")
    report.figure("scrub again: mapped, read", 1e3 * found["again_s"], "ms", GBps=size_bytes / found["again_s"] / 1e9)
    report.check("the scrub finds all of it intact", not found["damaged"], str(found["damaged"]))


def _freed(report: Report, gpu: str, base_bytes: int) -> None:
    started_s = time.monotonic()
    while (left := used_bytes(gpu) - base_bytes) > 64 * MIB and time.monotonic() - started_s < 10:
        time.sleep(0.01)
    report.check("the memory is free once nobody holds the descriptors", left <= 64 * MIB, f"{left / MIB:.0f} MiB left")


def _spread(report: Report, name: str, values: list[float]) -> None:
    if values:
        report.figure(name, statistics.median(values), "ms", least=min(values), most=max(values), n=len(values))


if __name__ == "__main__":
    raise SystemExit(main())
