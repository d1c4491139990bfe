"""What an engine sets beside tensors while it loads: whether a draft has its own embedding, how wide a weight was.

It lies in no slab, and a process that attaches never ran the code that set it: on modules, and on the objects that they
hold. What is no plain value is kept where it is another of these objects, by its place.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from appliance.errors import PeerError
from appliance.record import MAX_FLAGS, Flag, Reference
from appliance.tensors.inventory import TensorError, walk
from appliance.tensors.slot import attributes, instance_dict

Value = bool | int | float | str | Reference | None

# What may be the address of something in this process is nothing to another one.
LIMIT_NUMBER = 1 << 40

_PLAIN = frozenset({bool, int, float, str, type(None)})
_OWN = frozenset({"training"})
_ABSENT = object()


def flags_of(
    loaded: nn.Module, skeleton: nn.Module, *, inner: bool = False, opaque: Collection[type] = ()
) -> tuple[Flag, ...]:
    """Return what loading set beside tensors in `loaded`, by place; TensorError if it is no end of it.

    A registered module is a place under each of its names. With `inner` every object that one holds is a place, too,
    but for instances of the `opaque` types: what that brings has to be proved, as it may be of use here alone.
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
    flags = [
        Flag(place, name, value)
        for place, there, here in pairs
        for name, value in _set(there, known).items()
        if not _same(_set(here, {}).get(name, _ABSENT), value)
        # What refers to another object has its own in a skeleton already, or nothing.
        and not (isinstance(value, Reference) and attributes(here).get(name) is not None)
    ]
    if len(flags) > MAX_FLAGS:
        raise TensorError(f"loading set {len(flags)} values beside tensors; at most {MAX_FLAGS} can be kept")
    return tuple(flags)


def set_flags(module: nn.Module, flags: Iterable[Flag], *, inner: bool | None = None) -> None:
    """Set them on another process's module; PeerError, naming it, for one that has no such place.

    With `inner` false only plain values of registered modules, with `inner` true only the others.
    """
    registered: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
    parts = dict(registered)

    def at(place: str, flag: Flag) -> Any:
        if place not in parts:
            found = _resolved(module, place)
            if found is None:
                raise PeerError(f"the shard sets {flag.name[:80]!r} on {place[:200]!r}, which this module has not")
            parts[place] = found
        return parts[place]

    for flag in flags:
        is_inner = flag.place not in registered or isinstance(flag.value, Reference)
        if inner is not None and inner != is_inner:
            continue
        holder = at(flag.place, flag)
        if flag.name.startswith("__"):
            raise PeerError(f"the shard sets {flag.name[:80]!r} on {flag.place[:200]!r}, which no process may")
        value = at(flag.value.place, flag) if isinstance(flag.value, Reference) else flag.value
        instance_dict(holder)[flag.name] = value


def _inner_pairs(loaded: nn.Module, skeleton: nn.Module, opaque: Collection[type]) -> list[tuple[str, Any, Any]]:
    """Return the objects that modules hold and both have, by place: of a kind whose attributes are its own."""
    registered = {id(module) for module in skeleton.modules()}
    pairs = []
    for path, here in walk(skeleton, opaque=opaque).holders.items():
        if id(here) in registered or not _is_plain_object(here):
            continue
        place = ".".join(map(str, path))
        there = _resolved(loaded, place)
        if type(there) is type(here):
            pairs.append((place, there, here))
    return pairs


def _is_plain_object(holder: object) -> bool:
    return not isinstance(holder, torch.Tensor | dict | list | tuple | set | frozenset) and bool(instance_dict(holder))


def _resolved(module: nn.Module, place: str) -> Any:
    """Return what is at a place, by the names of modules and attributes alone; None where there is nothing."""
    found: Any = module
    for step in place.split("."):
        names = attributes(found)
        if isinstance(found, nn.Module):
            names = names | found._modules
        if step.startswith("__") or step not in names:
            return None
        found = names[step]
    return found


def _set(holder: object, known: dict[int, str]) -> dict[str, Value]:
    """Return a place's own plain values, the parameters and buffers registered as None, and references to others."""
    return dict(_values(holder, known))


def _values(holder: object, known: dict[int, str]) -> Iterator[tuple[str, Value]]:
    for name, value in instance_dict(holder).items():
        if name in _OWN or name.startswith("__"):
            continue
        if type(value) in _PLAIN:
            if not isinstance(value, int) or abs(value) < LIMIT_NUMBER:
                yield name, value
        elif id(value) in known:
            yield name, Reference(known[id(value)])
    if isinstance(holder, nn.Module):
        for registry in (holder._parameters, holder._buffers):
            for name, value in registry.items():
                if value is None:
                    yield name, None


def _same(one: object, other: object) -> bool:
    # True is no 1, and one NaN is like another.
    return type(one) is type(other) and repr(one) == repr(other)
