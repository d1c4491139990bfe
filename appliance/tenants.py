"""Who holds each GPU's memory: keepers, their engines and loaders, strangers. Joins what keepers and NVML tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.gpus import GpuState


@dataclass(frozen=True)
class Tenant:
    """A process on a GPU, as `name` knows it; `used_bytes` is None where the driver does not tell (in a container)."""

    name: str
    pid: int
    used_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "pid": self.pid, "used_bytes": self.used_bytes}


@dataclass(frozen=True)
class Tenancy:
    """One GPU's memory: what keepers hold there, by model, and the processes that use it.

    `engines` have a lease with a keeper, `loaders` fill what will be one's, `strangers` do neither. NVML counts a
    process's own memory, and not what it has mapped of a keeper's.
    """

    state: GpuState
    kept_bytes: Mapping[str, int]
    engines: tuple[Tenant, ...]
    loaders: tuple[Tenant, ...]
    strangers: tuple[Tenant, ...]

    @property
    def other_bytes(self) -> int | None:
        """Return what nobody here accounts for: descriptors in other hands, the driver. None where that is not told."""
        unattributed = self.state.unattributed_bytes
        return None if unattributed is None else max(0, unattributed - sum(self.kept_bytes.values()))

    def to_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "index": state.index,
            "uuid": state.uuid,
            "model": state.model,
            "total_bytes": state.total_bytes,
            "used_bytes": state.used_bytes,
            "free_bytes": state.free_bytes,
            "kept_bytes": dict(self.kept_bytes),
            "engines": [tenant.to_json() for tenant in self.engines],
            "loaders": [tenant.to_json() for tenant in self.loaders],
            "strangers": [tenant.to_json() for tenant in self.strangers],
            "other_bytes": self.other_bytes,
        }


def tenancies(states: Sequence[GpuState], keepers: Mapping[str, Mapping[str, Any]]) -> tuple[Tenancy, ...]:
    """Return who is on each GPU; `keepers` are the status of each model's keeper, as it tells it."""
    leased = {lease["pid"]: lease["client"] for keeper in keepers.values() for lease in keeper["leases"]}
    # A keeper of an older release tells of none.
    loading = {one["pid"]: one["client"] for keeper in keepers.values() for one in keeper.get("loaders", ())}
    return tuple(_tenancy(state, keepers, leased, loading) for state in states)


def _tenancy(
    state: GpuState,
    keepers: Mapping[str, Mapping[str, Any]],
    leased: Mapping[int, str],
    loading: Mapping[int, str],
) -> Tenancy:
    kept: dict[str, int] = {}
    for model, keeper in keepers.items():
        for shard in keeper["shards"]:
            if state.place(shard["device"]) is not None:
                kept[model] = kept.get(model, 0) + shard["size_bytes"]
    engines, loaders, strangers = [], [], []
    for one in state.processes:
        if one.pid in leased:
            engines.append(Tenant(leased[one.pid], one.pid, one.used_bytes))
        elif one.pid in loading:
            loaders.append(Tenant(loading[one.pid], one.pid, one.used_bytes))
        else:
            strangers.append(Tenant("", one.pid, one.used_bytes))
    return Tenancy(state, kept, tuple(engines), tuple(loaders), tuple(strangers))
