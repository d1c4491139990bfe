"""What a keeper answers to each message of a client: who may attach, fill a slot, evict, and why not."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from appliance import wire
from appliance.errors import HostError, PeerError, ResourceError
from appliance.events import ERROR, INFO, WARNING, event
from appliance.fingerprint import Fingerprint
from appliance.keeper.connection import Connection, GoneError, RefuseError
from appliance.keeper.custody import Custody
from appliance.keeper.holdings import Holdings, Lease, SlotKey
from appliance.keeper.shard import Shard, checked
from appliance.keeper.status import root_digest
from appliance.lines import printable
from appliance.verdict import Outcome, Reason, Verdict, refused

MAX_WAIT_S = 7 * 24 * 3600.0
MAX_CLIENT_CHARS = 100
MAX_TEXT_CHARS = 200
MAX_DETAIL_CHARS = 2000
MAX_PHASES = 40
STALE_AGAIN_S = 600.0


class Answers:
    """Answers for one model's holdings. `target` is None while nothing may be donated."""

    def __init__(
        self,
        holdings: Holdings,
        custody: Custody,
        *,
        model: str,
        target: Callable[[], Fingerprint | None],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._holdings = holdings
        self._custody = custody
        self._model = model
        self._target = target
        self._status = status
        self._storing: set[str] = set()
        self._stale_again_at = 0.0

    async def answer(self, connection: Connection, packet: wire.Packet) -> None:
        """Do what a message asks. RefuseError is the answer no; PeerError ends the connection."""
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
                await self._offer(connection, asked)
            case wire.Progress() as said:
                self._progress(connection, said)
            case wire.Donate():
                await self._donate(connection, packet)
            case wire.Report() as said:
                await self._report(connection, said)
            case wire.Scrubbed() as said:
                self._scrubbed(connection, said)
            case wire.CheckpointSeen() as said:
                self._checkpoint_seen(connection, said)
            case wire.Evict() as asked:
                await self._evict(connection, asked)
            case other:
                packet.close()
                raise PeerError(f"{other.op!r} is nothing a client says")

    def forget(self, connection: Connection) -> None:
        """End the leases and the grants of a connection that is closed."""
        self._holdings.forget_donor(connection)
        if connection.leases:
            self._holdings.leases -= connection.leases
            event(f"lease ended: {connection.client}", model=self._model, pid=connection.peer.pid)
            self._holdings.touch()

    async def _describe(self, connection: Connection, asked: wire.Describe) -> None:
        key = self._slot(asked.role, asked.rank)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(asked.wait_s, 0.0), MAX_WAIT_S)
        told = ""
        while (shard := self._holdings.shard(key)) is None or self._holdings.clearing:
            # Nothing will come while the checkpoint is refused.
            if self._holdings.refusal or loop.time() >= deadline:
                raise RefuseError(self._why_not_resident())
            if (text := self._holdings.progress or self._holdings.trouble) != told:
                told = text
                connection.send(wire.Progress(text=text[:MAX_TEXT_CHARS]))
            with connection.stirring() as stirred:
                change = asyncio.ensure_future(self._holdings.changed())
                try:
                    await asyncio.wait(
                        {stirred, change}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    change.cancel()
                if stirred.done():
                    await _expect_gone(connection)
        connection.described = True
        connection.send(wire.Described(shard_id=shard.record.shard_id), [shard.held, shard.configs])

    def _attach(self, connection: Connection, asked: wire.Attach) -> None:
        _name(connection, asked.client)
        shard = self._holdings.shard(self._slot(asked.role, asked.rank))
        if shard is None:
            verdict = self._why_not_resident()
        else:
            fields = Fingerprint.from_json(asked.fingerprint).differences(shard.record.fingerprint)
            verdict = refused(Reason.FINGERPRINT_DIFFERS, fields=fields) if fields else Verdict(Outcome.HIT)
        if shard is None or verdict.outcome is not Outcome.HIT:
            self._judge(connection, verdict)
            raise RefuseError(verdict)
        try:
            connection.send(wire.Attached(shard_id=shard.record.shard_id), shard.slabs)
        finally:
            # Afterwards: no engine waits for our log. And whether or not it heard of it.
            self._judge(connection, verdict)
        self._lease(connection, shard, Outcome.HIT)

    def _renew(self, connection: Connection, asked: wire.Renew) -> None:
        _name(connection, asked.client)
        shard = self._holdings.shard_of_id(asked.shard_id)
        if shard is None and self._holdings.clearing:
            raise RefuseError(refused(Reason.NO_ROOM, self._holdings.clearing))
        if shard is None:
            raise RefuseError(
                refused(Reason.UNKNOWN_SHARD, "these weights are no longer held; running engines keep them")
            )
        connection.send(wire.Renewed())
        self._lease(connection, shard, Outcome.HIT)
        if self._holdings.clearing:
            connection.send(wire.Leave(detail=self._holdings.clearing))
        event(f"lease renewed: {connection.client}", model=self._model, pid=connection.peer.pid)

    async def _offer(self, connection: Connection, asked: wire.Offer) -> None:
        _name(connection, asked.client)
        key = self._slot(asked.role, asked.rank)
        _only_owner(connection, "fill a slot")
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
            self._holdings.take(key)
        self._holdings.set_donor(key, connection)
        if shard is not None:
            await asyncio.to_thread(self._custody.drop, shard)
        connection.send(wire.Granted())

    def _progress(self, connection: Connection, said: wire.Progress) -> None:
        # Its grant may have been taken back an instant ago, so this is no error.
        if self._holdings.is_donor(connection):
            self._holdings.progress = printable(said.text[:MAX_TEXT_CHARS])
            self._holdings.touch()

    async def _donate(self, connection: Connection, packet: wire.Packet) -> None:
        try:
            shard = self._donation(connection, packet)
        except PeerError as error:
            packet.close()
            if isinstance(error, RefuseError):
                raise
            raise RefuseError(refused(Reason.BAD_DONATION, str(error))) from error
        await self._store(connection, shard)
        self._holdings.end_donation(shard.slot)
        self._holdings.put(shard)
        self._judge(connection, Verdict(Outcome.DONATED), digest=shard.record.fingerprint.root_digest)
        self._lease(connection, shard, Outcome.DONATED)
        connection.send(wire.Donated(shard_id=shard.record.shard_id))

    def _donation(self, connection: Connection, packet: wire.Packet) -> Shard:
        """Return the shard of a donation; PeerError unless it is whole, was granted, and is of the target."""
        # First: nobody else gets us to parse anything.
        if not self._holdings.is_donor(connection):
            raise PeerError("nobody granted this client to fill a slot")
        held, configs, *slabs = packet.descriptors
        shard = checked(held, configs, slabs)
        record = shard.record
        if self._holdings.donor(shard.slot) is not connection:
            raise PeerError(f"nobody granted this client to fill {record.role} rank {record.rank}")
        # The device decides how slabs are checked.
        if record.device != (device := self._holdings.device(shard.slot)):
            raise PeerError(f"{record.role} rank {record.rank} lives on {device}, not on {record.device}")
        if self._holdings.shard_of_id(record.shard_id) is not None or record.shard_id in self._storing:
            raise PeerError(f"shard {record.shard_id} is held already")
        target = self._target()
        if target is None or record.target != target:
            fields = () if target is None else target.differences(record.target)
            raise RefuseError(refused(Reason.TARGET_DIFFERS, "made for another target", fields=fields))
        if fields := target.violations(record.fingerprint):
            raise RefuseError(refused(Reason.TARGET_DIFFERS, "its fingerprint contradicts its target", fields=fields))
        return shard

    async def _store(self, connection: Connection, shard: Shard) -> None:
        """Have the service manager keep a shard; RefuseError, nothing half-stored, where that fails."""
        self._storing.add(shard.record.shard_id)
        try:
            await asyncio.to_thread(self._custody.store, shard)
            if self._holdings.donor(shard.slot) is not connection:
                raise ResourceError("the grant was taken back meanwhile")
        except (ResourceError, HostError) as error:
            await asyncio.to_thread(self._custody.drop, shard)
            raise RefuseError(refused(Reason.BUSY, str(error))) from error
        finally:
            self._storing.discard(shard.record.shard_id)

    async def _report(self, connection: Connection, said: wire.Report) -> None:
        if said.verdict not in set(Outcome):
            raise PeerError(f"unknown verdict {said.verdict[:40]!r}")
        for lease in connection.leases:
            lease.phases_s = {name[:40]: seconds for name, seconds in list(said.phases_s.items())[:MAX_PHASES]}
        if said.verdict == Outcome.REFUSED:
            try:
                reason = Reason(said.reason)
            except ValueError as error:
                raise PeerError(f"unknown reason {said.reason[:40]!r}") from error
            self._judge(connection, refused(reason, printable(said.detail[:MAX_DETAIL_CHARS])))
            if reason is Reason.STALE_MEMORY:
                await self._drop_stale(connection)

    async def _drop_stale(self, connection: Connection) -> None:
        """Free shards that this client could not map, so that they are loaded again; not where others have them mapped.

        Not twice in a while either: what cannot be mapped may be the client's own fault.
        """
        now = asyncio.get_running_loop().time()
        if not connection.peer.is_owner or now < self._stale_again_at:
            return
        for lease in set(connection.leases):
            shard = self._holdings.shard_of_id(lease.shard_id)
            if shard is None or self._holdings.leased(shard) != [lease]:
                continue
            self._stale_again_at = now + STALE_AGAIN_S
            self._holdings.take(shard.slot)
            event("freeing weights that their driver does not know any more", priority=WARNING, model=self._model)
            await asyncio.to_thread(self._custody.drop, shard)

    def _scrubbed(self, connection: Connection, said: wire.Scrubbed) -> None:
        shard = self._holdings.shard_of_id(said.shard_id)
        if shard is None or all(lease.shard_id != said.shard_id for lease in connection.leases):
            raise RefuseError(refused(Reason.UNKNOWN_SHARD, "this client has no such weights attached"))
        if not set(said.damaged) <= set(range(len(shard.slabs))):
            raise PeerError(f"scrub of slabs that the shard has not: {len(shard.slabs)} are held")
        self._holdings.note_scrub(shard, sorted(set(said.damaged)))
        slabs = ", ".join(map(str, sorted(set(said.damaged))))
        event(
            f"scrub by {connection.client}: {shard.record.role} rank {shard.record.rank} "
            + (f"is DAMAGED in slab {slabs}" if slabs else "is intact"),
            priority=ERROR if slabs else INFO,
            model=self._model,
            pid=connection.peer.pid,
            root_digest=shard.record.fingerprint.root_digest,
        )
        connection.send(wire.Noted())

    def _checkpoint_seen(self, connection: Connection, said: wire.CheckpointSeen) -> None:
        _only_owner(connection, "say what is on disk")
        refusal = printable(said.refusal[:MAX_DETAIL_CHARS])
        if refusal and refusal != self._holdings.refusal:
            self._judge(connection, refused(Reason.CHECKPOINT_REFUSED, refusal))
        self._holdings.refusal = refusal
        self._holdings.touch()
        connection.send(wire.Noted())

    async def _evict(self, connection: Connection, asked: wire.Evict) -> None:
        _only_owner(connection, "evict")
        if not asked.force:
            if self._holdings.leases:
                lease = min(self._holdings.leases, key=lambda lease: lease.since)
                raise RefuseError(refused(Reason.LEASED, f"in use by {lease.client} (pid {lease.pid})"))
            if self._holdings.loading:
                raise RefuseError(refused(Reason.LOADING, self._holdings.progress or "a load is running"))
        size_bytes = self._holdings.size_bytes
        self._holdings.evicted = True
        self._holdings.clearing = ""
        self._holdings.forget_donors()
        shards = [shard for key in self._holdings.slot_keys if (shard := self._holdings.take(key)) is not None]
        await asyncio.to_thread(self._custody.drop, *shards)
        event(f"evicted {size_bytes} bytes", model=self._model)
        connection.send(wire.Evicted(size_bytes=size_bytes))

    def _lease(self, connection: Connection, shard: Shard, outcome: Outcome) -> None:
        # One for each shard, however often a client asks for it.
        if all(lease.shard_id != shard.record.shard_id for lease in connection.leases):
            peer = connection.peer
            lease = Lease(
                connection.client,
                peer.pid,
                peer.uid,
                shard.record.shard_id,
                outcome,
                ask_to_leave=lambda why: _ask_to_leave(connection, why),
            )
            connection.leases.add(lease)
            self._holdings.leases.add(lease)
            self._holdings.touch()

    def _judge(self, connection: Connection, verdict: Verdict, *, digest: str | None = None) -> None:
        self._holdings.judge(verdict, client=connection.client)
        event(
            f"attach by {connection.client}: {verdict}",
            priority=WARNING if verdict.outcome is Outcome.REFUSED else INFO,
            model=self._model,
            pid=connection.peer.pid,
            verdict=verdict.outcome,
            reason=verdict.reason,
            root_digest=root_digest(self._holdings) if digest is None else digest,
        )

    def _why_not_resident(self) -> Verdict:
        holdings = self._holdings
        if holdings.refusal:
            return refused(Reason.CHECKPOINT_REFUSED, holdings.refusal)
        if holdings.loading:
            return refused(Reason.LOADING, holdings.progress or "another process is loading these weights")
        if holdings.evicted:
            return refused(Reason.NOT_RESIDENT, "evicted by the operator")
        if holdings.trouble:
            return refused(Reason.LOADER_FAILED, holdings.trouble)
        return refused(Reason.NOT_RESIDENT, "nothing is loaded yet")

    def _slot(self, role: str, rank: int) -> SlotKey:
        key = (role, rank)
        if key not in self._holdings.slot_keys:
            known = ", ".join(f"{name} rank {number}" for name, number in sorted(self._holdings.slot_keys))
            detail = f"no {printable(role[:40])} rank {rank} here; there is {known}"
            raise RefuseError(refused(Reason.NOT_RESIDENT, detail))
        return key


async def _expect_gone(connection: Connection) -> None:
    packet = await connection.receive()
    if packet is None:
        raise GoneError(f"{connection.client} is gone")
    packet.close()
    raise PeerError(f"{connection.client} spoke while it waited")


def _ask_to_leave(connection: Connection, why: str) -> None:
    # One who does not read ends when it does; one who is gone has ended.
    with contextlib.suppress(PeerError):
        connection.send(wire.Leave(detail=why))


def _name(connection: Connection, client: str) -> None:
    connection.client = printable(client[:MAX_CLIENT_CHARS])


def _only_owner(connection: Connection, act: str) -> None:
    if not connection.peer.is_owner:
        detail = f"user {connection.peer.uid} may attach, but not {act}"
        raise RefuseError(refused(Reason.NOT_PERMITTED, detail))
