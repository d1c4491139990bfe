"""What a keeper begins with: which of the shards that it was given back it serves, and in which slots.

Pure: it decides, and the keeper acts. Resident weights stay until the checkpoint that replaces them is verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.keeper.settings import KeeperSettings, Slot
from appliance.keeper.shard import Shard


@dataclass(frozen=True)
class Start:
    """Slots to lay out, shards to serve in them, those of these that are to be replaced, and shards to free at once."""

    slots: tuple[Slot, ...]
    keep: tuple[Shard, ...]
    foreign: tuple[Shard, ...]
    drop: tuple[Shard, ...]


def plan(shards: Sequence[Shard], *, settings: KeeperSettings, last: KeeperSettings | None, refused: bool) -> Start:
    """Return how to begin with what was given back.

    `settings` are what the manifest says now; `last`, where they are known, those that the shards were loaded under.
    While the checkpoint is refused, and until a new one is verified, every shard stays in the slot that it had.
    """
    target = last.target if refused and last is not None else settings.target
    kept: dict[tuple[str, int], Shard] = {}
    drop = []
    # Where two fit one slot, the one of the target wins: it was loaded after the other had to go.
    for shard in sorted(shards, key=lambda shard: shard.record.target != target):
        if shard.slot in kept:
            drop.append(shard)
        else:
            kept[shard.slot] = shard
    keep = tuple(kept.values())
    foreign = () if refused else tuple(shard for shard in keep if not _wanted(shard, settings))
    slots = _slots_of(keep, last) if refused or foreign else settings.slots
    return Start(slots, keep, foreign, tuple(drop))


def _wanted(shard: Shard, settings: KeeperSettings) -> bool:
    slot = Slot(shard.record.role, shard.record.rank, shard.record.device)
    return shard.record.target == settings.target and slot in settings.slots


def _slots_of(shards: Sequence[Shard], last: KeeperSettings | None) -> tuple[Slot, ...]:
    slots = {} if last is None else {slot.key: slot for slot in last.slots}
    slots |= {shard.slot: Slot(shard.record.role, shard.record.rank, shard.record.device) for shard in shards}
    return tuple(slots.values())
