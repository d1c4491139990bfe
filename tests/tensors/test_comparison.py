"""What differs between two modules is seen, whatever it is."""

import hashlib
import math
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from appliance.tensors.comparison import differences
from tests.tensors.modules import Box, Helper, Marked, Special


def _model() -> Any:
    torch.manual_seed(0)
    model: Any = Box()
    model.one, model.other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    model.other.weight = model.one.weight
    model.register_buffer("scale", torch.tensor([1.0, math.nan, -0.0]))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    model.pair = [whole := torch.zeros(4), whole[1:3]]
    model.helper = Helper()
    model.helper.table, model.helper.kind, model.helper.names = {"a": torch.ones(1)}, "fast", {"x", "y"}
    model.scaled, model.clamp, model.span, model.steps = (
        partial(_scaled, by=2),
        _clamp(0.25),
        range(2),
        array("l", [1, 2, 3]),
    )
    model.helpers = [Helper(), Helper()]
    model.helpers[0].kind, model.helpers[1].kind = "fast", "fast"
    model.shared, model.links, model.call = [model.helpers[0]], {"linear": model.one}, model.other.forward
    model.complex = torch.ones(2, dtype=torch.complex128).conj()
    model.marked, model.helper.marked = Marked(torch.ones(1)), Marked(torch.ones(1))
    model.marked.mark = model.helper.marked.mark = "rows"
    return model


def _rebuilt(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        model._buffers[name] = change(model._buffers[name])

    return apply


def _hook(module: nn.Module, arguments: Any, result: Any) -> None:
    """Do nothing."""


def _scaled(value: float, *, by: int) -> float:
    return value * by


def _clamp(limit: float) -> Callable[[float], float]:
    def clamp(value: float) -> float:
        return min(value, limit)

    return clamp


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8)[0] ^= 1


_CLAMP = f"{__name__}._clamp.<locals>.clamp of line {_clamp(0).__code__.co_firstlineno}"
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a bit of a parameter": (lambda model: _flip(model.one.weight.data), "one.weight: other bytes"),
    "the sign of zero": (lambda model: model.scale.neg_(), "scale: other bytes"),
    "the payload of a NaN": (lambda model: model.scale.view(torch.int32)[1:2].add_(1), "scale: other bytes"),
    "the second half of a complex number": (
        lambda model: torch.view_as_real(model.complex.conj())[1, 1:].add_(1),
        "complex: other bytes",
    ),
    "a value in a helper": (lambda model: model.helper.table["a"].add_(1), "helper.table['a']: other bytes"),
    "a shape": (_rebuilt("scale", lambda tensor: tensor[None]), "scale: shape (3,) and (1, 3)"),
    "strides": (_rebuilt("cache", lambda tensor: torch.zeros(6)[::2]), "cache: stride (1,) and (2,)"),
    "a dtype": (_rebuilt("cache", lambda tensor: tensor.half()), "cache: dtype float32 and float16"),
    "a lazy conjugation": (
        lambda model: setattr(model, "complex", model.complex.resolve_conj()),
        "complex: conjugated True and False",
    ),
    "a class": (
        lambda model: setattr(model.one, "bias", Special(model.one.bias.data)),
        "one.bias: type_name torch.nn.parameter.Parameter and tests.tensors.modules.Special",
    ),
    "a gradient flag": (
        lambda model: model.one.bias.requires_grad_(False),
        "one.bias: requires_grad True and False",
    ),
    "persistence": (
        lambda model: model._non_persistent_buffers_set.clear(),
        "cache: persistent False and True",
    ),
    "a tie": (
        lambda model: setattr(model.other, "weight", nn.Parameter(model.one.weight.data.clone())),
        "other.weight: the same object as one.weight and as other.weight",
    ),
    "a tie too many": (
        lambda model: model._buffers.update(cache=model.pair[0][:3].zero_()),
        "pair[0]: in memory 0 bytes after pair[0] and 0 bytes after cache",
    ),
    "shared memory": (
        lambda model: model.pair.__setitem__(1, torch.zeros(2)),
        "pair[1]: in memory 4 bytes after pair[0] and 0 bytes after pair[1]",
    ),
    "where in shared memory": (
        lambda model: model.pair.__setitem__(1, model.pair[0][2:4]),
        "pair[1]: in memory 4 bytes after pair[0] and 8 bytes after pair[0]",
    ),
    "a tensor too few": (lambda model: delattr(model, "cache"), "cache: no tensor in the second"),
    "a tensor too many": (
        lambda model: setattr(model.helper, "more", torch.ones(1)),
        "helper.more: no tensor in the first",
    ),
    "a tensor on meta": (
        _rebuilt("cache", lambda tensor: tensor.to("meta")),
        "cache: cannot be compared, it is on the meta device",
    ),
    "a flag": (lambda model: model.eval(), "training: True and False"),
    "a string in a helper": (lambda model: setattr(model.helper, "kind", "slow"), "helper.kind: 'fast' and 'slow'"),
    "a flag too many": (lambda model: setattr(model.helper, "done", True), "helper.done: absent and True"),
    "a flag too few": (lambda model: delattr(model.helper, "kind"), "helper.kind: 'fast' and absent"),
    "a slot of a tensor": (
        lambda model: setattr(model.marked, "mark", "columns"),
        "marked.mark: 'rows' and 'columns'",
    ),
    "a slot of a tensor that is not registered": (
        lambda model: setattr(model.helper.marked, "mark", "columns"),
        "helper.marked.mark: 'rows' and 'columns'",
    ),
    "a set": (
        lambda model: model.helper.names.remove("y"),
        "helper.names: set of [\"'x'\", \"'y'\"] and set of [\"'x'\"]",
    ),
    "the class of a helper": (
        lambda model: setattr(model, "helper", SimpleNamespace(**vars(model.helper))),
        "helper: tests.tensors.modules.Helper and types.SimpleNamespace",
    ),
    "None where nothing was": (lambda model: model.register_parameter("bias", None), "bias: absent and None"),
    "a function": (
        lambda model: setattr(model, "act", torch.nn.functional.silu),
        "act: absent and torch.nn.functional.silu",
    ),
    "a hook": (
        lambda model: model.one.register_forward_hook(_hook),
        f"one._forward_hooks: [] and ['{__name__}._hook']",
    ),
    "whose method": (
        lambda model: setattr(model, "call", model.one.forward),
        "call: torch.nn.modules.linear.Linear.forward, that of other and torch.nn.modules.linear.Linear.forward, "
        "that of one",
    ),
    "which of two objects": (
        lambda model: setattr(model, "shared", [model.helpers[1]]),
        f"shared[0]: {Helper.__module__}.Helper, that of helpers[0] and {Helper.__module__}.Helper, that of helpers[1]",
    ),
    "which of two modules": (
        lambda model: model.links.update(linear=model.other),
        "links['linear']: torch.nn.modules.linear.Linear, that of one and torch.nn.modules.linear.Linear, "
        "that of other",
    ),
    "what a partial is given": (
        lambda model: setattr(model, "scaled", partial(_scaled, by=3)),
        f"scaled: partial of {__name__}._scaled with [], {{'by': '2'}} and "
        f"partial of {__name__}._scaled with [], {{'by': '3'}}",
    ),
    "what a function keeps": (
        lambda model: setattr(model, "clamp", _clamp(0.5)),
        f"clamp: {_CLAMP} with ['0.25'] and {_CLAMP} with ['0.5']",
    ),
    "numbers of Python's own": (
        lambda model: model.steps.append(4),
        "steps: array.array l (3,) "
        + hashlib.sha256(array("l", [1, 2, 3]).tobytes()).hexdigest()[:16]
        + " and array.array l (4,) "
        + hashlib.sha256(array("l", [1, 2, 3, 4]).tobytes()).hexdigest()[:16],
    ),
    "a range": (lambda model: setattr(model, "span", range(3)), "span: range(0, 2) and range(0, 3)"),
    "an object too many": (
        lambda model: setattr(model, "more", Helper()),
        "more: absent and tests.tensors.modules.Helper",
    ),
}


def _made(kept: object, default: object = None) -> Callable[..., object]:
    def made(value: object = default) -> tuple[object, object]:
        return kept, value

    return made


def _first() -> Callable[[], None]:
    return lambda: None


def _second() -> Callable[[], None]:
    return lambda: None


# What a module may hold in one place, alike but for what it does. Nothing of it is looked into for tensors.
UNLIKE: dict[str, tuple[object, object]] = {
    "a function in C": (torch.relu, torch.sigmoid),
    "an operator": (torch.ops.aten.relu, torch.ops.aten.sigmoid),
    "an overload of an operator": (torch.ops.aten.relu.default, torch.ops.aten.relu.out),
    "a module of Python's": (math, hashlib),
    "a lambda": (_first(), _second()),
    "what a function in a function keeps": (_made(_made(1)), _made(_made(2))),
    "which function a function keeps": (_made(torch.relu), _made(torch.sigmoid)),
    "a tuple that a function keeps": (_made((1, [2])), _made((1, [3]))),
    "a dictionary that a function keeps": (_made({"a": 1}), _made({"a": 2})),
    "an object that a function keeps": (_made(SimpleNamespace(width=1)), _made(SimpleNamespace(width=2))),
    "what is the default of a function that was made": (_made(0, 1), _made(0, 2)),
    "a tuple that a partial is given": (partial(_made, (1, 2)), partial(_made, (1, 3))),
    "a tuple in a set": ({(1, 2)}, {(1, 3)}),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_is_not_looked_into_is_compared_by_what_it_is(what: str) -> None:
    one, other = _model(), _model()
    one.held, other.held = UNLIKE[what]
    assert differences(one, one) == []
    assert [line.partition(":")[0] for line in differences(one, other)] == ["held"]


def test_what_holds_itself_is_compared() -> None:
    one, other = _model(), _model()
    for model in (one, other):
        itself: list[object] = [1]
        itself.append(itself)
        model.held = _made(itself)
    assert differences(one, other) == []


def test_addresses_that_a_function_keeps_are_of_no_account() -> None:
    one, other = _model(), _model()
    for model, address in ((one, 1 << 46), (other, 1 << 45)):
        model.held = _made(address)
        model.other_held = _made(SimpleNamespace(handle=address))
    assert differences(one, other) == []


def test_a_module_and_its_copy_do_not_differ() -> None:
    model = _model()
    assert differences(model, model) == []
    assert differences(model, _model()) == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    act, line = CHANGES[change]
    model = _model()
    with torch.no_grad():
        act(model)
    assert line in differences(_model(), model)
    assert differences(model, _model()) != []


class Shy:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("ask nothing")


def test_an_object_that_answers_with_an_error_is_not_asked() -> None:
    models = _model(), _model()
    for width, model in enumerate(models):
        model.shy = [Shy()]
        object.__setattr__(model.shy[0], "width", width)
    assert differences(*models) == ["shy[0].width: 0 and 1"]


def test_a_change_of_a_flag_alone_can_be_left_out() -> None:
    model = _model()
    model.helper.kind = "slow"
    model.eval()
    assert differences(_model(), model, values=False) == []


def test_attributes_of_tensors_that_nothing_computes_with_can_be_left_out() -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    copy.load_state_dict(model.state_dict())
    model.weight.loader, model.weight.scale = print, 2  # type: ignore[attr-defined]
    model.bias.loader = print  # type: ignore[attr-defined]
    assert len(differences(model, copy)) == 2
    assert differences(model, copy, unused=("loader",)) == ["weight: only in the first"]
    copy.weight.scale = 2  # type: ignore[attr-defined]
    assert differences(model, copy, unused=("loader",)) == differences(copy, model, unused=("loader",)) == []
    # What is left of it is not used, and what the other one has is.
    del model.weight.scale  # type: ignore[attr-defined]
    assert differences(model, copy, unused=("loader",)) == ["weight.scale: absent and 2"]
    assert differences(copy, model, unused=("loader",)) == ["weight.scale: 2 and absent"]


def test_hooks_are_compared_by_their_order_and_not_by_their_numbers() -> None:
    one, other = _model(), _model()
    for model in (one, other):
        model.register_forward_hook(_hook)
        model.register_state_dict_pre_hook(_hook)
    assert differences(one, other) == []


def test_true_is_not_one() -> None:
    one, other = _model(), _model()
    one.helper.flag, other.helper.flag = 1, True
    assert differences(one, other) == ["helper.flag: 1 and True"]


def test_what_was_computed_is_compared_as_a_value() -> None:
    one, other = _model(), _model()
    one.computed, other.computed = one.one.weight * 2, (other.one.weight * 2).detach()
    assert differences(one, other) == []


def test_lines_have_an_order() -> None:
    other = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    assert differences(_model(), other) == differences(_model(), other)
