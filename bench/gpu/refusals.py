"""What goes wrong on a GPU, met with a shard resident: each case a clear error, and nothing of the shard lost.

python -m bench.gpu.refusals [--gib 8] [--json FILE] [--fake]
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from appliance import memfd
from appliance.errors import ApplianceError, ConfigError, PeerError, ResourceError
from appliance.slabs.devices import backend
from bench.gpu.device import GIB, REPOSITORY, environment, prepared, visible
from bench.gpu.engine import attached
from bench.gpu.report import Report, parser
from bench.gpu.rig import Rig, running_keeper
from bench.gpu.sampler import used_bytes

ABSENT = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"
WRITER = """
import sys
from pathlib import Path
from bench.gpu.device import prepared, synchronize
from bench.gpu.engine import attached
from bench.gpu.rig import read_rig
with prepared(), attached(read_rig(Path(sys.argv[1])), 0) as engine:
    weight = next(engine.model.parameters())
    print("attached", flush=True)
    weight.data.zero_()
    synchronize()
    print("written", flush=True)
"""


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=8)
    args = arguments.parse_args()
    report = Report("refusals", args.json)
    gpu = visible(fake=args.fake)[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rig = Rig(Path(folder), (gpu,), 64, int(args.gib * GIB))
        rig.write()
        with running_keeper(rig):
            rig.wait_resident(timeout_s=120)
            with prepared(fake=args.fake):
                _refusals(report, rig, gpu)
    return int(report.failures > 0)


def _refusals(report: Report, rig: Rig, gpu: str) -> None:
    device = backend(gpu)

    def intact(case: str) -> None:
        with attached(rig, 0) as engine:
            report.check(f"{case}: the shard is intact", engine.checked()["intact"])

    intact("before")
    free_bytes = device.gpu.memory()[0]  # type: ignore[attr-defined]
    wanted = (free_bytes // device.granularity_bytes + 1) * device.granularity_bytes
    before = used_bytes(gpu)
    _refused(report, "a slab larger than what is free", ResourceError, lambda: device.create("second", wanted))
    report.check("nothing of it stays allocated", used_bytes(gpu) - before < 64 << 20, f"{used_bytes(gpu) - before}")
    intact("out of memory")

    _refused(report, "a GPU that this host has not", ConfigError, lambda: backend(ABSENT))
    with memfd.sealed("host", [bytes(device.granularity_bytes)]) as descriptor:
        _refused(
            report,
            "host memory in the place of a slab",
            PeerError,
            lambda: device.map(descriptor, device.granularity_bytes),
        )
    with device.create("small", device.granularity_bytes) as slab, slab.seal() as descriptor:
        _refused(
            report,
            "a slab smaller than announced",
            PeerError,
            lambda: device.map(descriptor, 2 * device.granularity_bytes),
        )
    intact("refused descriptors")

    done = subprocess.run(
        [sys.executable, "-c", WRITER, rig.folder / "rig.json"],
        check=False,
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = [line for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines()
    report.check(
        "an engine that writes its weights is stopped",
        done.returncode != 0 and "attached" in done.stdout and "written" not in done.stdout,
        f"status {done.returncode}: {said[-1] if said else ''}"[:200],
    )
    intact("written")


def _refused(report: Report, case: str, kind: type[ApplianceError], act: Callable[[], object]) -> None:
    try:
        act()
    except ApplianceError as error:
        report.check(case, isinstance(error, kind), f"{type(error).__name__}: {error.message}", hint=error.hint or "")
    else:
        report.check(case, False, "not refused")


if __name__ == "__main__":
    raise SystemExit(main())
