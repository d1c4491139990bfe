"""What a keeper holds and for whom: slots, shards, leases, and who is filling which slot. Touches no socket."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from appliance.keeper.settings import Slot
from appliance.keeper.shard import Shard
from appliance.verdict import Outcome, Verdict

SlotKey = tuple[str, int]
REMEMBERED_VERDICTS = 20


class State(StrEnum):
    """Derived, never stored."""

    EMPTY = "empty"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(eq=False)
class Lease:
    """A connection that has a shard mapped, as long as it is open."""

    client: str
    pid: int
    uid: int
    shard_id: str
    outcome: Outcome
    since: float = field(default_factory=time.time)
    phases_s: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "client": self.client,
            "pid": self.pid,
            "uid": self.uid,
            "shard_id": self.shard_id,
            "verdict": str(self.outcome),
            "since": self.since,
            "phases_s": self.phases_s,
        }


class Holdings:
    """The slots of one model. Shards put in are owned here until they are taken out."""

    def __init__(self) -> None:
        self._shards: dict[SlotKey, Shard | None] = {}
        self._donors: dict[SlotKey, object] = {}
        self._changed = asyncio.Event()
        self.leases: set[Lease] = set()
        self.verdicts: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_VERDICTS)
        self.verdict_counts: Counter[tuple[str, str]] = Counter()
        self.progress = ""
        self.trouble = ""

    def lay_out(self, slots: Iterable[Slot]) -> None:
        """Set which slots there are; called once, before anything is put in."""
        self._shards = {slot.key: None for slot in slots}

    @property
    def state(self) -> State:
        if self._shards and all(self._shards.values()):
            return State.RESIDENT
        return State.LOADING if self._donors else State.EMPTY

    @property
    def slot_keys(self) -> set[SlotKey]:
        return set(self._shards)

    @property
    def missing(self) -> list[SlotKey]:
        return [key for key, shard in self._shards.items() if shard is None]

    @property
    def size_bytes(self) -> int:
        return sum(shard.record.size_bytes for shard in self.shards())

    def shards(self) -> Iterator[Shard]:
        return (shard for shard in self._shards.values() if shard is not None)

    def shard(self, key: SlotKey) -> Shard | None:
        return self._shards.get(key)

    def shard_of_id(self, shard_id: str) -> Shard | None:
        return next((shard for shard in self.shards() if shard.record.shard_id == shard_id), None)

    def put(self, shard: Shard) -> None:
        """Fill an empty slot. KeyError where there is no such slot, ValueError where it is filled."""
        if self._shards[shard.slot] is not None:
            raise ValueError(f"slot {shard.slot} is filled")
        self._shards[shard.slot] = shard
        self.progress = ""
        self.touch()

    def take(self, key: SlotKey) -> Shard | None:
        """Empty a slot; the caller owns what was in it."""
        shard, self._shards[key] = self._shards[key], None
        self.touch()
        return shard

    def leased(self, shard: Shard) -> list[Lease]:
        return [lease for lease in self.leases if lease.shard_id == shard.record.shard_id]

    def donor(self, key: SlotKey) -> object | None:
        """Return whoever fills this slot now."""
        return self._donors.get(key)

    def set_donor(self, key: SlotKey, donor: object) -> None:
        self._donors[key] = donor
        self.touch()

    def forget_donor(self, donor: object) -> None:
        """Let go of every slot that this donor was filling."""
        if gone := [key for key, filling in self._donors.items() if filling is donor]:
            for key in gone:
                del self._donors[key]
            self.touch()

    def judge(self, verdict: Verdict, *, client: str) -> None:
        """Remember a verdict for status and metrics."""
        reason = "" if verdict.reason is None else str(verdict.reason)
        self.verdict_counts[str(verdict.outcome), reason] += 1
        self.verdicts.append({"client": client, "time": time.time(), **verdict.to_json()})

    def touch(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return after the next change."""
        await self._changed.wait()
