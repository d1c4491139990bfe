"""What loading sets on modules beside tensors comes along, and nothing else does."""

import copy

import pytest
import torch
from torch import nn

from appliance.errors import PeerError
from appliance.record import MAX_FLAGS, Flag
from appliance.tensors.flags import flags_of, set_flags
from appliance.tensors.inventory import TensorError


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


def test_too_many_are_refused() -> None:
    loaded = module()
    for number in range(MAX_FLAGS + 1):
        loaded.__dict__[f"flag{number}"] = number
    with pytest.raises(TensorError, match="at most"):
        flags_of(loaded, module())
