"""Custody: every descriptor of a shard is also in the service manager's store, named so that order does not matter.

    w1.<shard id>.slab.<index>    w1.<shard id>.configs    w1.<shard id>.record    w1.settings

The record is stored last and taken away first: a set without one is what a killed keeper left half-way.
"""

import contextlib
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from appliance import memfd
from appliance.descriptors import Descriptor
from appliance.errors import HostError, PeerError, ResourceError
from appliance.events import WARNING, event
from appliance.keeper.shard import Shard, checked, read_record
from appliance.notify import Named, Notifier

SETTINGS = "w1.settings"
MAX_SETTINGS_BYTES = 1 << 20

_NAME = re.compile(r"w1\.([0-9a-f]{16})\.(record|configs|slab\.(?:0|[1-9]\d{0,2}))")


@dataclass(frozen=True)
class Adopted:
    """What the service manager gave back: whole shards, and the last settings that were valid."""

    shards: tuple[Shard, ...]
    settings: bytes | None


class Custody:
    """Stores shards with the service manager and takes them back. Shards may be stored and dropped by any thread."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._settings: bytes | None = None

    def adopt(self, given: Iterable[Named]) -> Adopted:
        """Return the whole shards among what was given back; anything else is removed from the store and closed."""
        parts: dict[str, dict[str, Descriptor]] = {}
        strays: list[Named] = []
        settings: Descriptor | None = None
        for named in given:
            match = _NAME.fullmatch(named.name)
            if named.name == SETTINGS and settings is None and self._read_settings(named.descriptor):
                settings = named.descriptor
            elif match and match[2] not in parts.get(match[1], {}):
                parts.setdefault(match[1], {})[match[2]] = named.descriptor
            else:
                strays.append(named)
        shards = []
        for shard_id, found in parts.items():
            try:
                shards.append(_assemble(shard_id, found))
            except PeerError as error:
                event(f"dropping stored shard {shard_id}: {error}", priority=WARNING)
            strays += [Named(f"w1.{shard_id}.{part}", descriptor) for part, descriptor in found.items()]
        kept = {name: part for shard in shards for name, part in _named(shard).items()}
        if settings is not None:
            kept[SETTINGS] = settings
        self._names = set(kept)
        self._clear(strays, kept)
        if settings is not None:
            settings.close()
        return Adopted(tuple(shards), self._settings)

    def store(self, shard: Shard) -> None:
        """Return once the service manager holds every descriptor. ResourceError where its store is too small.

        HostError where it does not answer. In either case `drop` takes back what may have been stored.
        """
        descriptors = _named(shard)
        limit = self._notifier.store_limit
        with self._lock:
            if limit and len(self._names) + len(descriptors) > limit:
                raise ResourceError(
                    f"the service manager keeps at most {limit} descriptors; {len(self._names)} are stored and this "
                    f"shard has {len(descriptors)}",
                    hint="raise FileDescriptorStoreMax= of weights@.service",
                )
            for name, descriptor in descriptors.items():
                self._names.add(name)
                self._notifier.store(name, descriptor.fileno())
            self._notifier.barrier()

    def drop(self, *shards: Shard) -> None:
        """Close shards here and in the store: their memory is free once nobody has them mapped."""
        if not shards:
            return
        with self._lock:
            try:
                for name in (name for shard in shards for name in reversed(_named(shard)) if name in self._names):
                    self._notifier.remove(name)
                    self._names.discard(name)
            finally:
                for shard in shards:
                    shard.close()
            # A manager that is slow frees the memory later: nothing here depends on it.
            with contextlib.suppress(HostError, ResourceError):
                self._notifier.barrier()

    def store_settings(self, settings: bytes) -> None:
        """Keep the settings beside the shards, so that a broken manifest later cannot make them useless."""
        if settings == self._settings:
            return
        with self._lock, memfd.sealed("settings", [settings]) as descriptor:
            if SETTINGS in self._names:
                self._notifier.remove(SETTINGS)
            self._names.add(SETTINGS)
            self._notifier.store(SETTINGS, descriptor.fileno())
            self._settings = settings

    def _read_settings(self, descriptor: Descriptor) -> bool:
        try:
            self._settings = memfd.read(descriptor, what="stored settings", limit_bytes=MAX_SETTINGS_BYTES)
        except PeerError as error:
            event(str(error), priority=WARNING)
            return False
        return True

    def _clear(self, strays: Iterable[Named], kept: dict[str, Descriptor]) -> None:
        for stray in strays:
            self._notifier.remove(stray.name)
            stray.descriptor.close()
            # Removal is by name, and a stray can bear the name of something kept.
            if stray.name in kept:
                self._notifier.store(stray.name, kept[stray.name].fileno())


def _named(shard: Shard) -> dict[str, Descriptor]:
    """Map the store's names to slabs, configs and record, in the order they are stored."""
    prefix = f"w1.{shard.record.shard_id}"
    slabs = {f"{prefix}.slab.{index}": slab for index, slab in enumerate(shard.slabs)}
    return {**slabs, f"{prefix}.configs": shard.configs, f"{prefix}.record": shard.held}


def _assemble(shard_id: str, parts: dict[str, Descriptor]) -> Shard:
    """Return the shard, taking its descriptors out of `parts`; PeerError where one is missing or not as it must be."""
    if missing := {"record", "configs"} - parts.keys():
        raise PeerError(f"incomplete: no {' and no '.join(sorted(missing))}")
    record = read_record(parts["record"])
    if record.shard_id != shard_id:
        raise PeerError(f"its record is that of {record.shard_id}")
    names = ["record", "configs", *(f"slab.{index}" for index in range(len(record.slab_sizes)))]
    if missing := set(names) - parts.keys():
        raise PeerError(f"incomplete: no {min(missing)}")
    held, configs, *slabs = (parts[name] for name in names)
    shard = checked(held, configs, slabs)
    for name in names:
        del parts[name]
    return shard
