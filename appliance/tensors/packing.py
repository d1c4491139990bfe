"""Moves a module's tensors into slabs, one slab after the other, freeing the originals on the way."""

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from appliance import layout as layouts
from appliance.descriptors import Descriptor, close_all
from appliance.errors import PeerError
from appliance.layout import ALIGNMENT_BYTES, Layout, Region, TensorEntry, TensorSpec
from appliance.slabs import interface
from appliance.slabs.interface import Backend, Slab, rounded_up
from appliance.tensors.addresses import holds_addresses
from appliance.tensors.inventory import Inventory, TensorError, named, walk
from appliance.tensors.storage import copy_bytes, empty, over, problem, spec_of, torch_device, typed
from appliance.tensors.stretches import Stretch, stretches

_META = torch.device("meta")


@dataclass(frozen=True)
class Packed:
    """A shard: its layout and its sealed slabs, which the owner closes."""

    layout: Layout
    slabs: list[Descriptor]

    def close(self) -> None:
        close_all(self.slabs)


def pack(
    module: nn.Module, backend: Backend, *, slab_bytes: int | None = None, opaque: Collection[type] = ()
) -> Packed:
    """Return a module's tensors in sealed slabs, and leave it a skeleton on the meta device, for `attach` to fill.

    TensorError, before anything is moved, names tensors that cannot be packed. ResourceError where memory is short: no
    slab is left, and if some had been filled, the module is the same skeleton, its tensors lost.

    Parameters go where others read them in place, and so does what shares memory with one; of everything else each
    process that attaches makes a copy. At any time memory for one slab is in use beside the weights, where no storage
    is larger than a slab. The slab size is the backend's, more where that would make too many slabs. Gradients and
    what led to a computed tensor are dropped.
    """
    inventory = walk(module, opaque=opaque)
    device = torch_device(backend.device)
    _refuse_problems(inventory, device)
    tensors = list({id(slot.value): slot.value for slot in inventory.slots.values()}.values())
    specs = [spec_of(tensor, device) for tensor in tensors]
    found = stretches(tensors, specs, limit_bytes=slab_bytes or backend.default_slab_bytes)
    if slab_bytes is None:
        total_bytes = sum(stretch.size_bytes + ALIGNMENT_BYTES for stretch in found)
        slab_bytes = interface.slab_bytes(backend, total_bytes)
    regions = _regions(found, tensors, slab_bytes)
    layout = Layout(_slab_sizes(regions, backend), regions, _entries(inventory, tensors, specs, found))
    _check(layout)
    slabs: list[Descriptor] = []
    moved = False
    try:
        for index, size_bytes in enumerate(layout.slab_sizes):
            with backend.create(f"weights-{index}", size_bytes) as slab:
                moved = True
                _fill(slab, [pair for pair in zip(regions, found, strict=True) if pair[0].slab == index], tensors)
                slabs.append(slab.seal())
            _give_back(device)
    except BaseException:
        close_all(slabs)
        if moved:
            _hollow(inventory, tensors, specs)
        raise
    _hollow(inventory, tensors, specs)
    return Packed(layout, slabs)


def _refuse_problems(inventory: Inventory, device: torch.device) -> None:
    places = []
    for slot in inventory.slots.values():
        found = problem(slot.value)
        if found is None and slot.value.device not in (device, torch.device("cpu")):
            found = f"on {slot.value.device} beside {device}"
        if found is None and holds_addresses(slot.value):
            found = "a table of addresses in this process"
        if found is not None:
            places.append(f"{slot.name} ({found})")
    if places:
        raise TensorError(f"tensors that cannot be packed: {named(places)}")


def _regions(found: Sequence[Stretch], tensors: Sequence[torch.Tensor], slab_bytes: int) -> tuple[Region, ...]:
    regions: list[Region] = []
    slab = offset_bytes = 0
    for stretch in found:
        offset_bytes = rounded_up(offset_bytes, ALIGNMENT_BYTES)
        if offset_bytes and offset_bytes + stretch.size_bytes > slab_bytes:
            slab, offset_bytes = slab + 1, 0
        shared = any(isinstance(tensors[number], nn.Parameter) for number in stretch.tensors)
        regions.append(Region(slab, offset_bytes, stretch.size_bytes, shared))
        offset_bytes += stretch.size_bytes
    return tuple(regions)


def _slab_sizes(regions: Sequence[Region], backend: Backend) -> tuple[int, ...]:
    ends = {region.slab: region.offset_bytes + region.size_bytes for region in regions}  # the last one counts
    return tuple(rounded_up(end, backend.granularity_bytes) for end in ends.values())


def _entries(
    inventory: Inventory, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], found: Sequence[Stretch]
) -> tuple[TensorEntry, ...]:
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    places = {
        number: (region, tensors[number].data_ptr() - stretch.start)
        for region, stretch in enumerate(found)
        for number in stretch.tensors
    }
    first: dict[int, int] = {}
    entries: list[TensorEntry] = []
    for index, slot in enumerate(inventory.slots.values()):
        number = numbers[id(slot.value)]
        alias = first.get(number)
        first.setdefault(number, index)
        region, offset_bytes = places.get(number, (None, 0))
        entries.append(TensorEntry(slot.path, slot.kind, slot.persistent, specs[number], region, offset_bytes, alias))
    return tuple(entries)


def _check(layout: Layout) -> None:
    # What a process that attaches would refuse is refused while there still are weights.
    try:
        same = layouts.decode(layout.encode()) == layout
    except PeerError as error:
        raise TensorError(f"tensors that cannot be packed: {error.message}") from error
    if not same:
        raise TensorError("tensors that cannot be packed: their layout changes when it is written down")


def _fill(slab: Slab, placed: Sequence[tuple[Region, Stretch]], tensors: Sequence[torch.Tensor]) -> None:
    """Copy these stretches to their regions of the slab, and empty their tensors."""
    memory = over([slab.window(0, slab.size_bytes)], torch_device(slab.device))[0]
    for region, stretch in placed:
        for offset_bytes, source in stretch.pieces(tensors):
            start = region.offset_bytes + offset_bytes
            copy_bytes(memory[start : start + source.numel()], source)
            del source
        for number in stretch.tensors:
            # Whoever else holds the object lets go of the memory as well.
            tensors[number].data = torch.empty(0, dtype=tensors[number].dtype, device=tensors[number].device)


def _give_back(device: torch.device) -> None:
    """Return freed memory to the system or the driver: the next slab is made of it, and not by torch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def _hollow(inventory: Inventory, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
    husks = {}
    for tensor, spec in zip(tensors, specs, strict=True):
        husk = empty(spec, _META)
        husks[id(tensor)] = typed(husk, type(tensor), tensor, grad=spec.requires_grad)
    for slot in inventory.slots.values():
        slot.put(husks[id(slot.value)])
