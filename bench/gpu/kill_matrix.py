"""Who may die without the weights: loader, engine and keeper killed, the keeper restarted, systemd executed anew.

    python -m bench.gpu.kill_matrix [--root ROOT.tar.xz] [--gib 32] [--json FILE] [--fake]

With --root (from make_root.sh; root, no container needed) the keeper is a unit of a real systemd that is PID 1 of its
own namespaces; then, and without it only, `appliance up` takes systemd's place. After each death every slab's checksum
is compared with the one taken when it was donated, by engines that had it mapped and by ones that attach afterwards.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.device import GIB, REPOSITORY, environment, visible
from bench.gpu.report import Report, parser
from bench.gpu.rig import Rig
from bench.gpu.sampler import used_bytes
from bench.gpu.service_managers import ServiceManager, Systemd, Up, unpacked_root

LOAD_TIMEOUT_S = 120.0
BACK_TIMEOUT_S = 30.0
ENGINE_TIMEOUT_S = 90.0
KILLS_IN_A_ROW = 5


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--root", type=Path, help="archive of a root with systemd")
    arguments.add_argument("--gib", type=float, default=32)
    arguments.add_argument("--tensors", type=int, default=400)
    args = arguments.parse_args()
    gpu = visible(fake=args.fake)[0]
    failures = 0
    if args.root is not None:
        failures += _with_systemd(Report("kill_matrix systemd", args.json), args, gpu)
    failures += _with_up(Report("kill_matrix up", args.json), args, gpu)
    return int(failures > 0)


def _with_systemd(report: Report, args: Any, gpu: str) -> int:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _told(report):
        rig = Rig(Path(folder), (gpu,), args.tensors, int(args.gib * GIB))
        rig.write()
        manager = Systemd(rig, unpacked_root(args.root, Path(folder)))
        try:
            report.note(manager.version)
            Matrix(report, manager, rig, gpu).run()
        finally:
            report.note(f"the unit at the end: {manager.status()!r}")
            report.note(f"its last lines: {rig.log()[-600:]!r}")
            manager.close()
    return report.failures


def _with_up(report: Report, args: Any, gpu: str) -> int:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _told(report):
        rig = Rig(Path(folder), (gpu,), args.tensors, int(args.gib * GIB))
        rig.write()
        manager = Up(rig)
        try:
            Matrix(report, manager, rig, gpu).run()
        finally:
            manager.close()
    return report.failures


@contextlib.contextmanager
def _told(report: Report) -> Iterator[None]:
    """Let one manager's failure leave the other's matrix alone."""
    try:
        yield
    except (RuntimeError, TimeoutError, OSError, subprocess.SubprocessError) as error:
        report.check("the matrix comes to its end", False, f"{type(error).__name__}: {error}"[:1500])


class Matrix:
    """One row after the other, on one shard."""

    def __init__(self, report: Report, manager: ServiceManager, rig: Rig, gpu: str) -> None:
        self._report = report
        self._manager = manager
        self._rig = rig
        self._gpu = gpu
        self._base_bytes = used_bytes(gpu)
        self._engine: Engine | None = None
        self._shard_id = ""
        self._loads = 0

    def run(self) -> None:
        try:
            self._loader_killed()
            self._engine_killed()
            for act in self._manager.acts:
                self._survived(act, act)
            if "daemon-reexec" in self._manager.acts:
                self._survived("kill after daemon-reexec", "kill")
            self._survived(f"kill {KILLS_IN_A_ROW} times in a row", *["kill"] * KILLS_IN_A_ROW)
            self._stopped()
        finally:
            if self._engine is not None:
                self._engine.kill()

    def _loader_killed(self) -> None:
        self._manager.start()
        pid = _wait_for_process("bench.gpu.donor", self._rig, timeout_s=BACK_TIMEOUT_S)
        # Past its imports and in the middle of its work.
        with contextlib.suppress(TimeoutError):
            self._rig.wait_for(lambda status: "weights" in status["progress"], timeout_s=LOAD_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        status = self._rig.wait_resident(timeout_s=LOAD_TIMEOUT_S)
        self._shard_id = status["shards"][0]["shard_id"]
        self._loads = self._rig.donated(0)["runs"]
        self._report.figure("loaded again after the loader was killed", time.monotonic() - started, "s")
        self._engine = Engine(self._rig)
        first = self._engine.attached
        self._report.check(
            "loader killed: another one fills the keeper", first["intact"], f"{status['size_bytes']} bytes"
        )

    def _engine_killed(self) -> None:
        assert self._engine is not None
        self._engine.kill()
        self._engine = Engine(self._rig)
        attached = self._engine.attached
        self._row("engine killed", attached, f"attached again in {attached['total_ms']:.1f} ms")

    def _survived(self, what: str, *acts: str) -> None:
        """Do something to the keeper under a running engine; that one and a new one must find the weights."""
        assert self._engine is not None
        started = time.monotonic()
        for act in acts:
            self._do(act)
        self._report.figure(f"{what}: the keeper answers again", 1e3 * (time.monotonic() - started), "ms")
        self._row(f"{what}: the engine that was attached", self._engine.check(), "")
        new = Engine(self._rig)
        try:
            self._row(f"{what}: an engine that attaches", new.attached, f"{new.attached['total_ms']:.1f} ms")
        finally:
            new.kill()

    def _do(self, act: str) -> None:
        """Do it, and wait until the keeper serves the shard, from a new process where this one ended."""
        before = self._rig.wait_resident(timeout_s=BACK_TIMEOUT_S)
        self._manager.act(act)
        ended = act in ("kill", "restart")
        self._rig.wait_for(
            lambda status: status["state"] == "resident" and (not ended or status["pid"] != before["pid"]),
            timeout_s=BACK_TIMEOUT_S,
        )

    def _stopped(self) -> None:
        assert self._engine is not None
        self._engine.kill()
        self._engine = None
        self._manager.stop()
        deadline = time.monotonic() + 10
        while (left := used_bytes(self._gpu) - self._base_bytes) > 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.02)
        self._report.check("stopped: the memory is free", left <= 64 << 20, f"{left >> 20} MiB left")

    def _row(self, name: str, seen: dict[str, Any], detail: str) -> None:
        loads = self._rig.donated(0)["runs"]
        same = seen["shard_id"] == self._shard_id and loads == self._loads
        detail = f"{detail} shard {seen['shard_id']}, checksums in {seen['checksum_ms']:.0f} ms, {loads} loads".strip()
        self._report.check(name, seen["intact"] and same, detail)


class Engine:
    """An engine stand-in that holds what it attached; `attached` is what it said when it had."""

    def __init__(self, rig: Rig) -> None:
        with (rig.folder / "engine.log").open("ab") as log:
            self._log_path = Path(log.name)
            self._process = subprocess.Popen(
                rig.engine_argv("--hold"),
                cwd=REPOSITORY,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.attached = self._line()

    def check(self) -> dict[str, Any]:
        """Have it sum again what it has mapped."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ENGINE_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.kill()
            raise RuntimeError(f"an engine ended or hangs: {self._log_path.read_text(errors='replace')[-1000:]}")
        result: dict[str, Any] = json.loads(line)
        return result


def _wait_for_process(module: str, rig: Rig, *, timeout_s: float) -> int:
    """Return the pid, as this namespace counts, of the rig's process that runs a module."""
    deadline = time.monotonic() + timeout_s
    wanted = f"{module}\0{rig.folder}/rig.json".encode()
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        time.sleep(0.02)
    raise TimeoutError(f"{module} did not start within {timeout_s:g} s: {rig.log()}")


if __name__ == "__main__":
    raise SystemExit(main())
