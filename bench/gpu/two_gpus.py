"""Two shards of one model, each on its GPU: packed, kept by one keeper, attached by two engines at once.

python -m bench.gpu.two_gpus [--gib 60] [--tensors 2000] [--json FILE] [--fake]
"""

import json
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from appliance.client import KeeperClient
from appliance.descriptors import close_all
from appliance.errors import PeerError
from appliance.slabs.devices import backend
from bench.gpu.device import GIB, prepared, visible
from bench.gpu.report import Report, parser
from bench.gpu.rig import ROLE, Rig, running_keeper, started
from bench.gpu.sampler import used_bytes


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=60, help="of each shard")
    arguments.add_argument("--tensors", type=int, default=2000)
    args = arguments.parse_args()
    report = Report("two_gpus", args.json)
    gpus = visible(fake=args.fake)
    if len(gpus) < 2:
        report.note(f"{len(gpus)} GPU here: skipped")
        return 0
    base = [used_bytes(gpu) for gpu in gpus[:2]]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rig = Rig(Path(folder), gpus[:2], args.tensors, int(args.gib * GIB))
        rig.write()
        with running_keeper(rig):
            status = rig.wait_resident(timeout_s=90)
            sizes = [shard["size_bytes"] for shard in status["shards"]]
            for rank, (gpu, before) in enumerate(zip(gpus, base, strict=False)):
                extra = (used_bytes(gpu) - before - sizes[rank]) / (1 << 20)
                report.figure(f"GPU {rank}: device memory beyond its shard", extra, "MiB", gib=sizes[rank] / GIB)
            _attached(report, rig)
            _crossed(report, rig, fake=args.fake)
    return int(report.failures > 0)


def _attached(report: Report, rig: Rig) -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                started(rig, rig.engine_argv("--rank", str(rank), "--repeat", "3"), stdout=subprocess.PIPE)
            )
            for rank in (0, 1)
        ]
        outputs = [engine.communicate(timeout=240)[0].splitlines() for engine in engines]
    for rank, lines in enumerate(outputs):
        results = [json.loads(line) for line in lines]
        if not report.check(f"rank {rank} attaches", len(results) == 3, rig.log() if len(results) != 3 else ""):
            continue
        report.figure(f"rank {rank}, both at once: total", results[0]["total_ms"], "ms", slabs=results[0]["slabs"])
        report.check(f"rank {rank} has its own weights", all(result["intact"] for result in results))


def _crossed(report: Report, rig: Rig, *, fake: bool) -> None:
    """Map the second GPU's slab as one of the first: it could be reached over NVLink, and must be refused."""
    with prepared(fake=fake), KeeperClient.connect(rig.socket_path) as client:
        described = client.describe(role=ROLE, rank=1, wait_s=0)
        described.configs.close()
        slabs = client.attach(role=ROLE, rank=1, client="crossed", fingerprint=rig.fingerprint(1))
        try:
            backend(rig.devices[0]).map(slabs[0], described.record.slab_sizes[0]).close()
        except PeerError as error:
            report.check("a slab of the other GPU is refused", True, error.message)
        else:
            report.check("a slab of the other GPU is refused", False, "it was mapped")
        finally:
            close_all(slabs)


if __name__ == "__main__":
    raise SystemExit(main())
