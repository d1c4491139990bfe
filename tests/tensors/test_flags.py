"""What loading sets on modules beside tensors comes along, and nothing else does."""

import copy
import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import nn

from appliance.errors import PeerError
from appliance.record import MAX_FLAG_ITEMS, MAX_FLAGS, Absence, Flag, Reference
from appliance.tensors.comparison import differences
from appliance.tensors.flags import flags_of, set_flags
from appliance.tensors.inventory import TensorError
from tests.tensors.shards import MakeShard


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))


def test_what_loading_set_is_set_on_another_skeleton() -> None:
    loaded, skeleton = module(), module()
    loaded.get_submodule("1.0").has_own_embedding = False  # type: ignore[assignment]
    loaded.scale = 0.5  # type: ignore[assignment]
    loaded.get_submodule("0").__dict__["in_features"] = 2  # as it was
    flags = flags_of(loaded, skeleton)
    assert set(flags) == {Flag("1.0", "has_own_embedding", False), Flag("", "scale", 0.5)}
    set_flags(skeleton, flags)
    assert flags_of(loaded, skeleton) == ()


def test_what_loading_left_out_is_told() -> None:
    loaded, skeleton = module(), module()
    loaded.get_submodule("0").register_parameter("scale", None)
    loaded.get_submodule("1").zero_point = None  # type: ignore[assignment]
    flags = flags_of(loaded, skeleton)
    assert set(flags) == {Flag("0", "scale", None), Flag("1", "zero_point", None)}
    set_flags(skeleton, flags)
    assert skeleton.get_submodule("0").scale is None
    assert flags_of(loaded, skeleton) == ()


def test_tuples_of_plain_values_come_along_and_no_others() -> None:
    loaded, skeleton = module(), module()
    kept = {"dims": (0, 1), "none": (), "kinds": ("rows", None, 0.5, True)}
    left = {"nested": ((0, 1),), "long": (0,) * (MAX_FLAG_ITEMS + 1), "object": (module(),), "address": (1 << 46,)}
    vars(loaded.get_submodule("0")).update(kept | left)
    vars(skeleton.get_submodule("0"))["dims"] = (False, True)
    flags = flags_of(loaded, skeleton)
    assert set(flags) == {Flag("0", name, value) for name, value in kept.items()}
    set_flags(skeleton, flags)
    assert flags_of(loaded, skeleton) == ()
    assert skeleton.get_submodule("0").dims == (0, 1)


def test_true_is_not_one() -> None:
    loaded, skeleton = module(), module()
    skeleton.flag, loaded.flag = 1, True  # type: ignore[assignment]
    assert flags_of(loaded, skeleton) == (Flag("", "flag", True),)


def test_neither_tensors_nor_the_training_flag_are_flags() -> None:
    loaded, skeleton = module().eval(), module()
    loaded.extra = torch.zeros(1)
    loaded.names = ["a"]  # type: ignore[assignment]
    assert flags_of(loaded, skeleton) == ()


def test_a_shared_module_has_its_flag_under_each_name() -> None:
    loaded = module()
    loaded.again = loaded.get_submodule("1")
    skeleton = copy.deepcopy(loaded)
    loaded.get_submodule("1").seen = True  # type: ignore[assignment]
    assert {flag.place for flag in flags_of(loaded, skeleton)} == {"1", "again"}


def test_a_place_that_the_module_has_not_is_named() -> None:
    with pytest.raises(PeerError, match=r"'seen' on '7\.x'"):
        set_flags(module(), [Flag("7.x", "seen", True)])


def test_a_name_of_pythons_own_is_refused() -> None:
    with pytest.raises(PeerError, match="__class__"):
        set_flags(module(), [Flag("0", "__class__", None)])


class Kernel:
    """What a layer computes with, as engines have them beside their modules."""

    def __init__(self) -> None:
        self.width: int | None = None
        self.inner: Kernel | None = None


def with_kernel() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer.kernel = Kernel()
    layer.kernel.inner = Kernel()
    return nn.Sequential(layer)


def test_what_loading_set_on_an_object_that_a_module_holds_is_set_on_another_ones() -> None:
    loaded: Any = with_kernel()
    loaded[0].kernel.inner.width = 3
    skeleton: Any = with_kernel()
    assert flags_of(loaded, skeleton) == ()  # not asked for
    flags = flags_of(loaded, skeleton, inner=True)
    assert flags == (Flag("0.kernel.inner", "width", 3),)
    set_flags(skeleton, flags)
    assert skeleton[0].kernel.inner.width == 3
    assert flags_of(loaded, skeleton, inner=True) == ()


def test_an_object_that_a_module_refers_to_is_its_own_one_in_another_process() -> None:
    loaded, skeleton = with_kernel(), with_kernel()
    layer: Any = loaded.get_submodule("0")
    layer.provider = layer.kernel.inner
    flags = flags_of(loaded, skeleton, inner=True)
    assert flags == (Flag("0", "provider", Reference("0.kernel.inner")),)
    set_flags(skeleton, flags)
    layer = skeleton.get_submodule("0")
    assert layer.provider is layer.kernel.inner
    assert not differences(loaded, with_same_weights(skeleton, loaded))


def test_flags_of_modules_and_of_what_they_hold_can_be_set_one_after_the_other() -> None:
    flags = [Flag("0", "seen", 1), Flag("0.kernel", "width", 2), Flag("0", "provider", Reference("0.kernel.inner"))]
    skeleton = with_kernel()
    layer: Any = skeleton.get_submodule("0")
    set_flags(skeleton, flags, inner=False)
    assert (layer.seen, layer.kernel.width, hasattr(layer, "provider")) == (1, None, False)
    layer.seen = 3
    set_flags(skeleton, flags, inner=True)
    assert (layer.seen, layer.kernel.width, layer.provider) == (3, 2, layer.kernel.inner)


def with_same_weights(module: nn.Module, other: nn.Module) -> nn.Module:
    module.load_state_dict(other.state_dict())
    return module


def test_what_may_be_an_address_is_no_flag() -> None:
    loaded, skeleton = module(), module()
    loaded.handle = 0x7F65_9000_0000  # type: ignore[assignment]
    loaded.count = 1 << 30  # type: ignore[assignment]
    assert flags_of(loaded, skeleton) == (Flag("", "count", 1 << 30),)


@pytest.mark.parametrize("place", ["0.kernel.none", "0.kernel.__class__", "0.forward", "0.kernel.width"])
def test_an_object_that_is_not_there_is_named(place: str) -> None:
    with pytest.raises(PeerError, match="has not"):
        set_flags(with_kernel(), [Flag("0", "provider", Reference(place))])


@dataclasses.dataclass(frozen=True)
class Key:
    """A constant of a package's, which its layers share."""

    width: int


NARROW, WIDE = Key(1), Key(2)


def test_a_constant_in_place_of_another_one_is_not_written_to() -> None:
    loaded, skeleton = with_kernel(), with_kernel()
    for layers, key in ((loaded, WIDE), (skeleton, NARROW)):
        vars(layers.get_submodule("0"))["key"] = key
    assert flags_of(loaded, skeleton, inner=True) == ()
    assert differences(loaded, with_same_weights(skeleton, loaded)) == ["0.key.width: 2 and 1"]
    with pytest.raises(PeerError, match="no process may"):
        set_flags(skeleton, [Flag("0.key", "width", 2)])


def test_what_two_modules_share_is_not_written_to() -> None:
    one, other = Kernel(), Kernel()
    other.width = 3
    loaded, skeleton = module(), module()
    for layers, kernels in ((loaded, (other, one)), (skeleton, (one, one))):
        for name, kernel in zip(("0", "1"), kernels, strict=True):
            vars(layers.get_submodule(name))["kernel"] = kernel
    assert flags_of(loaded, skeleton, inner=True) == ()


class Opaque:
    def __init__(self) -> None:
        self.setting = 1


def told() -> None:
    """What a module may hold that is Python's, and not its own."""


@pytest.mark.parametrize(
    "place",
    [
        *("0.os", "0.os.sys", "0.told", "0.Key", "0.opaque", "0.in_features", "0.names", "0._modules"),
        *("a..b", ".", "0.", ".0.kernel", ".0", "x" * 1024),
    ],
)
def test_nothing_but_a_module_and_its_objects_is_reached(place: str) -> None:
    layers = with_kernel()
    held = {"os": os, "told": told, "Key": Key, "opaque": Opaque(), "names": ["a"]}
    vars(layers.get_submodule("0")).update(held)
    for flag in (Flag(place, "seen", 1), Flag("0", "provider", Reference(place)), Flag("1", "seen", Reference(place))):
        with pytest.raises(PeerError, match="has not"):
            set_flags(layers, [flag], opaque=(Opaque,))
    assert not any(hasattr(part, "seen") for part in held.values())


class Weight(nn.Parameter):
    """What a skeleton has until post-processing makes a plain parameter of it; its class says where its inputs are."""

    @property
    def input_dim(self) -> int:
        return 1


def transposed(layers: nn.Module) -> nn.Module:
    """Return the layers with their first weight as post-processing leaves it, told which dimension is which."""
    layer = layers.get_submodule("0")
    layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)  # type: ignore[operator]
    vars(layer.weight).update(input_dim=0, kind="columns", loader=told)
    return layers


def test_what_is_set_on_a_tensor_comes_along_where_the_skeletons_one_has_it_not() -> None:
    loaded, skeleton = transposed(module()), module()
    skeleton.get_submodule("0").weight = Weight(torch.zeros(2, 2))
    vars(skeleton.get_submodule("0").weight)["kind"] = "columns"  # is gone with its class
    flags = flags_of(loaded, skeleton, inner=True)
    assert set(flags) == {Flag("0.weight", "input_dim", 0), Flag("0.weight", "kind", "columns")}
    other = module()
    set_flags(other, flags, inner=False)
    assert not vars(other.get_submodule("0").weight)
    set_flags(other, flags, inner=True)
    assert vars(other.get_submodule("0").weight) == {"input_dim": 0, "kind": "columns"}


def test_what_a_tensor_keeps_from_its_skeleton_is_not_kept_twice() -> None:
    loaded, skeleton = transposed(module()), module()
    vars(skeleton.get_submodule("0").weight)["input_dim"] = 0
    assert flags_of(loaded, skeleton, inner=True) == (Flag("0.weight", "kind", "columns"),)
    assert flags_of(loaded, skeleton) == ()


def test_a_tensor_in_several_places_has_its_flag_once() -> None:
    loaded, skeleton = transposed(module()), module()
    loaded.get_submodule("1.0").weight = loaded.get_submodule("0").weight
    assert {flag.place for flag in flags_of(loaded, skeleton, inner=True)} == {"0.weight"}


def test_what_is_set_on_a_tensor_is_not_set_on_another_one_with_the_same_attributes(shard: MakeShard) -> None:
    """As attached, a tensor has the very attributes of the skeleton's one, which others of this process may have."""
    loaded, skeleton = module(), module().to("meta")
    for layers in (loaded, skeleton):
        for place in ("0", "1.0"):
            vars(layers.get_submodule(place).weight)["kind"] = "rows"
    tied = skeleton.get_submodule("0").weight
    skeleton.get_submodule("1.0").weight = tied
    vars(loaded.get_submodule("1.0").weight)["input_dim"] = 0
    flags = flags_of(loaded, skeleton, inner=True)
    made = shard(loaded)
    for layers in (loaded, skeleton):
        made.attach(layers, stage="processed")
    set_flags(skeleton, flags)
    assert differences(loaded, skeleton) == []
    assert vars(tied) == {"kind": "rows"}


def test_what_a_tensor_lost_another_process_loses_too(shard: MakeShard) -> None:
    loaded, skeleton = module(), module().to("meta")
    for layers in (loaded, skeleton):
        for place in ("0", "1.0"):
            vars(layers.get_submodule(place).weight).update(loader=told, is_transposed=True)
    layer = loaded.get_submodule("0")
    layer.weight = nn.Parameter(torch.ones(2, 2))
    vars(layer.weight)["loader"] = told
    flags = flags_of(loaded, skeleton, inner=True)
    assert flags == (Flag("0.weight", "is_transposed", Absence()),)
    made = shard(loaded)
    for layers in (loaded, skeleton):
        made.attach(layers, stage="processed")
    assert differences(loaded, skeleton, unused=("loader",)) == ["0.weight.is_transposed: absent and True"]
    set_flags(skeleton, flags)
    set_flags(skeleton, flags)  # it is gone already
    assert differences(loaded, skeleton) == []


@pytest.mark.parametrize(("place", "name"), [("0", "in_features"), ("0", "weight"), ("0.kernel", "width")])
def test_nothing_but_a_tensor_loses_what_it_has(place: str, name: str) -> None:
    layers = with_kernel()
    with pytest.raises(PeerError, match="no process may"):
        set_flags(layers, [Flag(place, name, Absence())])
    layer: Any = layers.get_submodule("0")
    assert (layer.in_features, layer.weight.shape, layer.kernel.width) == (2, (2, 2), None)


@pytest.mark.parametrize("name", ["data", "grad", "view", "shape", "input_dim", "__class__"])
def test_what_every_tensor_of_a_class_has_is_not_hidden(name: str) -> None:
    layers = module()
    layers.get_submodule("0").weight = Weight(torch.zeros(2, 2))
    for value in (1, Absence()):
        with pytest.raises(PeerError, match="no process may"):
            set_flags(layers, [Flag("0.weight", name, value)])
    assert not vars(layers.get_submodule("0").weight)


def test_no_flag_is_a_tensor_or_refers_to_one() -> None:
    layers = module()
    for flag, match in (
        (Flag("0", "seen", Reference("1.0.weight")), "to a tensor"),
        (Flag("0.weight", "seen", Reference("1.0")), "no process may"),
    ):
        with pytest.raises(PeerError, match=match):
            set_flags(layers, [flag])


class Shy:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("ask nothing")


def test_an_object_that_answers_with_an_error_is_not_asked() -> None:
    loaded, skeleton = with_kernel(), with_kernel()
    for layers, width in ((loaded, 3), (skeleton, None)):
        shy = Shy()
        object.__setattr__(shy, "width", width)
        vars(layers.get_submodule("0"))["shy"] = shy
    flags = flags_of(loaded, skeleton, inner=True)
    assert flags == (Flag("0.shy", "width", 3),)
    set_flags(skeleton, flags)
    assert flags_of(loaded, skeleton, inner=True) == ()


@pytest.mark.parametrize("value", [None, 1, Reference("0")])
@pytest.mark.parametrize("name", ["_modules", "_parameters", "_forward_hooks", "training"])
def test_what_torch_keeps_on_a_module_is_not_set(name: str, value: Any) -> None:
    with pytest.raises(PeerError, match="no process may"):
        set_flags(module(), [Flag("0", name, value)])


@pytest.mark.parametrize(("place", "name"), [("0", "weight"), ("", "1")])
def test_what_a_module_computes_with_is_not_hidden(place: str, name: str) -> None:
    with pytest.raises(PeerError, match="no process may"):
        set_flags(module(), [Flag(place, name, Reference("0"))])


def test_too_many_are_refused() -> None:
    loaded = module()
    for number in range(MAX_FLAGS + 1):
        loaded.__dict__[f"flag{number}"] = number
    with pytest.raises(TensorError, match="at most"):
        flags_of(loaded, module())


@pytest.mark.parametrize(
    ("name", "value"), [("a\nb", 1), ("a" * 513, 1), ("text", "x" * (2 << 20))], ids=["odd", "long", "large"]
)
def test_what_no_record_can_hold_is_told_before_one_is_made(name: str, value: object) -> None:
    loaded = module()
    loaded.get_submodule("0").__dict__[name] = value
    with pytest.raises(TensorError, match="cannot be kept"):
        flags_of(loaded, module())
