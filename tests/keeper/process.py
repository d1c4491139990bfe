"""A keeper in a process of its own, as `python -m appliance.keeper`, given descriptors as a service manager does."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from appliance.client import KeeperClient
from appliance.descriptors import Descriptor, close_all
from appliance.notify import Named

TIMEOUT_S = 30.0
FIRST_HIGH_FD = 700

# Runs in the new process: descriptors to 3 and up, then the keeper. With a child of its own, where a test wants one.
_SHIM = """
import os, runpy, sys
numbers, child, user, *argv = sys.argv[1:]
numbers = [int(number) for number in numbers.split(",") if number]
for place, number in enumerate(numbers):
    os.dup2(number, 3 + place)
    os.close(number)
if numbers:
    os.environ["LISTEN_FDS"], os.environ["LISTEN_PID"] = str(len(numbers)), str(os.getpid())
import appliance.keeper.__main__
if user:
    os.setgroups([]), os.setgid(int(user)), os.setuid(int(user))
if child:
    sys.executable = child
del sys.modules["appliance.keeper.__main__"]
sys.argv[1:] = argv
runpy.run_module("appliance.keeper", run_name="__main__", alter_sys=True)
"""


class KeeperProcess:
    """Starts at once; a context manager that kills it. `child` stands for `python -m appliance.target`.

    What it says on its standard error goes to `log`; without one it is there to be read, and shown at the end.
    """

    def __init__(
        self,
        manifest: Path,
        *,
        child: Path | None = None,
        given: Sequence[Named] = (),
        environ: Mapping[str, str] | None = None,
        user: int | None = None,
        limits: Mapping[int, int] | None = None,
        python: str = sys.executable,
        log: IO[str] | None = None,
    ) -> None:
        high = [Descriptor(fcntl.fcntl(named.descriptor.fileno(), fcntl.F_DUPFD, FIRST_HIGH_FD)) for named in given]
        numbers = ",".join(str(descriptor.fileno()) for descriptor in high)
        argv = [numbers, str(child or ""), "" if user is None else str(user), "--manifest", str(manifest)]
        environment = dict(os.environ) | dict(environ or {})
        # Ahead of what else is looked for there: vLLM may be.
        folders = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        if given:
            environment["LISTEN_FDNAMES"] = ":".join(named.name for named in given)
        with closing_all(high):
            self._process = subprocess.Popen(
                [python, "-c", _SHIM, *argv, "--model", "m"],
                env=environment,
                pass_fds=[descriptor.fileno() for descriptor in high],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if log is None else log,
                text=True,
            )
        for number, value in (limits or {}).items():
            import resource

            resource.prlimit(self._process.pid, number, (value, value))
        close_all(named.descriptor for named in given)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    def count_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def memory_files(self) -> list[str]:
        """Return the names of the memory files that it has open."""
        links = [str(path.readlink()) for path in Path(f"/proc/{self.pid}/fd").iterdir()]
        return [link.removeprefix("/memfd:").removesuffix(" (deleted)") for link in links if "memfd:" in link]

    def wait_for_line(self, text: str) -> str:
        """Return the next line of its standard error that has this in it."""
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}: {said}")

    def close_stderr(self) -> None:
        """Have nobody listen to it any more."""
        assert self._process.stderr is not None
        self._process.stderr.close()

    def connect(self, path: Path) -> KeeperClient:
        return KeeperClient.connect(path, timeout_s=TIMEOUT_S)

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return status and what it said last."""
        assert self._process.stderr is not None
        said = "" if self._process.stderr.closed else self._process.stderr.read()
        return self._process.wait(TIMEOUT_S), said

    def terminate(self) -> int:
        """Send SIGTERM and return the status."""
        self._process.send_signal(signal.SIGTERM)
        return self.ended()[0]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def __enter__(self) -> "KeeperProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        if self._process.stderr is None:
            return
        if not self._process.stderr.closed:
            print(f"keeper said: {self._process.stderr.read()}")
        self.close_stderr()


@contextlib.contextmanager
def closing_all(descriptors: Sequence[Descriptor]) -> Iterator[None]:
    try:
        yield
    finally:
        close_all(descriptors)
