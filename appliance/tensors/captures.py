"""Tensors where nobody can put another: in closures, partials, bound methods, sets and what only these hold."""

import gc
import types
import typing
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from appliance.tensors.slot import ByClass, attributes

HIDDEN = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.ScriptObject, torch.jit.ScriptModule)

# These hold the machinery of a process, tensors included, and nothing of a model.
_MACHINERY = (
    "torch._", "torch.cuda.", "torch.distributed.", "torch.fx.", "torch.utils.hooks.", "triton.", "logging.", "enum.",
    "threading.", "_thread.", "asyncio.", "concurrent.", "multiprocessing.", "inspect.", "typing.", "ctypes.",
    "_ctypes.", "weakref.", "re.", "pathlib.", "_io.",
)  # fmt: skip
# What a class of a model derives from to say how it is used.
_FORMS = (typing.Generic, typing.Protocol)
_PARTS_OF_PYTHON = (type, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, BaseException)


def is_machinery(kind: type) -> bool:
    """Tell whether the instances of a class are part of the process and not of a model."""
    if issubclass(kind, HIDDEN) or issubclass(kind, torch.nn.Module | partial):
        return False
    if issubclass(kind, _PARTS_OF_PYTHON) or kind.__module__ == "torch":
        return True
    return any(f"{base.__module__}.".startswith(_MACHINERY) for base in kind.__mro__ if base not in _FORMS)


def hides_tensor(root: object, known: dict[int, object], opaque: tuple[type, ...]) -> bool:
    """Tell whether a tensor, or what holds one out of Python's sight, hangs below an object.

    Not looked into are the `known` objects, by id, whose tensors can be bound, and instances of the `opaque` types.
    """
    seen: dict[int, object] = {}  # keeps alive what the ids stand for
    stack = [root]
    while stack:
        value = stack.pop()
        kind = type(value)
        if issubclass(kind, HIDDEN):
            return True
        if id(value) in known or id(value) in seen or issubclass(kind, opaque) or _IS_MACHINERY[kind]:
            continue
        seen[id(value)] = value
        stack.extend(_parts(value))
    return False


_IS_MACHINERY = ByClass(is_machinery)


def _parts(value: Any) -> Iterable[object]:
    kind = type(value)
    if kind is types.FunctionType:
        # Not __globals__: they lead everywhere.
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*(value.__closure__ or ()), *defaults, *vars(value).values())
    if kind is types.MethodType:
        return (value.__self__, value.__func__)
    if kind is types.BuiltinMethodType:
        return (value.__self__,)
    parts = [*attributes(value).values()]
    if issubclass(kind, partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif issubclass(kind, dict):
        parts += [*value.keys(), *value.values()]
    elif issubclass(kind, list | tuple | set | frozenset | deque):
        parts += value
    elif not parts:  # a cell, an iterator, an object made in C
        parts += gc.get_referents(value)
    return parts
