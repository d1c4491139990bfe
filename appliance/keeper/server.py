"""Serves clients on a SOCK_SEQPACKET socket. A client's fault gets a reply and costs only that client."""

import asyncio
import contextlib
import socket

from appliance.errors import PeerError
from appliance.events import WARNING, event
from appliance.keeper.answers import Answers
from appliance.keeper.connection import Connection, GoneError, RefuseError, stirring
from appliance.keeper.holdings import Holdings
from appliance.verdict import Reason, refused

MAX_CONNECTIONS = 512
MAX_CONNECTIONS_OF_ONE_PROCESS = 64
SILENT_CLIENT_TIMEOUT_S = 20.0
ACCEPT_RETRY_S = 0.5


class KeeperServer:
    """Serves one model's holdings to their owner and the members of one group."""

    def __init__(self, holdings: Holdings, answers: Answers, *, model: str, gid: int | None) -> None:
        self._holdings = holdings
        self._answers = answers
        self._model = model
        self._gid = gid
        self._connections: dict[asyncio.Task[None], Connection] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled, or until something of ours fails; then close every connection."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepting = asyncio.create_task(self._accept(listener))
        try:
            await asyncio.wait({accepting, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (accepting, self._failed):
                if ended.done():
                    ended.result()
        finally:
            tasks = [accepting, *self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._failed.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        said = False
        while True:
            try:
                # Not loop.sock_accept: a client that comes just as that is cancelled is lost, with a traceback.
                channel, _ = listener.accept()
            except BlockingIOError:
                with stirring(listener) as stirred:
                    await stirred
                continue
            except OSError as error:  # out of descriptors: those who are connected go on
                if not said:
                    event(f"cannot accept clients: {error.strerror}", priority=WARNING, model=self._model)
                said = True
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            said = False
            self._take_in(channel)
            await asyncio.sleep(0)

    def _take_in(self, channel: socket.socket) -> None:
        try:
            connection = Connection(channel)
        except OSError as error:
            event(f"cannot tell who a client is: {error.strerror or error}", priority=WARNING, model=self._model)
            channel.close()
            return
        task = asyncio.create_task(self._serve_one(connection))
        self._connections[task] = connection
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # Also where the task was cancelled before it began.
        self._connections.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _serve_one(self, connection: Connection) -> None:
        try:
            self._admit(connection)
            await self._converse(connection)
        except GoneError:
            pass
        except PeerError as error:
            verdict = error.verdict if isinstance(error, RefuseError) else refused(Reason.PROTOCOL, str(error))
            event(f"client refused: {verdict}", priority=WARNING, model=self._model, pid=connection.peer.pid)
            with contextlib.suppress(PeerError):
                connection.refuse(verdict)
        finally:
            self._answers.forget(connection)
            connection.close()

    def _admit(self, connection: Connection) -> None:
        peer, connections = connection.peer, self._connections.values()
        if not (peer.is_owner or (self._gid is not None and self._gid in peer.gids)):
            detail = f"user {peer.uid} is neither the keeper's user nor in its group"
            raise RefuseError(refused(Reason.NOT_PERMITTED, detail))
        # One process that opens them all must not keep the others out.
        if sum(other.peer.pid == peer.pid for other in connections) > MAX_CONNECTIONS_OF_ONE_PROCESS:
            detail = f"more than {MAX_CONNECTIONS_OF_ONE_PROCESS} connections of pid {peer.pid}"
            raise RefuseError(refused(Reason.BUSY, detail))
        if len(connections) > MAX_CONNECTIONS:
            raise RefuseError(refused(Reason.BUSY, f"more than {MAX_CONNECTIONS} connections"))

    async def _converse(self, connection: Connection) -> None:
        while True:
            try:
                async with asyncio.timeout(self._patience_s(connection)):
                    packet = await connection.receive()
            except TimeoutError:
                raise PeerError(f"{connection.client} was silent for {SILENT_CLIENT_TIMEOUT_S:g} s") from None
            if packet is None:
                return
            try:
                await self._answers.answer(connection, packet)
            except RefuseError as error:
                connection.refuse(error.verdict)
            # One who talks without a pause must not keep the others from being heard.
            await asyncio.sleep(0)

    def _patience_s(self, connection: Connection) -> float | None:
        # These are silent for good reasons, and for hours; anybody else holds a place of ours for nothing.
        if connection.leases or connection.described or self._holdings.is_donor(connection):
            return None
        return SILENT_CLIENT_TIMEOUT_S
