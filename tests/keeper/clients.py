"""A client in a process of its own, to be killed: says `done STEP` after each step and then waits.

python clients.py SOCKET UID GID STEP...    steps: connect describe wait attach offer donate give silence flood
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

STEP_TIMEOUT_S = 30.0


class ClientProcess:
    """Starts at once; a context manager that kills it."""

    def __init__(self, path: Path, *steps: str, uid: int = 0, gid: int = 0) -> None:
        command = [sys.executable, __file__, str(path), str(uid), str(gid), *steps]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """Return the next thing it says."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def wait_for(self, step: str) -> None:
        assert self.line() == f"done {step}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(STEP_TIMEOUT_S)

    def stop(self) -> None:
        """Have it do nothing, as a process that hangs."""
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> None:
    from appliance.client import KeeperClient, RefusedError
    from tests.keeper import steps

    path, uid, gid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # Imports come first: another user may not be able to read this Python.
    if uid:
        os.setgroups([gid])
        os.setgid(gid if gid else uid)
        os.setuid(uid)
    client: KeeperClient | None = None
    for step in sys.argv[4:]:
        try:
            client = steps.take(step, client, path)
        except RefusedError as error:
            print(f"refused {error.verdict.reason} {error.verdict.detail}", flush=True)
        except Exception as error:
            print(f"failed {type(error).__name__} {error}", flush=True)
        else:
            print(f"done {step}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
