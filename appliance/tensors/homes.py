"""Which place of a skeleton each tensor of a shard goes to, and why one has none.

The two stages differ in how much a skeleton may. A shard of stage `loaded` holds the tensors that a fresh skeleton has:
same places, kinds, classes, dtypes and shapes (strides may differ: a loader may have chosen another memory format). A
shard of stage `processed` was taken after the engine had replaced, added and removed tensors: they may have other
dtypes and shapes, new ones may go to any object that the skeleton has, and registered ones that the shard lacks are
removed. Whether the result is the original, flags included, `differences` tells and this does not.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from appliance.layout import Layout, TensorEntry
from appliance.tensors.inventory import Inventory, TensorError, named
from appliance.tensors.slot import ByClass, Slot, instance_dict
from appliance.tensors.storage import DTYPES, dtype_name, type_name

Stage = Literal["loaded", "processed"]

_PLAIN = {type_name(kind): kind for kind in (torch.Tensor, nn.Parameter)}
_CLASSES = ByClass(lambda kind: (type_name(kind), issubclass(kind, UninitializedTensorMixin)))


Home = tuple[Slot, type[torch.Tensor], torch.Tensor | None]
"""One entry's place, the class that its tensor object gets, and whose attributes."""


class NewSlot(Slot):
    """A place that holds no tensor yet, or one of another kind."""

    def put(self, value: object) -> None:
        if isinstance(self.holder, nn.Module):
            remove(self)
            if self.kind == "buffer" and not self.persistent:
                self.holder._non_persistent_buffers_set.add(str(self.path[-1]))
        super().put(value)


def homes(
    inventory: Inventory, layout: Layout, stage: Stage, *, rebuilds: bool = False
) -> tuple[list[Home | None], list[Slot]]:
    """Return a home for each entry, and the slots to be removed; TensorError naming what has no place or differs.

    Where an engine `rebuilds` objects of processed weights, what those hold needs no home yet: None.
    """
    found: list[Home | None] = []
    homeless: list[str] = []
    differing: list[str] = []
    slots = inventory.slots
    for entry in layout.entries:
        slot = slots.get(entry.path)
        home = None if slot is None else _same_home(entry, slot)
        if home is None and stage == "processed":
            home = _new_home(entry, slot, inventory)
        if home is not None or (slot is None and rebuilds and stage == "processed" and entry.kind == "attribute"):
            found.append(home)
        elif slot is None:
            homeless.append(entry.name)
        else:
            differing.append(f"{entry.name} ({_difference(entry, slot)})")
    extra = _extra(inventory, layout, found)
    lacking = [slot.name for slot in extra if stage == "loaded" or slot.kind == "attribute"]
    # Only a module with several names is the holder of several paths with the same end.
    clashing = [] if homeless or differing or not inventory.repeated else _clashes(layout.entries, found)
    _refuse(
        (homeless, "have no place in this module"),
        (differing, "differ from it"),
        (lacking, "are in this module and not in the shard"),
        (clashing, "would share a place"),
    )
    return found, extra


def remove(slot: Slot) -> None:
    """Make a module forget a name, registered or not."""
    name = str(slot.path[-1])
    for registry in (slot.holder._parameters, slot.holder._buffers, vars(slot.holder)):
        registry.pop(name, None)
    slot.holder._non_persistent_buffers_set.discard(name)


def _extra(inventory: Inventory, layout: Layout, found: Sequence[Home | None]) -> list[Slot]:
    """Return the slots that no entry is for. The paths of a layout are different ones, so often counting is enough."""
    has_own = (home is not None and type(home[0]) is not NewSlot for home in found)
    if len(layout.entries) == len(inventory.slots) and all(has_own):
        return []
    paths = {entry.path for entry in layout.entries}
    return [slot for path, slot in inventory.slots.items() if path not in paths]


def _same_home(entry: TensorEntry, slot: Slot) -> Home | None:
    """Return the slot as a home if what is there is like the entry's tensor."""
    tensor = slot.value
    if slot.kind != entry.kind or slot.persistent != entry.persistent:
        return None
    kind, spec = type(tensor), entry.spec
    name, is_lazy = _CLASSES[kind]
    if is_lazy:  # takes any shape, and becomes another class with it
        return slot, kind.cls_to_become, tensor
    # Where the shard has another place's tensor, this place's class is of no account.
    if name != spec.type_name and entry.alias is None:
        return None
    if tensor.shape != spec.shape or tensor.dtype is not DTYPES.get(spec.dtype):
        return None
    return slot, kind, tensor


def _new_home(entry: TensorEntry, slot: Slot | None, inventory: Inventory) -> Home | None:
    """Return a home that need not be like what is there, if there is anything to hold it."""
    kind = _PLAIN.get(entry.spec.type_name)
    model: torch.Tensor | None = None
    if slot is not None and type_name(type(slot.value)) == entry.spec.type_name:
        kind, model = type(slot.value), slot.value
    if kind is None or entry.spec.dtype not in DTYPES:
        return None
    if slot is not None and (slot.kind, slot.persistent) == (entry.kind, entry.persistent):
        return slot, kind, model
    holder = inventory.holders.get(entry.path[:-1])
    if not _can_hold(holder, entry):
        return None
    return NewSlot(entry.path, entry.kind, entry.persistent, holder, None), kind, model


def _can_hold(holder: Any, entry: TensorEntry) -> bool:
    step = entry.path[-1]
    if isinstance(holder, nn.Module):
        return isinstance(step, str) and not step.startswith("__") and "." not in step and step not in holder._modules
    if entry.kind != "attribute" or isinstance(step, int):
        return False
    if isinstance(step, str):
        return not step.startswith("__") and bool(instance_dict(holder))
    return isinstance(holder, dict)


def _clashes(entries: Sequence[TensorEntry], found: Sequence[Home | None]) -> list[str]:
    """Name the entries whose place another entry has filled with another tensor: a skeleton may share a module."""
    clashing = []
    taken: dict[tuple[int, object], int] = {}
    for index, (entry, home) in enumerate(zip(entries, found, strict=True)):
        if home is None:
            continue
        slot = home[0]
        tensor = index if entry.alias is None else entry.alias
        if slot.parent is None and taken.setdefault((id(slot.holder), entry.path[-1]), tensor) != tensor:
            clashing.append(entry.name)
    return clashing


def _difference(entry: TensorEntry, slot: Slot) -> str:
    here = f"{_described(slot.kind, slot.persistent)} {type_name(type(slot.value))} {dtype_name(slot.value.dtype)}"
    spec = entry.spec
    there = f"{_described(entry.kind, entry.persistent)} {spec.type_name} {spec.dtype} {list(spec.shape)}"
    return f"here {here} {list(slot.value.shape)}, in the shard {there}"


def _described(kind: str, persistent: bool) -> str:
    return "non-persistent buffer" if kind == "buffer" and not persistent else kind


def _refuse(*findings: tuple[list[str], str]) -> None:
    reasons = [f"{named(places)} {reason}" for places, reason in findings if places]
    if reasons:
        raise TensorError(f"the shard does not fit the module: {'; '.join(reasons)}")
