"""What an engine must be able to do so that its weights can be handed over: the interface of its loading path."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from appliance.checkpoint.stat_record import FileStat
from appliance.record import Flag
from appliance.tensors.homes import Stage


@dataclass(frozen=True)
class Loaded:
    """A module in private memory, the configs it was built from, and a stat of each file at its verification.

    `flags` are what loading set on modules beside tensors, where the engine's way of loading does that.
    """

    module: torch.nn.Module
    configs: dict[str, bytes]
    files: dict[str, FileStat]
    phases_s: dict[str, float]
    flags: tuple[Flag, ...] = ()


class Source(Protocol):
    """One rank's weights as its engine makes them.

    `device` is `cpu` or a GPU's UUID. `stages` are those at which its weights can be taken, the best one first: a donor
    goes on to the next where it cannot prove that a shard of this stage gives another process the same module.
    `opaque` are classes of the engine's runtime objects, which hold no weights; `unused` are names of attributes of
    tensors that count for nothing once weights are loaded.
    """

    @property
    def role(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def stages(self) -> tuple[Stage, ...]: ...

    @property
    def opaque(self) -> Collection[type]: ...

    @property
    def unused(self) -> Collection[str]: ...

    def facts(self, configs: Mapping[str, bytes]) -> Mapping[str, object]:
        """Return every fact that shapes the weights' bytes, role, rank and stage apart."""

    def skeleton(self, configs: Mapping[str, bytes]) -> torch.nn.Module:
        """Return a new module on the meta device, as it is before weights are loaded into it."""

    def load(self, stage: Stage, on_progress: Callable[[str], None]) -> Loaded:
        """Return the module loaded from disk, every byte verified: of `processed`, post-processed already."""

    def finish(self, module: torch.nn.Module, stage: Stage) -> torch.nn.Module:
        """Do what is left to do once a shard of this stage is bound, and return the module, ready to compute."""
