"""What a keeper holds and for whom: slots, shards, leases, and who is filling which slot. Touches no socket."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from appliance.keeper.settings import Slot
from appliance.keeper.shard import Shard
from appliance.verdict import Outcome, Verdict

SlotKey = tuple[str, int]
REMEMBERED_VERDICTS = 20
SHOWN_SLABS = 20
LOADER = "loader"


class State(StrEnum):
    """Derived, never stored."""

    EMPTY = "empty"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(frozen=True)
class Scrub:
    """When a shard's bytes were last compared with its checksums, and the slabs that differed then."""

    damaged: tuple[int, ...]
    time: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        return {"time": self.time, "damaged": list(self.damaged[:SHOWN_SLABS])}


class Donor(Protocol):
    """Whoever fills slots: `client` is what it calls itself, `pid` what the kernel says."""

    @property
    def client(self) -> str: ...

    @property
    def pid(self) -> int: ...


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
    # Asks whoever holds it to end; says why.
    ask_to_leave: Callable[[str], None] = lambda why: None

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
    """The slots of one model. Shards put in are owned here until they are taken out.

    `loader_pid` is the child that runs to fill slots. `progress` is what goes on now, `trouble` what went wrong last,
    `refusal` why the checkpoint on disk may not be loaded. `clearing` is why whoever leases a shard must end, while
    there is no room for what replaces it beside it. After an eviction nothing is loaded until somebody donates: the
    operator wants the memory.
    """

    def __init__(self) -> None:
        self._slots: dict[SlotKey, Slot] = {}
        self._shards: dict[SlotKey, Shard] = {}
        self._donors: dict[SlotKey, Donor] = {}
        self._changed = asyncio.Event()
        self.leases: set[Lease] = set()
        self.verdicts: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_VERDICTS)
        self.verdict_counts: Counter[tuple[str, str]] = Counter()
        self.scrub_counts: Counter[str] = Counter()
        self._scrubs: dict[str, Scrub] = {}
        self.loader_pid: int | None = None
        self.progress = ""
        self.trouble = ""
        self.refusal = ""
        self.clearing = ""
        self.evicted = False

    def lay_out(self, slots: Iterable[Slot]) -> None:
        """Set which slots there are. What is in one that stays, stays; ValueError where a filled one would go."""
        laid_out = {slot.key: slot for slot in slots}
        if homeless := self._shards.keys() - laid_out.keys():
            raise ValueError(f"slots {sorted(homeless)} are filled")
        self._slots = laid_out
        self.touch()

    @property
    def state(self) -> State:
        if self._slots and not self.missing:
            return State.RESIDENT
        return State.LOADING if self.loading else State.EMPTY

    @property
    def loading(self) -> bool:
        """Whether somebody fills a slot, or is about to."""
        return bool(self._donors or self.progress)

    @property
    def slot_keys(self) -> set[SlotKey]:
        return set(self._slots)

    @property
    def missing(self) -> list[SlotKey]:
        return [key for key in self._slots if key not in self._shards]

    @property
    def unattended(self) -> list[SlotKey]:
        """Missing slots that nobody fills, though somebody should."""
        return [] if self.evicted else [key for key in self.missing if key not in self._donors]

    @property
    def size_bytes(self) -> int:
        return sum(shard.record.size_bytes for shard in self.shards())

    def device(self, key: SlotKey) -> str:
        """Return the device that a slot's weights live on. KeyError where there is no such slot."""
        return self._slots[key].device

    def shards(self) -> Iterator[Shard]:
        return iter(self._shards.values())

    def shard(self, key: SlotKey) -> Shard | None:
        return self._shards.get(key)

    def shard_of_id(self, shard_id: str) -> Shard | None:
        return next((shard for shard in self.shards() if shard.record.shard_id == shard_id), None)

    def put(self, shard: Shard) -> None:
        """Fill an empty slot. KeyError where there is no such slot, ValueError where it is filled."""
        if self._slots[shard.slot].key in self._shards:
            raise ValueError(f"slot {shard.slot} is filled")
        self._shards[shard.slot] = shard
        self.evicted = False
        self.progress = ""
        if not self.missing:
            self.trouble = self.clearing = ""
        self.touch()

    def take(self, key: SlotKey) -> Shard | None:
        """Empty a slot; the caller owns what was in it."""
        shard = self._shards.pop(key, None)
        if shard is not None:
            self._scrubs.pop(shard.record.shard_id, None)
        self.touch()
        return shard

    def leased(self, shard: Shard) -> list[Lease]:
        return [lease for lease in self.leases if lease.shard_id == shard.record.shard_id]

    def donor(self, key: SlotKey) -> Donor | None:
        """Return whoever fills this slot now."""
        return self._donors.get(key)

    def is_donor(self, donor: Donor) -> bool:
        return any(filling is donor for filling in self._donors.values())

    def loaders(self) -> dict[int, str]:
        """Return the processes that fill slots or are about to, by process id, and what they call themselves."""
        child = {} if self.loader_pid is None else {self.loader_pid: LOADER}
        return child | {donor.pid: donor.client for donor in self._donors.values()}

    def set_donor(self, key: SlotKey, donor: Donor) -> None:
        self._donors[key] = donor
        self.touch()

    def end_donation(self, key: SlotKey) -> None:
        """Nobody fills this slot any more."""
        if self._donors.pop(key, None) is not None:
            self._without_donors()

    def forget_donor(self, donor: Donor) -> None:
        """Let go of every slot that this donor was filling."""
        if gone := [key for key, filling in self._donors.items() if filling is donor]:
            for key in gone:
                del self._donors[key]
            self._without_donors()

    def forget_donors(self) -> None:
        """Take every grant back."""
        self._donors.clear()
        self._without_donors()

    def judge(self, verdict: Verdict, *, client: str) -> None:
        """Remember a verdict for status and metrics."""
        reason = "" if verdict.reason is None else str(verdict.reason)
        self.verdict_counts[str(verdict.outcome), reason] += 1
        self.verdicts.append({"client": client, "time": time.time(), **verdict.to_json()})

    def note_scrub(self, shard: Shard, damaged: Iterable[int]) -> None:
        """Remember what a scrub found, for status and metrics."""
        scrub = self._scrubs[shard.record.shard_id] = Scrub(tuple(damaged))
        self.scrub_counts["damaged" if scrub.damaged else "intact"] += 1
        self.touch()

    def scrub(self, shard: Shard) -> Scrub | None:
        """Return what the last scrub of a shard found; None where this keeper has seen none."""
        return self._scrubs.get(shard.record.shard_id)

    def touch(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def changed(self) -> Awaitable[Any]:
        """Return what can be awaited for the next change after this call, whenever the waiting itself begins."""
        return self._changed.wait()

    def _without_donors(self) -> None:
        # What a donor said last is no longer so.
        if not self._donors:
            self.progress = ""
        self.touch()
