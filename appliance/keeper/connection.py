"""One client's connection: non-blocking packets, its credentials, and the leases that end with it."""

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from appliance import wire
from appliance.descriptors import Descriptor
from appliance.errors import PeerError
from appliance.keeper.holdings import Lease
from appliance.verdict import Verdict

SO_PEERGROUPS = 59  # Linux; the socket module has no name for it
MAX_GROUPS = 256  # 1024 bytes: more than that the socket module does not ask the kernel for

_UCRED = struct.Struct("iII")
# How many facts of a refusal are told, and how many characters of each: the most that fit a packet.
_REFUSAL_SIZES = ((40, 500), (20, 100), (5, 50))


class RefuseError(PeerError):
    """A request that is answered with a refusal; the connection goes on."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class GoneError(PeerError):
    """The client went away; nobody is left to be told anything."""


@dataclass(frozen=True)
class Credentials:
    """Who connected, as the kernel says."""

    pid: int
    uid: int
    gids: frozenset[int]

    @property
    def is_owner(self) -> bool:
        """Whether this peer may change what is held: root, or the user the keeper runs as."""
        return self.uid in (0, os.geteuid())


class Connection:
    """Owns the socket. Receiving and sending never block the keeper."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self.peer = credentials(channel)
        self.client = f"pid {self.peer.pid}"
        self.leases: set[Lease] = set()
        # Whether the client was told what to compare its files with, which may take it minutes.
        self.described = False

    @property
    def pid(self) -> int:
        return self.peer.pid

    async def receive(self) -> wire.Packet | None:
        """Return the next packet, None when the client is gone; PeerError when it broke the protocol."""
        while True:
            try:
                return wire.receive(self._channel)
            except BlockingIOError:
                with self.stirring() as stirred:
                    await stirred
            except ConnectionError:
                return None

    def send(self, message: wire.Message, descriptors: Iterable[Descriptor] = ()) -> None:
        """Send now; PeerError where the client does not read what it asked for, GoneError where it is gone."""
        try:
            wire.send(self._channel, message, descriptors)
        except BlockingIOError as error:
            raise PeerError(f"{self.client} does not read its replies") from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise GoneError(f"{self.client} is gone") from error
        except OSError as error:
            raise PeerError(f"cannot answer {self.client}: {error.strerror}") from error

    def refuse(self, verdict: Verdict) -> None:
        """Send a refusal, with as many of the differing facts as fit; PeerError as `send`."""
        for facts, chars in _REFUSAL_SIZES:
            fields = [[field.name, field.wanted[:chars], field.held[:chars]] for field in verdict.fields[:facts]]
            message = wire.Refused(reason=str(verdict.reason), detail=verdict.detail[: 4 * chars], fields=fields)
            with contextlib.suppress(PeerError):
                wire.encode(message)
                break
        self.send(message)

    def stirring(self) -> AbstractContextManager["asyncio.Future[None]"]:
        """Give a future that is done once the client has said something or is gone. Reads nothing."""
        return stirring(self._channel)

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def stirring(channel: socket.socket) -> Iterator["asyncio.Future[None]"]:
    """Give a future that is done once there is something to receive or to accept."""
    loop = asyncio.get_running_loop()
    stirred: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, _settle, stirred)
    try:
        yield stirred
    finally:
        loop.remove_reader(channel)


def credentials(channel: socket.socket) -> Credentials:
    """Return SO_PEERCRED and SO_PEERGROUPS of the other end, as they were when it connected.

    Of a process in more than `MAX_GROUPS` groups only the first is known.
    """
    pid, uid, gid = _UCRED.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        groups = channel.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * 4)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        groups = b""
    return Credentials(pid, uid, frozenset({gid, *struct.unpack(f"{len(groups) // 4}I", groups)}))


def _settle(stirred: "asyncio.Future[None]") -> None:
    if not stirred.done():
        stirred.set_result(None)
