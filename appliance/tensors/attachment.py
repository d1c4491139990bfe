"""Gives a module the tensors of a shard: its parameters where they lie, a private copy of everything else."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from appliance.errors import PeerError, ResourceError
from appliance.layout import Layout, Path, shown
from appliance.quantities import format_size
from appliance.slabs.interface import Mapping
from appliance.tensors.homes import Home, Stage, homes, remove
from appliance.tensors.inventory import TensorError, named, walk
from appliance.tensors.slot import Slot
from appliance.tensors.storage import (
    Blanks,
    copy_bytes,
    empty,
    over,
    problem,
    same_bytes,
    storage_part,
    torch_device,
    typed,
)

_CPU = torch.device("cpu")


def attach(
    module: nn.Module,
    layout: Layout,
    mappings: Sequence[Mapping],
    *,
    copy: bool = False,
    stage: Stage = "loaded",
    opaque: Collection[type] = (),
) -> None:
    """Bind every tensor of a shard in a skeleton of its module; errors as of `place` and `Placement.bind`."""
    place(module, layout, stage=stage, opaque=opaque).bind(mappings, copy=copy)


def place(
    module: nn.Module,
    layout: Layout,
    *,
    stage: Stage = "loaded",
    rebuilds: bool = False,
    opaque: Collection[type] = (),
) -> "Placement":
    """Return where in a skeleton of its module each tensor of a shard goes; needs none of the shard's bytes.

    What `pack` leaves of the original is such a skeleton. TensorError, naming the first few places, unless each tensor
    of the shard has a home in the module, each tensor of the module is one of the shard's, and they are alike, as far
    as `homes` asks of the stage. Where the engine `rebuilds` objects, those may lack that hold a tensor.
    """
    found, extra = homes(walk(module, opaque=opaque), layout, stage, rebuilds=rebuilds)
    return Placement(layout, found, extra)


Awaited = Sequence[tuple[Path, torch.Tensor]]
"""Tensors of a shard that a module gets with objects still to be rebuilt, and where."""


def confirm(module: nn.Module, awaited: Awaited, *, opaque: Collection[type] = ()) -> None:
    """Return if a module has rebuilt what was awaited, bit for bit; TensorError, naming the first places, if not."""
    if awaited:
        slots = walk(module, opaque=opaque).slots
        wrong = [shown(path) for path, tensor in awaited if path not in slots or not _like(slots[path].value, tensor)]
        if wrong:
            raise TensorError(f"{named(wrong)} of the shard are not what this process makes of it")


@dataclass(frozen=True)
class Placement:
    """A home for each tensor of a layout, in a module of which nothing has changed yet."""

    layout: Layout
    homes: Sequence[Home | None]
    extra: Sequence[Slot]

    def bind(self, mappings: Sequence[Mapping], *, copy: bool = False) -> Awaited:
        """Give the module its tensors, once; return those that have no home in it yet.

        Shared regions are read where they lie, unless `copy`: then everything is copied, and no mapping is needed any
        more. Every tensor is made before the first is bound, so that on any error the module is what it was.

        1. the mappings are the slabs of the layout: PeerError
        2. there is memory for the private copies: ResourceError
        """
        layout, sizes = self.layout, tuple(mapping.size_bytes for mapping in mappings)
        if sizes != layout.slab_sizes:
            raise PeerError(f"slabs of {list(sizes)} bytes are mapped, the layout has {list(layout.slab_sizes)}")
        # A tensor made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            tensors = _tensors(layout, self.homes, _memory(layout, mappings, copy=copy), _device(mappings))
        for slot in self.extra:
            remove(slot)
        awaited: list[tuple[Path, torch.Tensor]] = []
        for entry, home, tensor in zip(layout.entries, self.homes, tensors, strict=True):
            if home is None:
                awaited.append((entry.path, tensor))
            else:
                home[0].put(tensor)
        return awaited


def _like(one: object, other: torch.Tensor) -> bool:
    if not isinstance(one, torch.Tensor) or problem(one) is not None:
        return False
    facts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (one, other)]
    return facts[0] == facts[1] and same_bytes(one, other)


def _device(mappings: Sequence[Mapping]) -> torch.device:
    return torch_device(mappings[0].device) if mappings else _CPU


def _memory(layout: Layout, mappings: Sequence[Mapping], *, copy: bool) -> list[torch.UntypedStorage]:
    """Return the storage of each region: in the mapping, or a private copy."""
    # One window a slab and not one a region: torch asks a GPU's driver about each.
    slabs = over([mapping.window(0, mapping.size_bytes) for mapping in mappings], _device(mappings))
    on_host = {entry.region for entry in layout.entries if entry.spec.on_host}
    storages = [slab.untyped_storage() for slab in slabs]
    memory = []
    for index, (slab, start, size_bytes, shared) in enumerate(layout.regions):
        end = start + size_bytes
        if copy or not shared or index in on_host:
            source = slabs[slab]
            memory.append(_copied(source[start:end], _CPU if index in on_host else source.device).untyped_storage())
        else:
            # A storage of its own, for who asks which tensors share one; it keeps the slab's alive.
            memory.append(storage_part(storages[slab], slice(start, end)))
    return memory


def _copied(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        copy = torch.empty(source.shape, dtype=source.dtype, device=device)
        copy_bytes(copy, source)
    except RuntimeError as error:  # of a CPU; torch.OutOfMemoryError of a GPU is one too
        if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
            size = format_size(source.numel())
            raise ResourceError(f"no memory for a private copy of {size} on {device}") from error
        raise
    return copy


def _tensors(
    layout: Layout, found: Sequence[Home | None], memory: Sequence[torch.UntypedStorage], device: torch.device
) -> list[torch.Tensor]:
    """Return the tensor object of each entry."""
    tensors: list[torch.Tensor] = []
    blanks = Blanks()
    for (_, _, _, spec, region, offset_bytes, alias), home in zip(layout.entries, found, strict=True):
        if alias is not None:
            tensors.append(tensors[alias])
            continue
        if region is None:
            tensor = empty(spec, _CPU if spec.on_host else device)
        else:
            tensor = blanks.tensor_in(memory[region], spec, offset_bytes)
        if home is not None:
            tensor = typed(tensor, home[1], home[2], grad=spec.requires_grad)
        tensors.append(tensor)
    return tensors
