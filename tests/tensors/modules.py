"""Random modules: tensors of every dtype and form, tied, overlapping, and held in every way that a module can.

A plan is drawn once and built as often as a test wants: with its bytes, or as the skeleton that another process has.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

from appliance.layout import ITEM_BYTES
from appliance.slabs.interface import Mapping
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.packing import Packed
from appliance.tensors.storage import DTYPES

HOLDERS = ("plain", "list", "deque", "tuple", "pair", "text key", "number key", "instance", "slots", "hidden module")


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


class Box(nn.Module):
    """A module with nothing in it."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class Special(nn.Parameter):
    """A parameter as engines derive them, with attributes of its own."""


class Marked(nn.Parameter):
    """A parameter with an attribute that is in no `__dict__`."""

    __slots__ = ("mark",)

    mark: str


class Helper:
    """A quantization method, a kernel, a router."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Slotted:
    """Neither a `__dict__` nor a way to assign."""

    value: Any


@dataclass(frozen=True)
class View:
    """A tensor in a storage; the offset counts elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conjugated: bool
    is_negated: bool


@dataclass(frozen=True)
class Home:
    """Where a tensor is held: in which module, and how."""

    module: int
    tensor: int
    how: str


@dataclass(frozen=True)
class Plan:
    """A module to be built."""

    seed: int
    parents: tuple[int, ...]
    views: tuple[View, ...]
    classes: tuple[type[torch.Tensor], ...]
    grads: tuple[bool, ...]
    homes: tuple[Home, ...]

    def build(self) -> nn.Module:
        """Return the module with its bytes, which are the same each time."""
        storages = self._storages()
        tensors = [self._tensor(index, storages) for index in range(len(self.views))]
        return self._hold([tensors[home.tensor] for home in self.homes])

    def skeleton(self) -> nn.Module:
        """Return the module on the meta device, nothing tied and nothing shared."""
        return self._hold([self._skeleton_tensor(home.tensor) for home in self.homes])

    def _storages(self) -> list[torch.UntypedStorage]:
        sizes: dict[int, int] = {}
        for view in self.views:
            reach = sum((count - 1) * step for count, step in zip(view.shape, view.stride, strict=True))
            end = (view.offset + reach + 1) * ITEM_BYTES[view.dtype] if 0 not in view.shape else 0
            sizes[view.storage] = max(sizes.get(view.storage, 0), end)
        chance = random.Random(self.seed)
        storages = []
        for number in range(max(sizes, default=-1) + 1):
            memory = torch.empty(sizes.get(number, 0), dtype=torch.uint8)
            if memory.numel():
                memory.copy_(torch.frombuffer(bytearray(chance.randbytes(memory.numel())), dtype=torch.uint8))
            storages.append(memory.untyped_storage())
        return storages

    def _tensor(self, index: int, storages: list[torch.UntypedStorage]) -> torch.Tensor:
        view = self.views[index]
        tensor = torch.empty(0, dtype=DTYPES[view.dtype])
        if 0 in view.shape:
            tensor = torch.empty_strided(view.shape, view.stride, dtype=DTYPES[view.dtype])
        else:
            tensor.set_(storages[view.storage], view.offset, view.shape, view.stride)
        return self._typed(index, tensor)

    def _skeleton_tensor(self, index: int) -> torch.Tensor:
        view = self.views[index]
        return self._typed(index, torch.empty(view.shape, dtype=DTYPES[view.dtype], device="meta"))

    def _typed(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        view, kind = self.views[index], self.classes[index]
        if not tensor.is_meta and view.is_conjugated:
            tensor = tensor.conj()
        if not tensor.is_meta and view.is_negated:
            tensor = torch._neg_view(tensor)
        tensor = torch.Tensor._make_subclass(kind, tensor, self.grads[index])
        if kind is Special:
            tensor.output_dim = index  # type: ignore[attr-defined]
        return tensor

    def _hold(self, tensors: Sequence[torch.Tensor]) -> nn.Module:
        modules: list[nn.Module] = [Box()]
        for number, parent in enumerate(self.parents, start=1):
            modules.append(Box())
            modules[parent].add_module(f"box{number}", modules[-1])
        for number, (home, tensor) in enumerate(zip(self.homes, tensors, strict=True)):
            _hold(modules[home.module], f"t{number}", tensor, home.how)
        return modules[0]


def _hold(module: nn.Module, name: str, tensor: torch.Tensor, how: str) -> None:
    if how == "parameter":
        module.register_parameter(name, tensor)  # type: ignore[arg-type]
        return
    if how in ("buffer", "non-persistent buffer"):
        module.register_buffer(name, tensor, persistent=how == "buffer")
        return
    held: Any = tensor
    if how == "instance":
        held = Helper()
        held.inner = Helper()
        held.inner.value, held.inner.owner = tensor, module
    elif how == "hidden module":
        hidden = Box()
        hidden.register_buffer("value", tensor, persistent=False)
        held = [hidden]
    elif how != "plain":
        held = {
            "list": [3, [tensor]],
            "deque": deque([tensor]),
            "tuple": ("x", (tensor, None), [1]),
            "pair": Pair(2, tensor),
            "text key": {"a": tensor, "b": 1},
            "number key": {-1: {7: tensor}},
            "slots": Slotted(tensor),
        }[how]
    # Not setattr: it would register a parameter.
    vars(module)[name] = held


def plans(*, max_tensors: int = 5) -> st.SearchStrategy[Plan]:
    """Return the strategy of all of them."""
    return _plans(max_tensors)


@st.composite
def _plans(draw: st.DrawFn, max_tensors: int) -> Plan:
    views = tuple(draw(st.lists(_views(), max_size=max_tensors)))
    kinds: list[Any] = [nn.Parameter, torch.Tensor, Special]
    classes: list[type[torch.Tensor]] = [draw(st.sampled_from(kinds)) for _ in views]
    grads = [
        DTYPES[view.dtype].is_floating_point and issubclass(kind, nn.Parameter) and draw(st.booleans())
        for view, kind in zip(views, classes, strict=True)
    ]
    parents = draw(st.lists(st.integers(0, 2), max_size=3))
    parents = [min(parent, number) for number, parent in enumerate(parents)]
    homes = []
    for tensor, kind in enumerate(classes):
        hows = [*HOLDERS, "buffer", "non-persistent buffer"]
        hows += ["parameter"] * 8 if issubclass(kind, nn.Parameter) else []
        for _ in range(draw(st.integers(1, 3))):
            homes.append(Home(draw(st.integers(0, len(parents))), tensor, draw(st.sampled_from(hows))))
    seed = draw(st.integers(0, 2**32))
    return Plan(seed, tuple(parents), views, tuple(classes), tuple(grads), tuple(homes))


@st.composite
def _views(draw: st.DrawFn) -> View:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 0]), max_size=3)))
    stride = draw(st.sampled_from([_contiguous, _transposed, _expanded, _spread]))(shape)
    is_complex = DTYPES[dtype].is_complex
    return View(
        storage=draw(st.integers(0, 2)),
        dtype=dtype,
        shape=shape,
        stride=stride,
        offset=draw(st.sampled_from([0, 0, 1, 5, 100, 1000])),
        is_conjugated=is_complex and draw(st.booleans()),
        is_negated=DTYPES[dtype] in (torch.float32, torch.float64, torch.bfloat16) and draw(st.booleans()),
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for count in reversed(shape):
        steps.append(step)
        step *= max(count, 1)
    return tuple(reversed(steps))


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reversed(_contiguous(tuple(reversed(shape)))))


def _expanded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *_contiguous(shape)[1:]) if shape else ()


def _spread(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(2 * step for step in _contiguous(shape))


def mapped(packed: Packed) -> list[Mapping]:
    """Return the slabs mapped in this process. The caller closes them."""
    backend = MemfdBackend()
    sizes = packed.layout.slab_sizes
    return [backend.map(slab, size) for slab, size in zip(packed.slabs, sizes, strict=True)]
