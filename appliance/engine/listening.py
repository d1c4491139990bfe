"""Where the server is reached, and how it stops to be: whoever connected before gets an answer.

A socket that is closed resets the connections that the kernel has queued on it, and aiohttp, told to end, closes those
whose request has not come yet. Both are a client that did nothing wrong and gets no answer at each restart.
"""

import asyncio
import contextlib
import errno
import socket
import weakref
from collections.abc import Iterator

from aiohttp import web

from appliance.errors import HostError, ResourceError

QUEUED_CONNECTIONS = 128
# From connecting to a request's headers, in a client on a busy machine.
SILENCE_LIMIT_S = 1.0
_POLL_S = 0.005
# Of the loop, from an accepted socket to a protocol that knows of it: two, and room.
_TURNS = 5


class Listening:
    """The sockets of an application's runner, from `start` to `stop`."""

    def __init__(self, app: web.Application, runner: web.AppRunner) -> None:
        """`app` must not be frozen yet."""
        self._runner = runner
        self._server: asyncio.Server | None = None
        # The server's sockets once more: what is queued on them when it closes its own is taken from these.
        self._sockets: list[socket.socket] = []
        self._stopping = False
        self._answered: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()
        app.on_response_prepare.append(self._note)

    async def start(self, host: str, port: int, listener: socket.socket | None) -> tuple[str, int]:
        """Listen, on `listener` if it is given; return host and port. The runner must be set up.

        ResourceError if the port is taken, HostError if the address cannot be listened on for another reason.
        """
        loop, protocol = asyncio.get_running_loop(), self._protocol
        try:
            if listener is not None:
                self._server = await loop.create_server(protocol, sock=listener, backlog=QUEUED_CONNECTIONS)
            else:
                self._server = await loop.create_server(protocol, host, port, backlog=QUEUED_CONNECTIONS)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ResourceError(f"{host}:{port} is in use", hint="another process listens there") from error
            raise HostError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self._sockets = [listening.dup() for listening in self._server.sockets]
        found = self._sockets[0].getsockname()
        return (found[0], found[1]) if isinstance(found, tuple) else (host, port)

    async def stop(self) -> None:
        """Listen no longer; return once every connection has had an answer, or said nothing for too long."""
        self._stopping = True
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            loop.remove_reader(listening.fileno())
        # Of what was accepted and has no protocol yet, a server that is closed would lose the socket.
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        queued = [connection for listening in self._sockets for connection in _last_of(listening)]
        for connection in queued:
            await loop.connect_accepted_socket(self._protocol, connection)
        for _ in range(int(SILENCE_LIMIT_S / _POLL_S)):
            if not self._are_silent:
                break
            await asyncio.sleep(_POLL_S)

    @property
    def _protocol(self) -> web.Server:
        protocol = self._runner.server
        if protocol is None:
            raise ValueError("the runner is not set up")
        return protocol

    @property
    def _are_silent(self) -> bool:
        """Whether some connection has had no answer yet."""
        open_ones = (handler.transport for handler in self._protocol.connections)
        return any(transport is not None and transport not in self._answered for transport in open_ones)

    async def _note(self, request: web.Request, response: web.StreamResponse) -> None:
        if request.transport is not None:
            self._answered.add(request.transport)
        if self._stopping:
            response.force_close()
            response.headers["Connection"] = "close"  # aiohttp has made its own headers by now


def _last_of(listening: socket.socket) -> Iterator[socket.socket]:
    """Close a non-blocking socket, and yield first what the kernel has accepted on it, as far as descriptors last."""
    with listening, contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            yield connection
