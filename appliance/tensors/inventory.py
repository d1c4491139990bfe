"""Every place in a module that holds a tensor, registered or not.

A tensor that hides where no other process could put its own (a closure, a partial, a bound method, a set) is refused by
name: attached, such a module would go on computing with memory that nobody filled.
"""

import functools
import gc
import types
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from appliance.errors import ConfigError
from appliance.layout import LIMIT_TEXT, Key, Path, shown
from appliance.tensors.captures import HIDDEN, hides_tensor, is_machinery
from appliance.tensors.slot import SLOT_NAMES, ByClass, Slot, can_rebuild, instance_dict, slot_values

LIMIT_OBJECTS = 1_000_000
LIMIT_NAMED = 5  # of the places that one message names

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, OrderedDict})
_PLAIN = _ATOMS | _CONTAINERS
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_NOT_REGISTERED = dict.fromkeys(_REGISTRIES)
_CAPTURES = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial, set, frozenset)


class TensorError(ConfigError):
    """These tensors cannot be packed or attached as they are; at another stage they may."""


class _Nature(Enum):
    ATOM = auto()
    TENSOR = auto()
    TUPLE = auto()
    MODULE = auto()
    CAPTURE = auto()
    HOLDER = auto()
    INSTANCE = auto()  # holds what its `__dict__` holds


@dataclass(frozen=True)
class Inventory:
    """The places that hold tensors, the registered ones first, in the module's own order.

    `holders` are the objects that tensors were looked for in, by path. `repeated` are the further paths of modules that
    have several: every other holder has one.
    """

    slots: dict[Path, Slot] = field(default_factory=dict)
    holders: dict[Path, Any] = field(default_factory=dict)
    repeated: list[Path] = field(default_factory=list)


def walk(module: nn.Module, *, opaque: Collection[type] = ()) -> Inventory:
    """Return every place that holds a tensor; TensorError naming those that could not be given another one.

    Looked into are modules, registered or not, the instances, lists, tuples and dicts that they hold, the attributes
    of tensors, and so on. A registered module is listed under each of its names, any other object under its shortest
    path. Not looked into are classes, Python's modules, the globals of functions, weak references, the machinery of
    the process, and instances of the `opaque` types.
    """
    walker = _Walker(tuple(opaque))
    walker.add_module((), module)
    walker.search()
    walker.refuse_captures()
    return walker.inventory


def named(places: list[str]) -> str:
    """Return the places for a message, the first few by name."""
    rest = len(places) - LIMIT_NAMED
    return ", ".join(places[:LIMIT_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class _Walker:
    """Searches breadth first: the shortest path to an object is its name, and no depth is too deep."""

    def __init__(self, opaque: tuple[type, ...]) -> None:
        self.inventory = Inventory()
        self._opaque = opaque
        self._seen: dict[int, object] = {}  # keeps alive what the ids stand for
        self._queue: deque[tuple[Path, Any, Slot | None]] = deque()
        self._captures: list[tuple[Path, object]] = []
        self._visited = 0

    def add_module(self, path: Path, module: nn.Module) -> None:
        """List the registered tensors of a module and of all below it, and note them for the search."""
        stack: list[tuple[Path, nn.Module, frozenset[int]]] = [(path, module, frozenset())]
        seen, slots, holders = self._seen, self.inventory.slots, self.inventory.holders
        while stack:
            path, module, above = stack.pop()
            self._count()
            if _IS_SCRIPT[type(module)]:
                self._captures.append((path, module))
                continue
            holders[path] = module
            for name, parameter in module._parameters.items():
                if parameter is not None:  # as `_add_slot` does, without the call: there are thousands
                    place = (*path, name)
                    slots[place] = Slot(place, "parameter", True, module, parameter)
                    if parameter.__dict__ or SLOT_NAMES[type(parameter)]:
                        self._note(place, parameter)
            if buffers := module._buffers:
                for name, buffer in buffers.items():
                    if buffer is not None:
                        persistent = name not in module._non_persistent_buffers_set
                        self._add_slot(Slot((*path, name), "buffer", persistent, module, buffer))
            number = id(module)
            if number not in seen:
                seen[number] = module
                if _holds_more(module):
                    self._queue.append((path, module, None))
            else:
                self.inventory.repeated.append(path)
            if children := module._modules:
                above |= {number}
                # A module may hold one that holds it.
                stack += [
                    ((*path, name), child, above)
                    for name, child in reversed(children.items())
                    if child is not None and id(child) not in above
                ]

    def search(self) -> None:
        """List the tensors that are not registered."""
        while self._queue:
            path, holder, slot = self._queue.popleft()
            # issubclass, not isinstance: that asks the instance, and there are some that answer with an error.
            kind = type(holder)
            if issubclass(kind, nn.Module):
                self._visit_attributes(path, holder.__dict__, holder, _REGISTRIES)
                continue
            self._count()
            self.inventory.holders.setdefault(path, holder)
            if issubclass(kind, tuple):
                for index, value in enumerate(holder):
                    self._visit((*path, index), value, holder, slot)
                continue
            self._visit_attributes(path, instance_dict(holder), holder, frozenset())
            if issubclass(kind, dict):
                for key, value in holder.items():
                    self._visit_item(path, key, value, holder)
            elif issubclass(kind, list | deque):
                for index, value in enumerate(holder):
                    self._visit((*path, index), value, holder)

    def _visit_attributes(self, path: Path, names: dict[str, Any], holder: Any, skipped: frozenset[str]) -> None:
        for name, value in names.items():
            kind = type(value)
            if (value if kind in _CONTAINERS else kind not in _ATOMS) and name not in skipped:
                self._visit((*path, name), value, holder)
        if SLOT_NAMES[type(holder)]:
            for name, value in slot_values(holder):
                self._visit((*path, name), value, holder)

    def refuse_captures(self) -> None:
        """Raise TensorError if a tensor hangs where `search` could only look, not bind."""
        places = [
            f"{shown(path)} ({type(value).__name__})"
            for path, value in self._captures
            if hides_tensor(value, self._seen, self._opaque)
        ]
        if places:
            raise TensorError(f"tensors that only this process can have, held by {named(places)}")

    def _visit(self, path: Path, value: Any, holder: Any, parent: Slot | None = None) -> None:
        kind = type(value)
        nature = _NATURES[kind]
        if nature is _Nature.ATOM or issubclass(kind, self._opaque):
            return
        if nature is _Nature.TENSOR:
            self._add_slot(Slot(path, "attribute", False, holder, value, parent))
        elif nature is _Nature.TUPLE:
            self._visit_tuple(path, value, holder, parent)
        elif nature is _Nature.MODULE:
            if id(value) not in self._seen:
                self.add_module(path, value)
        elif nature is _Nature.CAPTURE:
            self._captures.append((path, value))
        elif nature is _Nature.INSTANCE and not instance_dict(value):
            if gc.is_tracked(value):
                self._captures.append((path, value))
        else:
            self._note(path, value)

    def _visit_tuple(self, path: Path, value: tuple[Any, ...], holder: Any, parent: Slot | None) -> None:
        # Not once but under each path: there is no changing a tuple for all its holders.
        if not can_rebuild(value):
            self._captures.append((path, value))
        elif value:
            self._queue.append((path, value, Slot(path, "attribute", False, holder, value, parent)))

    def _visit_item(self, path: Path, key: object, value: object, holder: dict[Any, Any]) -> None:
        if type(key) is int or (type(key) is str and key.isprintable() and len(key) <= LIMIT_TEXT):
            self._visit((*path, Key(key)), value, holder)
            return
        for part in (key, value):
            if type(part) not in _ATOMS:
                self._captures.append(((*path, Key(_brief(key))), part))

    def _add_slot(self, slot: Slot) -> None:
        self.inventory.slots[slot.path] = slot
        if slot.value.__dict__ or SLOT_NAMES[type(slot.value)]:
            self._note(slot.path, slot.value)

    def _note(self, path: Path, holder: object) -> None:
        """Have the search look into an object, once."""
        if id(holder) not in self._seen:
            self._seen[id(holder)] = holder
            self._queue.append((path, holder, None))

    def _count(self) -> None:
        self._visited += 1
        if self._visited > LIMIT_OBJECTS:
            raise _too_many()


def _too_many() -> TensorError:
    return TensorError(f"more than {LIMIT_OBJECTS} objects to look for tensors in")


def _holds_more(module: nn.Module) -> bool:
    """Tell whether a module has attributes to look into, beside what is registered; most have none."""
    values = (module.__dict__ | _NOT_REGISTERED).values()
    # Nothing but atoms, and empty containers: most are the registries of a module's hooks.
    is_plain = _PLAIN.issuperset(map(type, values)) and _ATOMS.issuperset(map(type, filter(None, values)))
    return not is_plain or bool(SLOT_NAMES[type(module)])


def _brief(key: object) -> str:
    return str(key)[:20] if type(key) in _ATOMS else f"a {type(key).__name__}"


def _nature(kind: type) -> _Nature:
    """Return what to do with the instances of a class. The order counts: a parameter is an instance as well."""
    families: list[tuple[bool, _Nature]] = [
        (kind in _ATOMS, _Nature.ATOM),
        (issubclass(kind, torch.Tensor), _Nature.TENSOR),
        (issubclass(kind, (*HIDDEN, *_CAPTURES)), _Nature.CAPTURE),
        (is_machinery(kind), _Nature.ATOM),
        (issubclass(kind, tuple), _Nature.TUPLE),
        (issubclass(kind, nn.Module), _Nature.MODULE),
        (issubclass(kind, dict | list | deque) or bool(SLOT_NAMES[kind]), _Nature.HOLDER),
    ]
    return next((nature for belongs, nature in families if belongs), _Nature.INSTANCE)


# `isinstance` is slow where the class is a tensor's.
_NATURES = ByClass(_nature)
_IS_SCRIPT = ByClass(lambda kind: issubclass(kind, torch.jit.ScriptModule))
