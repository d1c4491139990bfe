"""Answers clients on a SOCK_SEQPACKET socket. A client's fault gets a reply and costs only that client."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance import wire
from appliance.errors import HostError, PeerError, ResourceError
from appliance.events import WARNING, event
from appliance.fingerprint import Fingerprint
from appliance.keeper.connection import Connection
from appliance.keeper.custody import Custody
from appliance.keeper.holdings import Holdings, Lease, SlotKey
from appliance.keeper.shard import Shard, checked
from appliance.verdict import Outcome, Reason, Verdict, refused

MAX_CONNECTIONS = 512
MAX_CONNECTIONS_OF_ONE_PROCESS = 64
SILENT_CLIENT_TIMEOUT_S = 20.0
ACCEPT_RETRY_S = 0.5
MAX_WAIT_S = 7 * 24 * 3600.0


class RefuseError(PeerError):
    """A request that is answered with a refusal; the connection goes on."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class KeeperServer:
    """Serves one model's holdings."""

    def __init__(
        self,
        holdings: Holdings,
        custody: Custody,
        *,
        model: str,
        gid: int | None,
        target: Callable[[], Fingerprint | None],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._holdings = holdings
        self._custody = custody
        self._model = model
        self._gid = gid
        self._target = target
        self._status = status
        self._connections: dict[asyncio.Task[None], int] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled, or until something of ours fails; then close every connection."""
        loop = asyncio.get_running_loop()
        accepting = asyncio.create_task(self._accept(listener))
        self._failed: asyncio.Future[None] = loop.create_future()
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
        loop = asyncio.get_running_loop()
        while True:
            try:
                channel, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those who are connected go on
                event(f"cannot accept a client: {error.strerror}", priority=WARNING, model=self._model)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            task = asyncio.create_task(self._serve_one(channel))
            self._connections[task] = 0
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _serve_one(self, channel: socket.socket) -> None:
        try:
            connection = Connection(channel)
        except OSError:  # gone before it was looked at
            channel.close()
            return
        try:
            self._admit(connection)
            await self._converse(connection)
        except RefuseError as error:
            self._refuse(connection, error.verdict)
        except PeerError as error:
            event(f"client refused: {error}", priority=WARNING, model=self._model, pid=connection.peer.pid)
            self._refuse(connection, refused(Reason.PROTOCOL, str(error)))
        finally:
            self._holdings.leases -= connection.leases
            self._holdings.forget_donor(connection)
            connection.close()
            if connection.leases:
                event(f"lease ended: {connection.client}", model=self._model, pid=connection.peer.pid)
                self._holdings.touch()

    def _admit(self, connection: Connection) -> None:
        peer = connection.peer
        if (task := asyncio.current_task()) is not None:
            self._connections[task] = peer.pid
        # One process that opens them all must not keep the others out.
        if list(self._connections.values()).count(peer.pid) > MAX_CONNECTIONS_OF_ONE_PROCESS:
            raise RefuseError(
                refused(Reason.BUSY, f"more than {MAX_CONNECTIONS_OF_ONE_PROCESS} connections of pid {peer.pid}")
            )
        if len(self._connections) > MAX_CONNECTIONS:
            raise RefuseError(refused(Reason.BUSY, f"more than {MAX_CONNECTIONS} connections"))
        if peer.is_owner or (self._gid is not None and self._gid in peer.gids):
            return
        detail = f"user {peer.uid} is neither the keeper's user nor in its group"
        event(f"client refused: {detail}", priority=WARNING, model=self._model, pid=peer.pid, verdict="refused")
        raise RefuseError(refused(Reason.NOT_PERMITTED, detail))

    async def _converse(self, connection: Connection) -> None:
        while True:
            # A lease or a donor may be silent for as long as it likes; anybody else holds a slot of ours for nothing.
            settled = bool(connection.leases) or self._is_donor(connection)
            try:
                packet = await asyncio.wait_for(connection.receive(), None if settled else SILENT_CLIENT_TIMEOUT_S)
            except TimeoutError:
                raise PeerError(f"{connection.client} was silent for {SILENT_CLIENT_TIMEOUT_S:g} s") from None
            if packet is None:
                return
            try:
                await self._answer(connection, packet)
            except RefuseError as error:
                self._refuse(connection, error.verdict)

    async def _answer(self, connection: Connection, packet: wire.Packet) -> None:
        match packet.message:
            case wire.Status():
                connection.send(wire.StatusReply(status=self._status()))
            case wire.Describe() as asked:
                await self._describe(connection, asked)
            case wire.Attach() as asked:
                self._attach(connection, asked)
            case wire.Renew() as asked:
                self._renew(connection, asked)
            case wire.Offer() as asked:
                self._offer(connection, asked)
            case wire.Progress() as said:
                self._progress(connection, said)
            case wire.Donate():
                await self._donate(connection, packet)
            case wire.Report() as said:
                self._report(connection, said)
            case wire.Evict() as asked:
                self._evict(connection, asked)
            case other:
                raise PeerError(f"{other.op!r} is nothing a client says")

    async def _describe(self, connection: Connection, asked: wire.Describe) -> None:
        key = self._slot(asked.role, asked.rank)
        deadline = asyncio.get_running_loop().time() + min(max(asked.wait_s, 0.0), MAX_WAIT_S)
        told = ""
        gone = asyncio.ensure_future(connection.receive())
        try:
            while (shard := self._holdings.shard(key)) is None:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    raise RefuseError(self._why_not_resident())
                if (text := self._holdings.progress or self._holdings.trouble) != told:
                    told = text
                    connection.send(wire.Progress(text=text[:200]))
                change = asyncio.ensure_future(self._holdings.changed())
                done, _ = await asyncio.wait({gone, change}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if gone in done:
                    packet = gone.result()
                    if packet is not None:
                        packet.close()
                    raise PeerError(f"{connection.client} went away or spoke while it waited")
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, PeerError):
                await gone
        connection.send(wire.Described(shard_id=shard.record.shard_id), [shard.held, shard.configs])

    def _attach(self, connection: Connection, asked: wire.Attach) -> None:
        shard = self._holdings.shard(self._slot(asked.role, asked.rank))
        connection.client = asked.client[:100]
        if shard is None:
            verdict = self._why_not_resident()
        else:
            fields = Fingerprint.from_json(asked.fingerprint).differences(shard.record.fingerprint)
            verdict = refused(Reason.FINGERPRINT_DIFFERS, fields=fields) if fields else Verdict(Outcome.HIT)
        self._judge(connection, verdict)
        if shard is None or verdict.outcome is not Outcome.HIT:
            raise RefuseError(verdict)
        connection.send(wire.Attached(shard_id=shard.record.shard_id), shard.slabs)
        self._lease(connection, shard, Outcome.HIT)

    def _renew(self, connection: Connection, asked: wire.Renew) -> None:
        connection.client = asked.client[:100]
        shard = self._holdings.shard_of_id(asked.shard_id[:16])
        if shard is None:
            raise RefuseError(
                refused(Reason.UNKNOWN_SHARD, "these weights are no longer held; running engines keep them")
            )
        connection.send(wire.Renewed())
        self._lease(connection, shard, Outcome.HIT)
        event(f"lease renewed: {connection.client}", model=self._model, pid=connection.peer.pid)

    def _offer(self, connection: Connection, asked: wire.Offer) -> None:
        key = self._slot(asked.role, asked.rank)
        connection.client = asked.client[:100]
        self._only_owner(connection, "fill a slot")
        if self._holdings.donor(key) not in (None, connection):
            raise RefuseError(refused(Reason.LOADING, "another process is loading these weights"))
        target = self._target()
        if target is None:
            raise RefuseError(self._why_not_resident())
        if fields := Fingerprint.from_json(asked.target).differences(target):
            raise RefuseError(refused(Reason.TARGET_DIFFERS, "this keeper is for other weights", fields=fields))
        shard = self._holdings.shard(key)
        if shard is not None:
            if not asked.replace:
                raise RefuseError(refused(Reason.OCCUPIED, "these weights are resident"))
            if leases := self._holdings.leased(shard):
                raise RefuseError(refused(Reason.LEASED, f"in use by {leases[0].client} (pid {leases[0].pid})"))
            self._drop(key)
        self._holdings.set_donor(key, connection)
        connection.send(wire.Granted())

    def _progress(self, connection: Connection, said: wire.Progress) -> None:
        if not self._is_donor(connection):
            raise PeerError("progress from a client that loads nothing")
        self._holdings.progress = "".join(filter(str.isprintable, said.text))[:200]
        self._holdings.touch()

    async def _donate(self, connection: Connection, packet: wire.Packet) -> None:
        held, configs, *slabs = packet.descriptors
        try:
            shard = checked(held, configs, slabs)
            self._may_donate(connection, shard)
        except PeerError as error:
            packet.close()
            if isinstance(error, RefuseError):
                raise
            raise RefuseError(refused(Reason.BAD_DONATION, str(error))) from error
        try:
            await asyncio.to_thread(self._custody.store, shard)
        except ResourceError as error:
            self._custody.drop(shard)
            raise RefuseError(refused(Reason.BUSY, str(error))) from error
        self._holdings.forget_donor(connection)
        self._holdings.put(shard)
        verdict = Verdict(Outcome.DONATED)
        self._judge(connection, verdict, root_digest=shard.record.fingerprint.root_digest)
        connection.send(wire.Donated(shard_id=shard.record.shard_id))
        self._lease(connection, shard, Outcome.DONATED)

    def _may_donate(self, connection: Connection, shard: Shard) -> None:
        if self._holdings.donor(shard.slot) is not connection:
            raise PeerError(f"nobody granted this client to fill {shard.record.role} rank {shard.record.rank}")
        if self._holdings.shard_of_id(shard.record.shard_id) is not None:
            raise PeerError(f"shard {shard.record.shard_id} is held already")
        target = self._target()
        if target is None or shard.record.target != target:
            fields = () if target is None else target.differences(shard.record.target)
            raise RefuseError(refused(Reason.TARGET_DIFFERS, "made for another target", fields=fields))
        if fields := target.violations(shard.record.fingerprint):
            raise RefuseError(refused(Reason.TARGET_DIFFERS, "its fingerprint contradicts its target", fields=fields))

    def _report(self, connection: Connection, said: wire.Report) -> None:
        for lease in connection.leases:
            lease.phases_s |= {name[:40]: seconds for name, seconds in list(said.phases_s.items())[:40]}
        if said.verdict == Outcome.REFUSED:
            try:
                self._judge(connection, refused(Reason(said.reason), said.detail))
            except ValueError as error:
                raise PeerError(f"unknown reason {said.reason[:40]!r}") from error

    def _evict(self, connection: Connection, asked: wire.Evict) -> None:
        self._only_owner(connection, "evict")
        if self._holdings.leases and not asked.force:
            lease = min(self._holdings.leases, key=lambda lease: lease.since)
            raise RefuseError(refused(Reason.LEASED, f"in use by {lease.client} (pid {lease.pid})"))
        size_bytes = self._holdings.size_bytes
        for key in self._holdings.slot_keys:
            self._drop(key)
        self._holdings.trouble = "evicted by the operator"
        event(f"evicted {size_bytes} bytes", model=self._model)
        connection.send(wire.Evicted(size_bytes=size_bytes))

    def _drop(self, key: SlotKey) -> None:
        shard = self._holdings.take(key)
        if shard is not None:
            self._custody.drop(shard)

    def _lease(self, connection: Connection, shard: Shard, outcome: Outcome) -> None:
        peer = connection.peer
        lease = Lease(connection.client, peer.pid, peer.uid, shard.record.shard_id, outcome)
        connection.leases.add(lease)
        self._holdings.leases.add(lease)
        self._holdings.touch()

    def _judge(self, connection: Connection, verdict: Verdict, **fields: str) -> None:
        self._holdings.judge(verdict, client=connection.client)
        event(
            f"attach by {connection.client}: {verdict}",
            priority=WARNING if verdict.outcome is Outcome.REFUSED else 6,
            model=self._model,
            pid=connection.peer.pid,
            verdict=verdict.outcome,
            reason=verdict.reason,
            **fields,
        )

    def _refuse(self, connection: Connection, verdict: Verdict) -> None:
        # The facts that differ may not fit a packet: the first few say enough.
        fields = [[field.name, field.wanted[:500], field.held[:500]] for field in verdict.fields[:40]]
        message = wire.Refused(reason=str(verdict.reason), detail=verdict.detail[:2000], fields=fields)
        with contextlib.suppress(PeerError):
            connection.send(message)

    def _why_not_resident(self) -> Verdict:
        if self._holdings.progress:
            return refused(Reason.LOADING, self._holdings.progress)
        if self._holdings.trouble:
            return refused(Reason.LOADER_FAILED, self._holdings.trouble)
        return refused(Reason.NOT_RESIDENT, "nothing is loaded yet")

    def _slot(self, role: str, rank: int) -> SlotKey:
        key = (role, rank)
        if key not in self._holdings.slot_keys:
            known = ", ".join(f"{name} rank {number}" for name, number in sorted(self._holdings.slot_keys))
            raise RefuseError(refused(Reason.NOT_RESIDENT, f"no {role[:40]} rank {rank} here; there is {known}"))
        return key

    def _is_donor(self, connection: Connection) -> bool:
        return any(self._holdings.donor(key) is connection for key in self._holdings.slot_keys)

    def _only_owner(self, connection: Connection, act: str) -> None:
        if not connection.peer.is_owner:
            detail = f"user {connection.peer.uid} may attach, but not {act}"
            raise RefuseError(refused(Reason.NOT_PERMITTED, detail))


def listen(path: Path, *, gid: int | None) -> socket.socket:
    """Return the listening socket, for the owner and one group. The caller holds the lock, so a file there is stale."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        old_mask = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old_mask)
        if gid is not None:
            os.chown(path, -1, gid)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise HostError(f"cannot listen on {path}: {error.strerror or error}") from error
    return listener
