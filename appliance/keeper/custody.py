"""Custody: every descriptor of a shard is also in the service manager's store, named so that order does not matter.

    w1.<shard id>.slab.<index>    w1.<shard id>.configs    w1.<shard id>.record    w1.settings

The record is stored last and taken away first: a set without one is what a killed keeper left half-way.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from appliance import memfd
from appliance.descriptors import Descriptor
from appliance.errors import PeerError, ResourceError
from appliance.events import WARNING, event
from appliance.keeper.shard import Shard, checked
from appliance.notify import Named, Notifier

SETTINGS = "w1.settings"
MAX_SETTINGS_BYTES = 1 << 20

_NAME = re.compile(r"w1\.([0-9a-f]{16})\.(record|configs|slab\.(\d{1,3}))")


@dataclass(frozen=True)
class Adopted:
    """What the service manager gave back: whole shards, and the last settings that were valid."""

    shards: tuple[Shard, ...]
    settings: bytes | None


class Custody:
    """Stores shards with the service manager and takes them back."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._stored = 0

    def adopt(self, given: Iterable[Named]) -> Adopted:
        """Return the whole shards among what was given back; anything else is removed from the store and closed."""
        sets: dict[str, dict[str, Descriptor]] = {}
        settings: bytes | None = None
        strays: list[Named] = []
        for named in given:
            match = _NAME.fullmatch(named.name)
            if named.name == SETTINGS and settings is None:
                settings = _read_settings(named.descriptor)
                self._stored += 1
            elif match and match[2] not in sets.get(match[1], {}):
                sets.setdefault(match[1], {})[match[2]] = named.descriptor
            else:
                strays.append(named)
        shards = []
        for shard_id, parts in sets.items():
            try:
                shards.append(_assemble(shard_id, parts))
                self._stored += len(parts)
            except PeerError as error:
                event(f"dropping stored shard {shard_id}: {error}", priority=WARNING)
                strays += [Named(f"w1.{shard_id}.{part}", descriptor) for part, descriptor in parts.items()]
        kept = {name: part for shard in shards for name, part in _named(shard).items()}
        for stray in strays:
            self._notifier.remove(stray.name)
            stray.descriptor.close()
            # Removal is by name, and a stray can bear the name of something kept.
            if stray.name in kept:
                self._notifier.store(stray.name, kept[stray.name].fileno())
        return Adopted(tuple(shards), settings)

    def store(self, shard: Shard) -> None:
        """Return once the service manager holds every descriptor; ResourceError where its store is too small."""
        descriptors = _named(shard)
        limit = self._notifier.store_limit
        if limit and self._stored + len(descriptors) > limit:
            raise ResourceError(
                f"the service manager keeps at most {limit} descriptors; {self._stored} are stored and this shard "
                f"has {len(descriptors)}",
                hint="raise FileDescriptorStoreMax= of weights@.service",
            )
        for name, descriptor in descriptors.items():
            self._notifier.store(name, descriptor.fileno())
        self._notifier.barrier()
        self._stored += len(descriptors)

    def drop(self, shard: Shard) -> None:
        """Close a shard here and in the store: its memory is free once nobody has it mapped."""
        for name in reversed(_named(shard)):
            self._notifier.remove(name)
            self._stored -= 1
        shard.close()

    def store_settings(self, settings: bytes) -> None:
        """Keep the settings beside the shards, so that a broken manifest later cannot make them useless."""
        with memfd.sealed("settings", [settings]) as descriptor:
            self._notifier.remove(SETTINGS)
            self._notifier.store(SETTINGS, descriptor.fileno())


def _named(shard: Shard) -> dict[str, Descriptor]:
    """Map the store's names to slabs, configs and record, in the order they are stored."""
    prefix = f"w1.{shard.record.shard_id}"
    slabs = {f"{prefix}.slab.{index}": slab for index, slab in enumerate(shard.slabs)}
    return {**slabs, f"{prefix}.configs": shard.configs, f"{prefix}.record": shard.held}


def _assemble(shard_id: str, parts: dict[str, Descriptor]) -> Shard:
    if missing := {"record", "configs"} - parts.keys():
        raise PeerError(f"incomplete: no {' and no '.join(sorted(missing))}")
    slab_names = [f"slab.{index}" for index in range(len(parts) - 2)]
    if missing := set(slab_names) - parts.keys():
        raise PeerError(f"incomplete: {min(missing)} is missing")
    shard = checked(parts["record"], parts["configs"], [parts[name] for name in slab_names])
    if shard.record.shard_id != shard_id:
        raise PeerError(f"its record is that of {shard.record.shard_id}")
    return shard


def _read_settings(descriptor: Descriptor) -> bytes | None:
    with descriptor:
        try:
            return memfd.read(descriptor, what="stored settings", limit_bytes=MAX_SETTINGS_BYTES)
        except PeerError as error:
            event(str(error), priority=WARNING)
            return None
