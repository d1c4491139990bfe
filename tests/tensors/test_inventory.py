"""Every tensor of a module is found, and what could not be bound is refused by name."""

import functools
import warnings
import weakref
from abc import ABC
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn

from appliance.errors import ConfigError
from appliance.layout import Key
from appliance.tensors import inventory
from appliance.tensors.inventory import LIMIT_NAMED, TensorError, named, walk
from tests.tensors.modules import Box, Helper, Pair, Slotted


def _names(module: nn.Module, **options: Any) -> list[str]:
    return [slot.name for slot in walk(module, **options).slots.values()]


def test_registered_tensors_come_first_in_the_modules_order() -> None:
    module = Box()
    module.late = torch.ones(1)
    module.register_buffer("scale", torch.ones(1), persistent=False)
    module.inner = nn.Linear(1, 1)
    module.register_parameter("gain", nn.Parameter(torch.ones(1)))
    found = [(slot.name, slot.kind, slot.persistent) for slot in walk(module).slots.values()]
    assert found == [
        ("gain", "parameter", True),
        ("scale", "buffer", False),
        ("inner.weight", "parameter", True),
        ("inner.bias", "parameter", True),
        ("late", "attribute", False),
    ]


def test_a_tensor_in_the_slots_of_a_modules_class_is_found() -> None:
    class Plain(Box):
        __slots__ = ("scale",)

    module = Plain()
    object.__setattr__(module, "scale", torch.ones(1))
    assert _names(module) == ["scale"]


def test_two_walks_find_the_same_in_the_same_order() -> None:
    module = nn.LSTM(2, 2, num_layers=2)
    assert _names(module) == _names(module)
    assert _names(module) == _names(nn.LSTM(2, 2, num_layers=2))


def test_a_registered_module_with_two_names_is_listed_under_both() -> None:
    module = Box()
    module.embed = nn.Linear(2, 2, bias=False)
    module.head = module.embed
    slots = walk(module).slots
    assert slots[("embed", "weight")].value is slots[("head", "weight")].value


def test_a_module_that_holds_itself_is_listed_once() -> None:
    module = Box()
    module.inner = Box()
    module.inner.add_module("outer", module)
    module.inner.weight = nn.Parameter(torch.ones(1))
    vars(module)["owner"] = module
    assert _names(module) == ["inner.weight"]


def test_absent_parameters_and_modules_are_no_places() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.register_buffer("scale", None)
    module.register_module("inner", None)
    assert _names(module) == ["weight"]


class _Colour(Enum):
    RED = 1


def test_holders_of_every_kind_are_looked_into() -> None:
    module = Box()
    tensors = [torch.ones(1) for _ in range(12)]
    module.list = [[tensors[0]], OrderedDict(a={2: tensors[1]})]
    module.tuple = (1, (tensors[2],), Pair(tensors[3], 0))
    module.helper = Helper()
    module.helper.space = SimpleNamespace(value=tensors[4])
    module.slotted = Slotted(Slotted(tensors[5]))
    module.hidden = [nn.Linear(1, 1)]
    named_list: Any = type("NamedList", (list,), {})([tensors[6]])
    named_list.extra = tensors[7]
    module.named_list = named_list
    module.weights = nn.ParameterDict({"w": nn.Parameter(tensors[8])})
    module.noise = [None, 1.5, "text", b"bytes", torch.float32, torch.device("cpu"), _Colour.RED, weakref.ref(module)]
    assert set(_names(module)) == {
        "weights.w", "hidden[0].weight", "hidden[0].bias", "slotted.value.value", "list[0][0]", "tuple[1][0]",
        "tuple[2][0]", "list[1]['a'][2]", "helper.space.value", "named_list[0]", "named_list.extra",
    }  # fmt: skip


def test_attributes_of_a_tensor_are_looked_into() -> None:
    module: Any = nn.Linear(1, 1)
    module.weight.state = SimpleNamespace(absmax=torch.ones(1))
    assert "weight.state.absmax" in _names(module)


def test_a_shared_holder_has_the_shortest_path_and_a_shared_tuple_all() -> None:
    module = Box()
    helper = Helper()
    helper.value = torch.ones(1)
    module.deep, module.near = [[helper]], helper
    module.pairs, module.pair = [(helper.value,)], (helper.value,)
    module.pair_again = module.pair
    assert sorted(_names(module)) == ["near.value", "pair[0]", "pair_again[0]", "pairs[0][0]"]


def test_a_chain_of_any_length_is_followed() -> None:
    module = Box()
    module.chain = chain = Helper()
    for _ in range(1500):
        chain.next = Helper()
        chain = chain.next
    chain.value = torch.ones(1)
    [path] = walk(module).slots
    assert len(path) == 1502


def test_a_graph_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "LIMIT_OBJECTS", 100)
    module = Box()
    module.many = [[0] for _ in range(200)]
    with pytest.raises(TensorError, match="more than 100 objects"):
        walk(module)


_Kind = TypeVar("_Kind")


class GenericHolder(ABC, Generic[_Kind]):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.sinks = tensor


class ProtocolHolder(Protocol):
    sinks: torch.Tensor


class Declared(ProtocolHolder):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.sinks = tensor


@pytest.mark.parametrize("kind", [GenericHolder, Declared])
def test_a_holder_is_looked_into_whatever_typing_says_of_its_class(kind: Any) -> None:
    module = nn.Linear(2, 2)
    module.kernel = kind(module.weight)
    assert "kernel.sinks" in {slot.name for slot in walk(module).slots.values()}


def test_instances_of_opaque_types_are_not_looked_into() -> None:
    module = Box()
    module.helper = Helper()
    module.helper.value = torch.ones(1)
    module.hook = functools.partial(print, module.helper)
    assert _names(module, opaque=[Helper]) == []
    assert _names(module) == ["helper.value"]


def test_an_object_is_looked_into_past_what_its_class_makes_of_its_attributes() -> None:
    class Guarded(Helper):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError(name)

    module = Box()
    vars(module)["guarded"] = guarded = Guarded()
    object.__getattribute__(guarded, "__dict__")["value"] = torch.ones(1)
    [slot] = walk(module).slots.values()
    slot.put(torch.zeros(2))
    assert slot.get().shape == (2,)


def _generator(value: object) -> Any:
    yield 1
    yield value


def _started(value: object) -> Any:
    generator = _generator(value)
    next(generator)
    return generator


def _closure(value: object) -> Any:
    return lambda: value


def _default(value: object) -> Any:
    def function(value: object = value, *, other: object = None) -> object:
        return value

    return function


class _Unusual(tuple[Any, ...]):
    """A tuple that cannot be made anew from its items."""


CAPTURES: dict[str, Callable[[Any], object]] = {
    "a closure": _closure,
    "a closure of a closure": lambda value: _closure(_closure(value)),
    "a key in a closure": lambda value: _closure({value: 1}),
    "a default": _default,
    "an attribute of a function": lambda value: functools.wraps(_closure(value))(lambda: None),
    "a partial": lambda value: functools.partial(print, value),
    "a keyword of a partial": lambda value: functools.partial(print, sep=[value]),
    "a bound method of the tensor": lambda value: value.add,
    "a set": lambda value: {value},
    "a frozen set": lambda value: frozenset([value]),
    "a key": lambda value: {value: 1},
    "under a key of another type": lambda value: {(1, 2): value},
    "under True": lambda value: {True: value},
    "under an unprintable key": lambda value: {"a\n": value},
    "an iterator": lambda value: iter([value]),
    "a generator": _started,
    "a view of a dict": lambda value: {1: value}.values(),
    "an unusual tuple": lambda value: _Unusual([value]),
    "a storage": lambda value: value.untyped_storage(),
    "a helper in a closure": lambda value: _closure(SimpleNamespace(value=value)),
    "a module in a partial": lambda value: functools.partial(nn.Linear(1, 1).forward),
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("tensor", ["of its own", "of a parameter"])
def test_a_tensor_that_no_other_process_could_put_there_is_refused_by_name(capture: str, tensor: str) -> None:
    module: Any = nn.Linear(1, 1)
    module.inner = Box()
    module.inner.hook = CAPTURES[capture](torch.ones(1) if tensor == "of its own" else module.weight)
    with pytest.raises(TensorError, match=r"inner\.hook"):
        walk(module)


def test_captures_without_tensors_and_of_what_is_found_anyway_are_none() -> None:
    module: Any = nn.Linear(1, 1)
    module.helper = helper = Helper()
    helper.value = module.weight
    module.bound = module.forward
    module.weight.weight_loader = module.extra_repr
    module.hooks = [
        _closure(module), functools.partial(print, module), _closure(helper), {1, "a"}, {(1, 2): 3}, iter([1]),
        _closure(None), print, torch.add, torch.nn.functional.relu, nn.Linear, torch.Generator(), torch.ops.aten.add,
    ]  # fmt: skip
    module.register_forward_hook(lambda module, arguments, result: result)
    assert _names(module) == ["weight", "bias", "helper.value"]


def test_a_scripted_module_is_refused_by_name() -> None:
    module = Box()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.inner = torch.jit.script(nn.Linear(1, 1))
    with pytest.raises(TensorError, match="inner"):
        walk(module)


@pytest.mark.filterwarnings("ignore")
def test_what_holds_its_tensors_out_of_sight_is_refused_by_name() -> None:
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)))  # type: ignore[no-untyped-call]
    with pytest.raises(TensorError, match=r"0\._packed_params\._packed_params \(ScriptObject\)"):
        walk(module)


def test_a_refusal_is_for_the_operator() -> None:
    assert issubclass(TensorError, ConfigError)


def test_a_message_names_the_first_few_places() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named([str(number) for number in range(LIMIT_NAMED + 2)]) == "0, 1, 2, 3, 4 and 2 more"


def test_keys_are_steps_of_their_own() -> None:
    module = Box()
    module.table = {"0": torch.ones(1), 0: torch.ones(1)}
    assert list(walk(module).slots) == [("table", Key("0")), ("table", Key(0))]


def test_each_slot_gets_and_puts() -> None:
    module = Box()
    module.register_parameter("p", nn.Parameter(torch.ones(1)))
    module.register_buffer("b", torch.ones(1))
    module.a = torch.ones(1)
    module.held = [torch.ones(1), {"k": torch.ones(1)}, (1, Pair(torch.ones(1), [2])), Slotted(torch.ones(1))]
    kept = module.held[2][1].second
    slots = walk(module).slots
    assert len(slots) == 7
    for slot in slots.values():
        new = nn.Parameter(torch.zeros(2))
        assert slot.get() is slot.value
        slot.put(new)
        assert slot.get() is new
    assert all(slot.value.shape == (2,) for slot in walk(module).slots.values())
    assert isinstance(module.held[2][1], Pair)
    assert module.held[2][1].second is kept
    assert walk(module).slots.keys() == slots.keys()
