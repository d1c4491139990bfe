"""The socket that one unit's NOTIFY_SOCKET names: datagrams, their senders, and descriptors in either hand."""

import asyncio
import os
import socket
import struct
from array import array
from collections.abc import Callable
from pathlib import Path

from appliance.descriptors import Descriptor, close_all
from appliance.errors import HostError, PeerError
from appliance.up.message import LIMIT_BYTES, LIMIT_DESCRIPTORS, Message, parse

LIMIT_PATH_BYTES = 107  # sun_path holds 108 with the NUL

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(LIMIT_DESCRIPTORS * 4)
# One unit that talks without pause must not keep the others from being heard.
_TURN_MESSAGES = 64


class NotifySocket:
    """Receives for one unit. `take` owns the descriptors it is given; `refuse` is told why a datagram was dropped."""

    def __init__(
        self,
        path: Path,
        *,
        belongs: Callable[[int], bool],
        take: Callable[[Message, list[Descriptor]], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._belongs = belongs
        self._take = take
        self._refuse = refuse
        self.path = path
        self._socket = _bound(path)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self.receive, _TURN_MESSAGES)

    def receive(self, limit: int) -> int:
        """Handle what has arrived, at most `limit` datagrams, and return how many there were."""
        for count in range(limit):
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    LIMIT_BYTES + 1, _ANCILLARY_BYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return count
            self._receive_one(data, ancillary, flags)
        return limit

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self.path.unlink(missing_ok=True)

    def _receive_one(self, data: bytes, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        pid, descriptors = _unpack(ancillary)
        try:
            if flags & socket.MSG_CTRUNC:
                raise PeerError("a notification with more descriptors than can be received")
            if flags & socket.MSG_TRUNC:
                raise PeerError(f"a notification of more than {LIMIT_BYTES} bytes")
            if not self._belongs(pid):
                raise PeerError(f"a notification from process {pid}, which may not speak for this unit")
            message = parse(data)
            if message.barrier and len(descriptors) != 1:
                raise PeerError(f"a barrier with {len(descriptors)} descriptors")
        except PeerError as error:
            close_all(descriptors)
            self._refuse(error.message)
            return
        if message.barrier or not message.store:
            # All that was sent before has been handled: closing the barrier's descriptor is the answer.
            close_all(descriptors)
            descriptors = []
        self._take(message, descriptors)


def _bound(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > LIMIT_PATH_BYTES:
        raise HostError(
            f"{path}: longer than the {LIMIT_PATH_BYTES} bytes of a socket's address",
            hint="choose a runtime directory with a shorter path",
        )
    path.unlink(missing_ok=True)  # of a supervisor that was killed; ours alone, the directory is locked
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        # Before bind: a datagram that comes earlier would carry no sender.
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        receiver.bind(os.fspath(path))
    except OSError as error:
        receiver.close()
        raise HostError(f"{path}: cannot listen for notifications: {error.strerror}") from error
    return receiver


def _unpack(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, list[Descriptor]]:
    pid, descriptors = 0, []
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            numbers = array("i", data[: len(data) - len(data) % 4])
            descriptors += [Descriptor(number) for number in numbers]
        elif kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            pid = _CREDENTIALS.unpack_from(data)[0]
    return pid, descriptors
