"""The two that can hold a keeper's descriptors: a real systemd as PID 1 of its own namespaces, and `appliance up`."""

import contextlib
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Protocol

from bench.gpu.device import FAKE, REPOSITORY, environment
from bench.gpu.rig import Rig, end

UNIT = "weights-bench.service"
BOOT_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 60.0
# What the host's programs need of this environment inside of a unit.
PASSED = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", FAKE)
PASSED_PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "TORCH_")


class ServiceManager(Protocol):
    """Runs one keeper; `acts` are what can be done to it beside start and stop."""

    name: str
    acts: tuple[str, ...]

    def start(self) -> None: ...
    def act(self, what: str) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Systemd:
    """systemd from a root that `make_root.sh` made, with the keeper as a unit of it."""

    name = "systemd"
    acts: tuple[str, ...] = ("kill", "restart", "daemon-reload", "daemon-reexec")

    def __init__(self, rig: Rig, root: Path) -> None:
        self._root = root
        self._log = (rig.folder / "systemd.log").open("ab")
        _write_unit(rig, root)
        self._boot = subprocess.Popen(
            [REPOSITORY / "bench/gpu/boot_systemd.sh", root],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._init = self._wait_init()
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while self._systemctl("is-system-running", check=False) not in ("running", "degraded"):
            if time.monotonic() > deadline or self._boot.poll() is not None:
                self.close()
                raise TimeoutError(f"systemd is not up: {Path(self._log.name).read_text(errors='replace')[-1000:]}")
            time.sleep(0.1)

    @property
    def version(self) -> str:
        return self._systemctl("--version").splitlines()[0]

    def start(self) -> None:
        self._systemctl("start", "--no-block", UNIT)

    def act(self, what: str) -> None:
        match what:
            case "kill":
                self._systemctl("kill", "--signal=KILL", "--kill-whom=main", UNIT)
            case "restart":
                self._systemctl("restart", UNIT)
            case _:
                self._systemctl(what)

    def stop(self) -> None:
        self._systemctl("stop", UNIT)

    def status(self) -> str:
        """Return what systemd says of the unit."""
        return self._systemctl("show", "-p", "ActiveState,NFileDescriptorStore,NRestarts,StatusText", UNIT, check=False)

    def close(self) -> None:
        # Everything in its PID namespace goes with its PID 1.
        if self._init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
        end(self._boot, number=signal.SIGKILL)
        self._log.close()

    def _wait_init(self) -> int:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while time.monotonic() < deadline and self._boot.poll() is None:
            children = Path(f"/proc/{self._boot.pid}/task/{self._boot.pid}/children").read_text().split()
            # unshare's child is a shell until it has become systemd.
            if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "systemd":
                return int(children[0])
            time.sleep(0.05)
        self._init = 0
        self.close()
        raise TimeoutError(f"systemd did not start: {Path(self._log.name).read_text(errors='replace')[-1000:]}")

    def _systemctl(self, *arguments: str, check: bool = True) -> str:
        argv = ["nsenter", "-t", str(self._init), "-m", "-p", "-u", "-i", "-r", "/usr/bin/systemctl", *arguments]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        if check and done.returncode:
            raise RuntimeError(f"systemctl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.strip()


class Up:
    """`appliance up`'s supervisor in a process of its own."""

    name = "appliance up"
    acts: tuple[str, ...] = ("kill", "restart")

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._rig.folder / "up.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._rig.python, "-m", "bench.gpu.supervise", str(self._rig.folder / "rig.json")],
                cwd=REPOSITORY,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def act(self, what: str) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(f"the supervisor ended: {(self._rig.folder / 'up.log').read_text()[-1000:]}")

    def stop(self) -> None:
        self.act("stop")

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            end(self._process)


def unpacked_root(archive: Path, folder: Path) -> Path:
    """Return a fresh root from the archive of `make_root.sh`."""
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with tarfile.open(archive) as opened:
        opened.extractall(root, filter="fully_trusted")
    return root


def _write_unit(rig: Rig, root: Path) -> None:
    passed = {
        name: value for name, value in environment().items() if name in PASSED or name.startswith(PASSED_PREFIXES)
    }
    lines = "".join(f'{name}="{value}"\n' for name, value in passed.items())
    (root / "etc/bench.env").write_text(lines)
    program = " ".join(rig.keeper_argv)
    (root / "etc/systemd/system" / UNIT).write_text(
        f"""[Unit]
Description=Weights of the bench
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart=/usr/sbin/chroot /host /usr/bin/env --chdir={REPOSITORY} {program}
EnvironmentFile=/etc/bench.env
FileDescriptorStoreMax=1024
Restart=always
RestartSec=50ms
TimeoutStartSec=300
StandardOutput=append:/host{rig.folder}/log
StandardError=append:/host{rig.folder}/log
"""
    )
