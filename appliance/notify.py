"""Talk to the service manager: readiness, progress, and descriptors that it keeps while we are gone.

The protocol is sd_notify(3), sd_listen_fds(3) and systemd's file descriptor store; no published Python client can
pass descriptors, which is the part this project lives from. Without NOTIFY_SOCKET every call is a no-op.
"""

import contextlib
import fcntl
import os
import select
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appliance.descriptors import Descriptor
from appliance.errors import HostError

FIRST_LISTEN_FD = 3


class Named(NamedTuple):
    """A descriptor that the service manager gave back, and the name it was stored under."""

    name: str
    descriptor: Descriptor


class Notifier:
    """The service manager's end of this process. HostError where a message cannot be delivered."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environ)
        # Set by systemd >= 254; 0 where the manager does not say how many it would keep.
        self.store_limit = int(environ.get("FDSTORE", "0") or 0)

    @property
    def present(self) -> bool:
        return bool(self._address)

    def ready(self, status: str) -> None:
        self.send(["READY=1", f"STATUS={_one_line(status)}"])

    def status(self, status: str) -> None:
        self.send([f"STATUS={_one_line(status)}"])

    def stopping(self, status: str) -> None:
        self.send(["STOPPING=1", f"STATUS={_one_line(status)}"])

    def watchdog(self) -> None:
        self.send(["WATCHDOG=1"])

    def extend_timeout(self, seconds: float) -> None:
        """Ask for this much more time from now until READY=1."""
        self.send([f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"])

    def store(self, name: str, fd: int) -> None:
        """Let the service manager keep a duplicate of a descriptor under a name (no ':' in it)."""
        # FDPOLL=0: a driver's descriptor may report a hang-up at any time, and would be dropped for it.
        self.send(["FDSTORE=1", f"FDNAME={name}", "FDPOLL=0"], fds=[fd])

    def remove(self, name: str) -> None:
        """Have every stored descriptor of that name closed."""
        self.send(["FDSTOREREMOVE=1", f"FDNAME={name}"])

    def barrier(self, timeout_s: float = 5.0) -> None:
        """Return once the manager has handled every message sent before; HostError after the timeout."""
        if not self.present:
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        with Descriptor(ours) as reading:
            with Descriptor(theirs) as writing:
                self.send(["BARRIER=1"], fds=[writing.fileno()])
            # The manager closes its copy when it gets there: that is the hang-up we wait for.
            poll = select.poll()
            poll.register(reading.fileno(), select.POLLHUP)
            if not poll.poll(timeout_s * 1000):
                raise HostError(f"the service manager did not answer within {timeout_s:g} s")

    def send(self, assignments: Sequence[str], *, fds: Sequence[int] = ()) -> None:
        """Send one datagram of NAME=value lines; see sd_notify(3) for the names."""
        if not self.present:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(assignments).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.connect(address)
                socket.send_fds(channel, [message], list(fds))
        except OSError as error:
            raise HostError(f"cannot notify the service manager at {self._address}: {error.strerror}") from error


def take_listen_descriptors(environ: dict[str, str]) -> list[Named]:
    """Return what the service manager kept for us, in the order it hands them over, and forget the variables.

    Empty where they were meant for another process. The caller closes them.
    """
    count, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    environ.pop("LISTEN_PIDFDID", None)
    if not count.isdigit() or pid != str(os.getpid()):
        return []
    found = []
    for index in range(int(count)):
        fd = FIRST_LISTEN_FD + index
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            found.append(Named(names[index] if index < len(names) else "unknown", Descriptor(fd)))
    return found


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6


def _one_line(text: str) -> str:
    return " ".join(text.split())
