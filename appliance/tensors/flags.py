"""What an engine sets beside tensors while it loads: whether a draft has its own embedding, how wide a weight was.

It lies in no slab, and a process that attaches never ran the code that set it: on modules, on the objects that they
hold, and on tensors, as which of a weight's dimensions is the output's. What is no plain value is kept where it is
another of these objects, by its place, and of a tensor also what it has no more.
"""

import types
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from appliance.errors import PeerError
from appliance.record import MAX_FLAG_ITEMS, Absence, Flag, FlagValue, Reference, flags_problem
from appliance.tensors.addresses import may_be_address
from appliance.tensors.captures import is_machinery
from appliance.tensors.inventory import Inventory, TensorError, walk
from appliance.tensors.slot import Slot, attribute, attributes, instance_dict
from appliance.tensors.storage import type_name

_PLAIN = frozenset({bool, int, float, str, type(None)})
# What torch itself keeps on every module.
_OWN = frozenset(vars(nn.Module()))
_CONTAINERS = (torch.Tensor, dict, list, tuple, set, frozenset)
_CALLABLE = (types.FunctionType, types.MethodType, types.BuiltinMethodType, partial)
_ABSENT = object()


def flags_of(
    loaded: nn.Module, skeleton: nn.Module, *, inner: bool = False, opaque: Collection[type] = ()
) -> tuple[Flag, ...]:
    """Return what loading set beside tensors in `loaded`, by place; TensorError where no record can hold it.

    A registered module is a place under each of its names. With `inner` every object that one holds is a place, too,
    and every tensor, but for instances of the `opaque` types: what that brings has to be proved, as it may be of use
    here alone.
    """
    fresh = dict(skeleton.named_modules(remove_duplicate=False))
    pairs = [
        (place, module, fresh[place])
        for place, module in loaded.named_modules(remove_duplicate=False)
        if place in fresh
    ]
    if inner:
        pairs += _inner_pairs(loaded, skeleton, opaque)
    known = {id(there): place for place, there, _ in reversed(pairs)} if inner else {}
    inventory = walk(loaded, opaque=opaque) if inner else Inventory()
    # What this module and another one hold is neither's: who sets something on it does so for the whole process.
    shared = {id(holder) for holder in inventory.holders.values()}
    flags = tuple(
        Flag(place, name, value)
        for place, there, here in pairs
        if id(here) not in shared and not _is_value(here)
        for name, value in _set(there, here, known)
    )
    if inner:
        flags += tuple(_of_tensors(loaded, inventory, walk(skeleton, opaque=opaque)))
    if (reason := flags_problem(flags)) is not None:
        raise TensorError(f"loading set beside tensors what cannot be kept: {reason}")
    return flags


def set_flags(
    module: nn.Module,
    flags: Iterable[Flag],
    *,
    inner: bool | None = None,
    objects: bool = True,
    opaque: Collection[type] = (),
) -> None:
    """Set them on another process's module; PeerError, naming it, for one that has no such place, or may not be set.

    With `inner` false only plain values of registered modules, with `inner` true only the others. Nothing is reached
    but modules, the objects that they hold, and tensors: no class, function or module of Python's, and no `opaque`
    instance. With `objects` false, as for weights as they were loaded, only registered modules are.
    """
    registered: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
    parts = dict(registered)

    def at(place: str, flag: Flag) -> Any:
        if place not in parts:
            holder, _, name = place.rpartition(".")
            is_near = holder in registered and not place.startswith(".")  # as most are: no need to go all the way
            start, rest = (registered[holder], name) if is_near else (module, place)
            found = _resolved(start, rest, opaque) if objects else None
            if not (_is_place(found, opaque) or _is_tensor(found)):
                raise PeerError(f"the shard sets {flag.name[:80]!r} on {place[:200]!r}, which this module has not")
            parts[place] = found
        return parts[place]

    def value_of(flag: Flag) -> Any:
        if not isinstance(flag.value, Reference):
            return flag.value
        found = at(flag.value.place, flag)
        if _is_tensor(found):  # those lie in slabs
            raise PeerError(f"the shard sets {flag.name[:80]!r} to a tensor, {flag.value.place[:200]!r}")
        return found

    for flag in flags:
        is_inner = flag.place not in registered or isinstance(flag.value, Reference)
        if inner is not None and inner != is_inner:
            continue
        holder = at(flag.place, flag)
        if flag.name.startswith("__") or _is_value(holder) or _is_taken(holder, flag):
            raise PeerError(f"the shard sets {flag.name[:80]!r} on {flag.place[:200]!r}, which no process may")
        names = instance_dict(holder)
        if _is_tensor(holder):
            # What it has of the skeleton's tensor it shares with that, and with whoever else has that.
            names = dict(names)
            object.__setattr__(holder, "__dict__", names)
        if isinstance(flag.value, Absence):
            names.pop(flag.name, None)
        else:
            names[flag.name] = value_of(flag)


def _inner_pairs(loaded: nn.Module, skeleton: nn.Module, opaque: Collection[type]) -> list[tuple[str, Any, Any]]:
    """Return the objects that modules hold and both have, by place: of a kind whose attributes are its own."""
    registered = {id(module) for module in skeleton.modules()}
    pairs = []
    for path, here in walk(skeleton, opaque=opaque).holders.items():
        if id(here) in registered or not _is_place(here, opaque):
            continue
        place = ".".join(map(str, path))
        there = _resolved(loaded, place, opaque)
        if type(there) is type(here):
            pairs.append((place, there, here))
    return pairs


def _of_tensors(loaded: nn.Module, inventory: Inventory, skeleton: Inventory) -> Iterator[Flag]:
    """Yield the plain values on tensors that another process's tensor does not get from its skeleton, or has to lose.

    Post-processing often makes a new parameter, without what the loader of a checkpoint asks the old one.
    """
    done = set()
    for path, slot in inventory.slots.items():
        if id(slot.value) in done:
            continue
        done.add(id(slot.value))
        place = ".".join(map(str, path))
        fresh, kept = _kept_of(skeleton.slots.get(path), slot.value), instance_dict(slot.value)
        if not (fresh or kept) or _resolved(loaded, place, ()) is not slot.value:
            continue
        for name, value in kept.items():
            if _is_plain(value) and not _same(fresh.get(name, _ABSENT), value) and not _is_of_class(slot.value, name):
                yield Flag(place, name, value)
        for name in fresh:
            if name not in kept and not _is_of_class(slot.value, name):
                yield Flag(place, name, Absence())


def _kept_of(slot: Slot | None, tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a tensor attached here has of the one that it takes the place of: all, if they are of one class."""
    if slot is None or type_name(type(slot.value)) != type_name(type(tensor)):
        return {}
    return instance_dict(slot.value)


def _is_place(holder: object, opaque: Collection[type]) -> bool:
    """Tell whether an object is part of a model and has attributes of its own."""
    kind = type(holder)
    if issubclass(kind, (*_CONTAINERS, *_CALLABLE, *opaque)) or is_machinery(kind):
        return False
    return bool(instance_dict(holder))


def _is_value(holder: object) -> bool:
    """Tell whether others may hold an object because it never changes: a constant of a Python module, say."""
    return bool(getattr(getattr(type(holder), "__dataclass_params__", None), "frozen", False))


def _is_taken(holder: Any, flag: Flag) -> bool:
    """Tell whether a name of a module is one of torch's, or that of a part or tensor that it would go on without."""
    if _is_tensor(holder):
        return isinstance(flag.value, Reference) or _is_of_class(holder, flag.name)
    if isinstance(flag.value, Absence):  # only tensors lose what they had
        return True
    if not issubclass(type(holder), nn.Module):
        return False
    registries = (holder._modules, holder._parameters, holder._buffers)
    is_hidden = flag.value is not None and any(registry.get(flag.name) is not None for registry in registries)
    return flag.name in _OWN or is_hidden


def _is_tensor(holder: object) -> bool:
    return issubclass(type(holder), torch.Tensor)


def _is_of_class(tensor: torch.Tensor, name: str) -> bool:
    """Tell whether a name means something else on every tensor of this class: no attribute may hide it."""
    return any(name in vars(base) for base in type(tensor).__mro__)


def _resolved(module: nn.Module, place: str, opaque: Collection[type]) -> Any:
    """Return what is at a place, by the names of modules and attributes alone; None where there is nothing."""
    found: Any = module
    for step in place.split("."):
        if not _is_place(found, opaque):
            return None
        found = None if step.startswith("__") else _part(found, step)
    return found


def _part(holder: Any, name: str) -> Any:
    """Return what a module or object has of this name; None if it has nothing. A module may have thousands."""
    if issubclass(type(holder), nn.Module):
        for registry in (holder._modules, holder._parameters, holder._buffers):
            if (found := registry.get(name)) is not None:
                return found
    return attribute(holder, name)


def _set(there: object, here: object, known: dict[int, str]) -> Iterator[tuple[str, FlagValue]]:
    """Yield what is set on a loaded place and is not on the skeleton's one."""
    fresh, present = dict(_values(here, {})), attributes(here)
    for name, value in dict(_values(there, known)).items():
        # What refers to another object has its own in a skeleton already, or nothing.
        is_there = isinstance(value, Reference) and present.get(name) is not None
        if not is_there and not _same(fresh.get(name, _ABSENT), value):
            yield name, value


def _values(holder: Any, known: dict[int, str]) -> Iterator[tuple[str, FlagValue]]:
    """Yield a place's own plain values, the parameters and buffers registered as None, and references to others."""
    for name, value in instance_dict(holder).items():
        if name in _OWN or name.startswith("__"):
            continue
        if _is_plain(value):
            yield name, value
        elif id(value) in known:
            yield name, Reference(known[id(value)])
    if issubclass(type(holder), nn.Module):
        for registry in (holder._parameters, holder._buffers):
            for name, value in registry.items():
                if value is None:
                    yield name, None


def _is_plain(value: Any) -> bool:
    """Tell whether a record can hold a value, and it means the same in another process."""
    if type(value) is tuple:
        return len(value) <= MAX_FLAG_ITEMS and all(type(part) is not tuple and _is_plain(part) for part in value)
    return type(value) in _PLAIN and not (isinstance(value, int) and may_be_address(value))


def _same(one: object, other: object) -> bool:
    # True is no 1, and one NaN is like another.
    return type(one) is type(other) and repr(one) == repr(other)
