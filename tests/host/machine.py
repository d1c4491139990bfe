"""A real systemd host to test on: a Debian root booted with systemd-nspawn, gone without a trace when it is closed.

    with Machine.boot("trixie") as machine:
        machine.copy_in(Path("units"), "/root/units")
        machine.run(["systemctl", "start", "it.service"])

Changes are kept in memory and survive `reboot`. Nothing of it survives the process that booted it, even one that is
killed. It needs root; boot it from the main thread, since Linux ends it with the thread that started it.
"""

import os
import select
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from appliance.demo.cache import default_cache
from tests.host.cgroup import ControlGroup
from tests.host.root import Kind, root

BOOT_SCRIPT = Path(__file__).with_name("boot.sh")
BOOT_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 60.0
KILL_AFTER_S = 5.0
POLL_S = 0.05
STARTED = b"X_NSPAWN_LEADER_PID="  # what nspawn says at each start of a container
TIMEOUT_STATUS = 124  # of coreutils' timeout
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}

Network = Literal["private", "host"]
Completed = subprocess.CompletedProcess[str]


class Machine:
    """A booted host. `boot` is how to get one."""

    def __init__(self, process: "subprocess.Popen[bytes]", cgroup: ControlGroup, console: IO[bytes]) -> None:
        self._process = process
        self._cgroup = cgroup
        self._console = console
        self.init_pid = -1  # of its PID 1, seen from here

    @classmethod
    @contextmanager
    def boot(
        cls, kind: Kind = "trixie", *, binds: Mapping[Path, str] | None = None, network: Network = "private"
    ) -> Iterator["Machine"]:
        """Yield a host that has finished booting, and stop it afterwards.

        `binds` maps directories of this machine to places in there, read-only. A private network has a loopback device
        and nothing else, so ports cannot clash; `network="host"` shares this machine's.
        """
        base = root(kind, on_progress=print)
        # A mount point that all hosts share: each mounts on it in its own namespace.
        scratch = default_cache() / "hosts" / "scratch"
        scratch.mkdir(exist_ok=True)
        options = [f"--bind-ro={_escaped(source)}:{_escaped(place)}" for source, place in (binds or {}).items()]
        if network == "private":
            options.append("--private-network")
        cgroup = ControlGroup()
        script: list[str | Path] = [BOOT_SCRIPT, cgroup.path, base, scratch, f"--machine={cgroup.path.name}", *options]
        with tempfile.TemporaryFile() as console, _notifications(cgroup) as notifications:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *script],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**ENVIRONMENT, "NOTIFY_SOCKET": f"@{cgroup.path.name}"},
                start_new_session=True,
            )
            machine = cls(process, cgroup, console)
            try:
                machine._wait_for_boot(notifications)
                notifications.close()
                yield machine
            finally:
                machine.stop()

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        check: bool = True,
        timeout_s: float = RUN_TIMEOUT_S,
        stdin: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a program in there as root and return what it printed.

        AssertionError with its output where `check` and it fails; subprocess.TimeoutExpired where it takes longer, and
        then it has been killed.
        """
        variables = [f"{name}={value}" for name, value in {**ENVIRONMENT, **(environment or {})}.items()]
        # Killing nsenter would leave its child running: the time limit is kept inside.
        limit = ["timeout", f"--kill-after={KILL_AFTER_S:g}", f"{timeout_s:g}"]
        command = [os.fspath(part) for part in argv]
        done = subprocess.run(
            ["nsenter", f"--target={self.init_pid}", "--all", "env", "-i", *variables, *limit, *command],
            stdin=stdin or subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=timeout_s + RUN_TIMEOUT_S,
            check=False,
        )
        done.args = command
        if done.returncode in (TIMEOUT_STATUS, 128 + 9, -9):
            raise subprocess.TimeoutExpired(command, timeout_s, done.stdout, done.stderr)
        if check and done.returncode != 0:
            raise AssertionError(f"{command}: exited with status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def systemctl(self, *arguments: str, check: bool = True, timeout_s: float = RUN_TIMEOUT_S) -> str:
        """Return what systemctl printed, without the last newline."""
        return self.run(["systemctl", *arguments], check=check, timeout_s=timeout_s).stdout.rstrip("\n")

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Return these properties of a unit, as `systemctl show` prints them."""
        printed = self.systemctl("show", f"--property={','.join(properties)}", unit)
        return dict(line.split("=", 1) for line in printed.splitlines())

    def wait_for(self, condition: Callable[[], bool], *, what: str, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Return when the condition is true; AssertionError naming `what` after `timeout_s`.

        For what nothing announces: a unit that systemd restarts by itself, say.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not after {timeout_s:g} s: {what}")
            time.sleep(POLL_S)

    def journal(self, unit: str) -> str:
        """Return the messages of a unit in all boots, one a line."""
        return self.run(["journalctl", "--no-pager", "--output=cat", f"--unit={unit}"]).stdout

    def copy_in(self, path: Path, dest: str) -> None:
        """Copy a file or a directory of this machine to `dest` in there, modes kept, owned by root.

        It goes through a program in there, so that links in the path mean what they mean in there.
        """
        place = PurePosixPath(dest)
        with tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w") as tar:
                tar.add(path, arcname=place.name)
            archive.seek(0)
            self.run(["mkdir", "--parents", place.parent])
            self.run(["tar", "--extract", "--no-same-owner", f"--directory={place.parent}"], stdin=archive)

    def write(self, dest: str, text: str) -> None:
        """Write a file in there."""
        with tempfile.TemporaryDirectory() as directory:
            (file := Path(directory, PurePosixPath(dest).name)).write_text(text)
            self.copy_in(file, dest)

    def wait_online(self) -> None:
        """Return when every unit that is started at boot is up; AssertionError with the list where one failed."""
        state = self.run(["systemctl", "is-system-running", "--wait"], check=False, timeout_s=BOOT_TIMEOUT_S).stdout
        if state.strip() != "running":
            raise AssertionError(
                f"the host is {state.strip()}:\n{self.systemctl('--failed', '--no-legend', check=False)}"
            )

    def reboot(self) -> None:
        """Reboot it and return when it has booted again. Memory and /run are empty then, the disk is as it was."""
        with _notifications(self._cgroup) as notifications:
            self.run(["systemctl", "--no-block", "reboot"])
            self._wait_for_boot(notifications)

    def stop(self) -> None:
        """Cut its power and return when nothing of it is left. For an orderly end, `systemctl poweroff` first."""
        # The first process of its PID namespace: it is gone only once all the others are.
        firsts = [os.pidfd_open(pid) for pid in _children(self._process.pid)]
        self._process.kill()
        self._process.wait()
        for first in firsts:
            select.select([first], [], [], STOP_TIMEOUT_S)
            os.close(first)
        self._cgroup.remove(timeout_s=STOP_TIMEOUT_S)

    def console(self) -> str:
        """Return what it has printed on its console."""
        size_bytes = os.fstat(self._console.fileno()).st_size
        return os.pread(self._console.fileno(), size_bytes, 0).decode(errors="backslashreplace")

    def _wait_for_boot(self, notifications: socket.socket) -> None:
        exited = os.pidfd_open(self._process.pid)
        try:
            started, message = False, b""
            # A READY=1 before the start is the last word of the boot before.
            while not (started and b"READY=1" in message.splitlines()):
                ready: list[int] = select.select([notifications.fileno(), exited], [], [], BOOT_TIMEOUT_S)[0]
                if notifications.fileno() not in ready:
                    raise AssertionError(f"the host did not boot:\n{self.console()[-4000:]}")
                message = notifications.recv(4096)
                started = started or STARTED in message
        finally:
            os.close(exited)
        self.init_pid = _init_below(self._process.pid)
        self.wait_online()


def _notifications(cgroup: ControlGroup) -> socket.socket:
    """Return a socket for what nspawn says about a boot. The caller closes it.

    It is open only while somebody reads it: nspawn would hang on one that is full. Its address is an abstract one, so
    that no file is left behind.
    """
    notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notifications.bind(f"\0{cgroup.path.name}")
    return notifications


def _init_below(pid: int) -> int:
    """Return the one process below this one that is PID 1 two PID namespaces further down."""
    depth = len(_pids_in_namespaces(pid)) + 2
    pending = [pid]
    while pending:
        parent = pending.pop()
        if len(pids := _pids_in_namespaces(parent)) == depth and pids[-1] == "1":
            return parent
        pending += _children(parent)
    raise AssertionError(f"process {pid} has no container below it")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _pids_in_namespaces(pid: int) -> list[str]:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]


def _escaped(path: Path | str) -> str:
    return str(path).replace("\\", "\\\\").replace(":", "\\:")
