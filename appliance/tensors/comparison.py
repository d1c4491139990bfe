"""Whether two modules are the same bit for bit: every tensor, registered or not, and every flag beside them."""

import contextlib
import hashlib
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from appliance.layout import Path, TensorSpec, shown
from appliance.tensors.addresses import may_be_address
from appliance.tensors.captures import is_machinery
from appliance.tensors.inventory import Inventory, walk
from appliance.tensors.slot import Slot, attributes, instance_dict
from appliance.tensors.storage import problem, same_bytes, spec_of, type_name
from appliance.tensors.stretches import stretches

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_WRITTEN = (*_ATOMS, torch.Size, range, slice, PurePath)
_BY_NAME = (
    torch.Tensor,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    partial,
    set,
    frozenset,
)
_BUFFERS = frozenset({"numpy", "array"})
# Where a Python module has its name, and torch's operators and Triton's kernels have theirs.
_NAMES = ("__name__", "_qualified_op_name", "_name", "_qualname")
_LIMIT_DEPTH = 4
_REGISTRIES = ("_parameters", "_buffers", "_modules")
# Their keys come from a counter of the process.
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)


def differences(
    one: nn.Module,
    other: nn.Module,
    *,
    values: bool = True,
    opaque: Collection[type] = (),
    unused: Collection[str] = (),
) -> list[str]:
    """Return what differs between two modules, a line each; an empty list if they compute the same.

    1. the places that hold tensors, and how (parameter, buffer, persistent or not)
    2. class, dtype, shape, strides, device, gradient flag and bytes of each tensor
    3. which places hold the same object, tensor or not, and which tensors overlap in memory, and where
    4. unless `values` is false: the other attributes of everything that tensors were looked for in: numbers, strings
       and the like by value, those that a function or partial keeps too, the rest by class. What sets a flag while it
       replaces a tensor shows here. Left out are those attributes of tensors that nothing reads which computes,
       `unused`.
    """
    inventories = walk(one, opaque=opaque), walk(other, opaque=opaque)
    return [
        *_missing(*inventories),
        *_differing(*inventories),
        *_tied(*inventories),
        *_overlapping(*inventories),
        *(_valued(*inventories, frozenset(unused)) if values else ()),
    ]


def _missing(one: Inventory, other: Inventory) -> Iterator[str]:
    for which, here, there in (("second", one, other), ("first", other, one)):
        for path, slot in here.slots.items():
            if path not in there.slots:
                yield f"{slot.name}: no tensor in the {which}"


def _differing(one: Inventory, other: Inventory) -> Iterator[str]:
    for slot, peer in _pairs(one, other):
        for tensor in (slot.value, peer.value):
            if (reason := problem(tensor)) is not None:
                yield f"{slot.name}: cannot be compared, it is {reason}"
                break
        else:
            facts, peer_facts = _facts(slot), _facts(peer)
            for name, fact in facts.items():
                if fact != peer_facts[name]:
                    yield f"{slot.name}: {name} {fact} and {peer_facts[name]}"
            if facts == peer_facts and not same_bytes(slot.value, peer.value):
                yield f"{slot.name}: other bytes"


def _facts(slot: Slot) -> dict[str, object]:
    spec = spec_of(slot.value, slot.value.device)
    facts: dict[str, object] = {name: getattr(spec, name) for name in TensorSpec.__dataclass_fields__}
    return {"kind": slot.kind, "persistent": slot.persistent, "device": slot.value.device, **facts}


def _tied(one: Inventory, other: Inventory) -> Iterator[str]:
    first: dict[int, str] = {}
    peer_first: dict[int, str] = {}
    for slot, peer in _pairs(one, other):
        name = first.setdefault(id(slot.value), slot.name)
        peer_name = peer_first.setdefault(id(peer.value), peer.name)
        if name != peer_name:
            yield f"{slot.name}: the same object as {name} and as {peer_name}"


def _overlapping(one: Inventory, other: Inventory) -> Iterator[str]:
    pairs = list(_pairs(one, other))
    here = _memory([slot for slot, _ in pairs])
    there = _memory([peer for _, peer in pairs])
    for path in here:
        if path in there and here[path] != there[path]:
            (name, offset), (peer_name, peer_offset) = here[path], there[path]
            yield f"{shown(path)}: in memory {offset} bytes after {name} and {peer_offset} bytes after {peer_name}"


def _memory(slots: list[Slot]) -> dict[Path, tuple[str, int]]:
    """Return for each tensor the first one whose memory it shares, which may be itself, and how far after it it is."""
    comparable = [slot for slot in slots if problem(slot.value) is None]
    tensors = [slot.value for slot in comparable]
    found = stretches(tensors, [spec_of(tensor, tensor.device) for tensor in tensors], limit_bytes=0)
    places = {}
    for stretch in found:
        first = min(stretch.tensors)
        for index in stretch.tensors:
            offset_bytes = tensors[index].data_ptr() - tensors[first].data_ptr()
            places[comparable[index].path] = (comparable[first].name, offset_bytes)
    return places


def _valued(one: Inventory, other: Inventory, unused: frozenset[str]) -> Iterator[str]:
    names, peer_names = _names(one), _names(other)
    for path, holder in one.holders.items():
        if not _HOOKS.isdisjoint(path):
            continue
        if path not in other.holders:
            if not _is_unused(holder, unused):
                yield f"{shown(path) or 'the module'}: only in the first"
            continue
        here, there = _values(path, holder, names), _values(path, other.holders[path], peer_names)
        left_out = {f".{name}" for name in unused} if _is(holder, torch.Tensor) else ()
        for name in {**here, **there}:
            if name not in left_out and here.get(name) != there.get(name):
                place = shown(path) + name
                yield f"{place.removeprefix('.')}: {here.get(name, 'absent')} and {there.get(name, 'absent')}"
    for path in other.holders:
        if path not in one.holders and _HOOKS.isdisjoint(path) and not _is_unused(other.holders[path], unused):
            yield f"{shown(path)}: only in the second"


def _is_unused(holder: Any, unused: frozenset[str]) -> bool:
    return _is(holder, torch.Tensor) and attributes(holder).keys() <= unused


def _names(inventory: Inventory) -> dict[int, str]:
    """Return the first place of each object that can be in several, by its id."""
    names: dict[int, str] = {}
    for path, holder in inventory.holders.items():
        if not _is(holder, torch.Tensor, tuple):
            names.setdefault(id(holder), shown(path) or "the module")
    return names


def _values(path: Path, holder: Any, names: Mapping[int, str]) -> dict[str, str]:
    values = {f".{name}": value for name, value in attributes(holder).items() if name not in _REGISTRIES}
    if _is(holder, nn.Module):
        values.update(
            (f".{name}", None)
            for registry in _REGISTRIES
            for name, value in getattr(holder, registry).items()
            if value is None
        )
    if _is(holder, dict):
        values.update((f"[{key!r}]", value) for key, value in holder.items())
    elif _is(holder, list, tuple, deque):
        values.update((f"[{index}]", value) for index, value in enumerate(holder))
    written = {name: _written(value) + _link(value, shown(path) + name, names) for name, value in values.items()}
    if _is(holder, nn.Module):
        hooks = {f".{name}": vars(holder).get(name) for name in _HOOKS}
        written.update(
            (name, str(list(map(_written, found.values())))) for name, found in hooks.items() if _is(found, dict)
        )
    return written


def _written(value: Any, depth: int = 0) -> str:
    """Return what tells a value from another one of its kind; what it holds is compared where that is looked into."""
    if _is(value, torch.Tensor, *_WRITTEN):
        return "a tensor" if _is(value, torch.Tensor) else repr(value)  # that is compared as such
    if _is(value, set, frozenset):
        return f"{type(value).__name__} of {sorted(_hidden(part, depth) for part in value)}"
    if _is(value, partial):
        keywords = {name: _hidden(argument, depth) for name, argument in value.keywords.items()}
        arguments = [_hidden(argument, depth) for argument in value.args]
        return f"partial of {_written(value.func, depth)} with {arguments}, {keywords}"
    if _is(value, type, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if _is(value, types.FunctionType, types.MethodType):
        kept = [_hidden(part, depth) for part in _kept(value)]
        return f"{value.__module__}.{value.__qualname__}{_line(value)}" + (f" with {kept}" if kept else "")
    return type_name(type(value)) + _named(value) + _contents(value)


def _hidden(value: Any, depth: int) -> str:
    """Return the same with all that a value holds that nobody looks into, as what a set or a function keeps."""
    if depth == _LIMIT_DEPTH or _is_of_this_process(value):
        return type_name(type(value))
    if _is(value, tuple, list, deque):
        return f"{type(value).__name__} of {[_hidden(part, depth + 1) for part in value]}"
    if _is(value, dict):
        return f"{type(value).__name__} of {[_hidden(item, depth + 1) for item in value.items()]}"
    written = _written(value, depth + 1)
    if _is(value, *_WRITTEN, *_BY_NAME) or is_machinery(type(value)):
        return written
    atoms = {name: part for name, part in attributes(value).items() if _is(part, *_ATOMS)}
    own = {name: _hidden(part, depth + 1) for name, part in atoms.items()}
    return f"{written} with {own}" if own else written


def _kept(value: Any) -> Iterator[object]:
    """Yield what a function was made with, beside its code."""
    function = _function_of(value)
    if function is None:
        return
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents
    if _is_made_anew(function):
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()


def _line(value: Any) -> str:
    """Return where a function is defined that others may share its name with."""
    function = _function_of(value)
    return "" if function is None or not _is_made_anew(function) else f" of line {function.__code__.co_firstlineno}"


def _function_of(value: Any) -> types.FunctionType | None:
    """Return a function, or that of a method; None where a method is of something else."""
    function = value.__func__ if _is(value, types.MethodType) else value
    return function if _is(function, types.FunctionType) else None


def _is_made_anew(function: types.FunctionType) -> bool:
    """Tell whether a function is not its module's or class's one of this name: a lambda, or made by another one."""
    return "<" in function.__qualname__


def _named(value: Any) -> str:
    """Return what a Python module, or one of torch's or Triton's functions that are objects, is called."""
    is_module = _is(value, types.ModuleType)
    if not is_module and not f"{type(value).__module__}.".startswith(("torch.", "triton.")):
        return ""
    names = instance_dict(value)
    called = [names[name] for name in (_NAMES[:1] if is_module else _NAMES) if type(names.get(name)) is str]
    return f" {'.'.join(called)}" if called else ""


def _contents(value: Any) -> str:
    """Return what tells one array of numbers from another one; nothing of what is none."""
    if type(value).__module__.partition(".")[0] not in _BUFFERS:
        return ""
    try:
        view = memoryview(value)
    except (TypeError, ValueError):
        return ""
    # Of an array of objects these would be addresses.
    written = b"" if "O" in view.format else view.tobytes()
    return f" {view.format} {view.shape} {hashlib.sha256(written).hexdigest()[:16]}"


def _is_of_this_process(value: Any) -> bool:
    return _is(value, int) and may_be_address(value)


def _link(value: Any, place: str, names: Mapping[int, str]) -> str:
    """Return where an object is first, or whose method it is, unless that is this very place."""
    name = names.get(id(value.__self__ if _is(value, types.MethodType) else value))
    return "" if name is None or name == place.removeprefix(".") else f", that of {name}"


def _is(value: object, *kinds: type) -> bool:
    """Return what `isinstance` does without asking the object: there are some that answer with an error."""
    return issubclass(type(value), kinds)


def _pairs(one: Inventory, other: Inventory) -> Iterator[tuple[Slot, Slot]]:
    for path, slot in one.slots.items():
        if path in other.slots:
            yield slot, other.slots[path]
