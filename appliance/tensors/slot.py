"""One place that holds a tensor, and how it is given another one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any, TypeVar

from torch import nn

from appliance.layout import Key, Kind, Path, shown

_T = TypeVar("_T")


class ByClass(dict[type, _T]):
    """Remembers what a function says of each class."""

    def __init__(self, function: Callable[[type], _T]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, kind: type) -> _T:
        value = self[kind] = self._function(kind)
        return value


@dataclass(slots=True, eq=False)
class Slot:
    """A name, index or key of a holder. A tuple cannot be changed: its slots replace it in the `parent` slot."""

    path: Path
    kind: Kind
    persistent: bool
    holder: Any
    value: Any
    parent: "Slot | None" = None

    @property
    def name(self) -> str:
        return shown(self.path)

    def get(self) -> Any:
        """Return what is there now, `value` being what was there when it was found."""
        step: Any = self.path[-1]
        if self.parent is not None:
            return self.parent.get()[step]
        if self.kind != "attribute":
            return _names(self.holder, self.kind)[step]
        if isinstance(step, str):
            return attributes(self.holder)[step]
        return self.holder[step.value if isinstance(step, Key) else step]

    def put(self, value: object) -> None:
        """Bind the value here, past any `__setattr__` or property of the holder."""
        step: Any = self.path[-1]
        if self.kind == "parameter":  # first, as there are thousands of them
            self.holder._parameters[step] = value
        elif self.kind == "buffer":
            self.holder._buffers[step] = value
        elif self.parent is not None:
            items = list(self.parent.get())
            items[step] = value
            self.parent.put(_like(self.parent.value, items))
        elif isinstance(step, str):
            _set_attribute(self.holder, step, value)
        else:
            self.holder[step.value if isinstance(step, Key) else step] = value


def can_rebuild(value: tuple[Any, ...]) -> bool:
    """Tell whether a tuple like this one can be made from other items: plain and named ones can."""
    return type(value) is tuple or hasattr(type(value), "_make")


def attributes(holder: object) -> dict[str, Any]:
    """Return what the instance's own `__dict__` and `__slots__` hold now; writing to the result changes nothing."""
    return {**instance_dict(holder), **dict(slot_values(holder))}


def attribute(holder: object, name: str) -> Any:
    """Return what `attributes` has of this name; None if that is nothing."""
    is_slot = name in SLOT_NAMES[type(holder)]
    return (dict(slot_values(holder)) if is_slot else instance_dict(holder)).get(name)


def instance_dict(holder: object) -> dict[str, Any]:
    """Return the instance's own `__dict__`, past what its class makes of that name; empty if it has none."""
    try:
        found = object.__getattribute__(holder, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def slot_values(holder: object) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each of the instance's `__slots__` that was assigned."""
    for name in SLOT_NAMES[type(holder)]:
        try:
            yield name, object.__getattribute__(holder, name)
        except AttributeError:
            continue


def _names(module: nn.Module, kind: Kind) -> dict[str, Any]:
    return module._parameters if kind == "parameter" else module._buffers


def _set_attribute(holder: object, name: str, value: object) -> None:
    if name in SLOT_NAMES[type(holder)]:
        object.__setattr__(holder, name, value)
    else:
        instance_dict(holder)[name] = value


def _like(model: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return tuple(items) if type(model) is tuple else type(model)._make(items)  # type: ignore[attr-defined]


def _slot_names(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    )


# The names that `__slots__` of a class and its bases gave, as `object.__setattr__` takes them.
SLOT_NAMES = ByClass(_slot_names)
