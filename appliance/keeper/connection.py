"""One client's connection: non-blocking packets, its credentials, and the leases that end with it."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from appliance import wire
from appliance.descriptors import Descriptor
from appliance.errors import PeerError
from appliance.keeper.holdings import Lease

SO_PEERGROUPS = 59  # Linux; the socket module has no name for it
MAX_GROUPS = 65536

_UCRED = struct.Struct("iii")


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

    async def receive(self) -> wire.Packet | None:
        """Return the next packet, None when the client is gone; PeerError when it broke the protocol."""
        while True:
            try:
                return wire.receive(self._channel)
            except BlockingIOError:
                await self._readable()
            except ConnectionError:
                return None

    def send(self, message: wire.Message, descriptors: Iterable[Descriptor] = ()) -> None:
        """Send now; PeerError where the client does not read what it asked for, or is gone."""
        try:
            wire.send(self._channel, message, descriptors)
        except BlockingIOError as error:
            raise PeerError(f"{self.client} does not read its replies") from error
        except OSError as error:
            raise PeerError(f"{self.client} is gone: {error.strerror}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.close()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._channel, _settle, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._channel)


def _settle(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def credentials(channel: socket.socket) -> Credentials:
    """Return SO_PEERCRED and SO_PEERGROUPS of the other end, as they were when it connected."""
    pid, uid, gid = _UCRED.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    groups = channel.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * 4)
    return Credentials(pid, uid, frozenset({gid, *struct.unpack(f"{len(groups) // 4}I", groups)}))
