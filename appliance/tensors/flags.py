"""Plain values that an engine sets on modules while it loads weights: whether a draft has its own embedding, say.

They are no tensors and lie in no slab; a process that attaches never ran the code that set them.
"""

from collections.abc import Iterable

from torch import nn

from appliance.errors import PeerError
from appliance.record import MAX_FLAGS, Flag
from appliance.tensors.inventory import TensorError

_PLAIN = frozenset({bool, int, float, str, type(None)})
_OWN = frozenset({"training"})
_ABSENT = object()


def flags_of(loaded: nn.Module, skeleton: nn.Module) -> tuple[Flag, ...]:
    """Return what loading set on the modules of `loaded`, by the module's name; TensorError if it is no end of it."""
    fresh = dict(skeleton.named_modules(remove_duplicate=False))
    flags = [
        Flag(place, name, value)
        for place, module in loaded.named_modules(remove_duplicate=False)
        if place in fresh
        for name, value in _plain(module).items()
        if not _same(_plain(fresh[place]).get(name, _ABSENT), value)
    ]
    if len(flags) > MAX_FLAGS:
        raise TensorError(f"loading set {len(flags)} values beside tensors; at most {MAX_FLAGS} can be kept")
    return tuple(flags)


def set_flags(module: nn.Module, flags: Iterable[Flag]) -> None:
    """Set them on another process's module; PeerError, naming it, for one that has no such part."""
    parts = dict(module.named_modules(remove_duplicate=False))
    for flag in flags:
        if flag.place not in parts or flag.name.startswith("__"):
            raise PeerError(f"the shard sets {flag.name[:80]!r} on {flag.place[:200]!r}, which this module has not")
        parts[flag.place].__dict__[flag.name] = flag.value


def _plain(module: nn.Module) -> dict[str, bool | int | float | str | None]:
    """Return a module's own plain values, and the parameters and buffers that it has registered as None."""
    values = {name: value for name, value in vars(module).items() if type(value) in _PLAIN and name not in _OWN}
    registries = (module._parameters, module._buffers)
    return values | {name: None for registry in registries for name, value in registry.items() if value is None}


def _same(one: object, other: object) -> bool:
    # True is no 1, and one NaN is like another.
    return type(one) is type(other) and repr(one) == repr(other)
