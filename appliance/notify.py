"""Talk to the service manager: readiness, progress, and descriptors that it keeps while we are gone.

The protocol is sd_notify(3), sd_listen_fds(3) and systemd's file descriptor store; no published Python client can
pass descriptors, which is the part this project lives from. Without NOTIFY_SOCKET every call is a no-op.
"""

import contextlib
import fcntl
import os
import select
import socket
import time
from array import array
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

from appliance.descriptors import Descriptor
from appliance.errors import HostError, ResourceError
from appliance.lines import printable

FIRST_LISTEN_FD = 3
SEND_TIMEOUT_S = 10.0
BARRIER_TIMEOUT_S = 20.0
# The manager drops a datagram of more than 4096 bytes whole, READY=1 included.
MAX_STATUS_BYTES = 1024


class Named(NamedTuple):
    """A descriptor that the service manager gave back, and the name it was stored under."""

    name: str
    descriptor: Descriptor


class Notifier:
    """The service manager's end of this process. HostError where a message cannot be delivered.

    Safe to use from several threads. What only informs is given up where it would have to wait.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environ)
        # Set by systemd >= 254; 0 where the manager does not say how many it would keep.
        self.store_limit = _number(environ.get("FDSTORE", "")) or 0
        # Opened once: a process that has run out of descriptors must still be able to say so.
        self._channel = _channel() if self._address else None

    @property
    def present(self) -> bool:
        return self._channel is not None

    def ready(self, status: str) -> None:
        self.send(["READY=1", f"STATUS={_one_line(status)}"])

    def status(self, status: str) -> None:
        self._inform([f"STATUS={_one_line(status)}"])

    def stopping(self, status: str) -> None:
        self._inform(["STOPPING=1", f"STATUS={_one_line(status)}"])

    def watchdog(self) -> None:
        self._inform(["WATCHDOG=1"])

    def extend_timeout(self, seconds: float) -> None:
        """Ask for this much more time from now until READY=1."""
        self._inform([f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"])

    def store(self, name: str, fd: int) -> None:
        """Let the service manager keep a duplicate of a descriptor under a name (no ':' in it)."""
        # FDPOLL=0: a driver's descriptor may report a hang-up at any time, and would be dropped for it.
        self.send(["FDSTORE=1", f"FDNAME={name}", "FDPOLL=0"], fds=[fd])

    def remove(self, name: str) -> None:
        """Have every stored descriptor of that name closed."""
        self.send(["FDSTOREREMOVE=1", f"FDNAME={name}"])

    def barrier(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Return once the manager has handled every message sent before; HostError after the timeout."""
        if not self.present:
            return
        try:
            ours, theirs = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(f"no descriptor left to wait for the service manager: {error.strerror}") from error
        with Descriptor(ours) as reading:
            with Descriptor(theirs) as writing:
                self.send(["BARRIER=1"], fds=[writing.fileno()])
            # The manager closes its copy when it gets there: that is the hang-up we wait for.
            poll = select.poll()
            poll.register(reading.fileno(), select.POLLHUP)
            if not poll.poll(timeout_s * 1000):
                raise HostError(f"the service manager did not answer within {timeout_s:g} s")

    def send(self, assignments: Sequence[str], *, fds: Sequence[int] = (), timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Send one datagram of NAME=value lines; see sd_notify(3) for the names."""
        if self._channel is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(assignments).encode(errors="backslashreplace")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                # Every time: the manager may have been replaced, and bound its socket anew.
                self._channel.connect(address)
                try:
                    self._channel.sendmsg([message], ancillary, socket.MSG_DONTWAIT)
                    return
                except BlockingIOError as error:
                    if not _writable(self._channel, deadline - time.monotonic()):
                        raise HostError(f"the service manager at {self._address} takes no messages") from error
        except OSError as error:
            reason = error.strerror or error
            raise HostError(f"cannot notify the service manager at {self._address}: {reason}") from error

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _inform(self, assignments: Sequence[str]) -> None:
        with contextlib.suppress(HostError):
            self.send(assignments, timeout_s=0.0)


def take_listen_descriptors(environ: MutableMapping[str, str]) -> list[Named]:
    """Return what the service manager kept for us, in the order it hands them over, and forget the variables.

    Empty where they were meant for another process. The caller closes them.
    """
    count, pid = _number(environ.pop("LISTEN_FDS", "")), environ.pop("LISTEN_PID", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    environ.pop("LISTEN_PIDFDID", None)
    if count is None or pid != str(os.getpid()):
        return []
    found = []
    for index in range(count):
        fd = FIRST_LISTEN_FD + index
        try:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError:  # they are passed without gaps: there are no more
            break
        found.append(Named(names[index] if index < len(names) else "unknown", Descriptor(fd)))
    return found


def _channel() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    channel.setblocking(False)
    return channel


def _writable(channel: socket.socket, timeout_s: float) -> bool:
    if timeout_s <= 0:
        return False
    poll = select.poll()
    poll.register(channel, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    usec, pid = _number(environ.get("WATCHDOG_USEC", "")), environ.get("WATCHDOG_PID", "")
    if not usec or (pid and pid != str(os.getpid())):
        return None
    return usec / 1e6


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _one_line(text: str) -> str:
    line = printable(" ".join(text.split())).encode(errors="backslashreplace")
    return line[:MAX_STATUS_BYTES].decode(errors="ignore")
