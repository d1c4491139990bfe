"""Attaching what an engine changed after loading: what may differ from the skeleton, and what may not."""

from typing import Any

import pytest
import torch
from torch import nn

from appliance.layout import Kind, Layout, TensorEntry
from appliance.layout import Path as TensorPath
from appliance.tensors.attachment import attach, confirm, place
from appliance.tensors.comparison import differences
from appliance.tensors.inventory import TensorError, walk
from tests.tensors.modules import Helper, Special
from tests.tensors.shards import MakeShard, buffer_as_attribute, small_model, small_skeleton


# What engines do to modules after loading.
def _process(model: Any) -> None:
    model.embed.weight = nn.Parameter(model.embed.weight.data.T.contiguous().to(torch.bfloat16), requires_grad=False)
    del model.head.weight  # merged into another
    model.head.register_parameter("scale", nn.Parameter(torch.ones(1), requires_grad=False))
    model.head.register_buffer("zero", torch.ones(2), persistent=False)
    model.head.workspace = torch.ones(3)
    model.method.scale = model.method.scale.reshape(1, 1)
    model.method.cache = torch.ones(4)
    buffer_as_attribute(model)


def test_a_processed_shard_may_have_replaced_added_and_removed_tensors(shard: MakeShard) -> None:
    original, model = small_model(tied=False), small_model(tied=False)
    for name, slot in walk(original).slots.items():
        slot.value.data.copy_(walk(model).slots[name].value)
    _process(original)
    _process(model)
    made = shard(model)
    with pytest.raises(TensorError, match=r"have no place.*differ from it.*not in the shard"):
        made.attach(small_skeleton())
    attached = made.attach(small_skeleton(tied=False), stage="processed")
    assert differences(attached, original) == []
    assert "weight" not in dict(attached.head.named_parameters())


def test_a_renamed_parameter_leaves_nothing_under_its_old_name(shard: MakeShard) -> None:
    model = small_model(tied=False)
    model.head.register_parameter("packed", model.head.weight)
    del model.head.weight
    attached = shard(model).attach(small_skeleton(tied=False), stage="processed")
    assert [name for name, _ in attached.head.named_parameters()] == ["packed"]


def test_a_processed_shard_of_a_class_that_the_skeleton_lacks_is_refused(shard: MakeShard) -> None:
    model = small_model()
    model.head.weight = Special(torch.ones(4, 3))
    with pytest.raises(TensorError, match=r"head\.weight .*Special"):
        shard(model).attach(small_skeleton(), stage="processed")


PLACELESS: dict[str, TensorPath] = {
    "an unknown module": ("nowhere", "weight"),
    "a place in a list": ("listed", 5),
    "a place in a dict": ("table", 5),
    "a module's name": ("embed",),
    "a dunder": ("embed", "__class__"),
    "a dunder of a helper": ("method", "__dict__"),
    "a dotted name": ("a.b",),
    "an object without attributes": ("number", "real"),
}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        pytest.param(("method", "weight"), "parameter", id="a parameter of a helper"),
        *(pytest.param(path, "attribute", id=place) for place, path in PLACELESS.items()),
    ],
)
def test_a_processed_shard_puts_nothing_where_nothing_can_be(shard: MakeShard, path: TensorPath, kind: Kind) -> None:
    made = shard(small_model())
    first = made.layout.entries[0]
    entry = TensorEntry(path, kind, False, first.spec, first.region, first.offset_bytes, 0)
    layout = Layout(made.layout.slab_sizes, made.layout.regions, (*made.layout.entries, entry))
    skeleton = small_skeleton()
    skeleton.listed, skeleton.table, skeleton.number = [Helper()], {1: Helper()}, 5
    with pytest.raises(TensorError, match="have no place"):
        attach(skeleton, layout, made.mappings, stage="processed")


def test_a_processed_shard_does_not_remove_what_helpers_hold(shard: MakeShard) -> None:
    made, skeleton = shard(small_model()), small_skeleton()
    skeleton.method.extra = torch.ones(1, device="meta")
    with pytest.raises(TensorError, match=r"method\.extra are in this module and not in the shard"):
        made.attach(skeleton, stage="processed")


class Rebuilt:
    """What an engine makes of processed weights in each process: it holds one of them, and one of its own."""

    def __init__(self, model: Any) -> None:
        self.weight = model.head.weight
        self.table = model.head.weight * 2


def test_what_is_rebuilt_with_its_object_is_confirmed_and_not_put(shard: MakeShard) -> None:
    model = small_model(tied=False)
    model.kernel = Rebuilt(model)
    made, skeleton = shard(model), small_skeleton(tied=False)
    with pytest.raises(TensorError, match=r"kernel\.weight, kernel\.table have no place"):
        place(skeleton, made.layout, stage="processed")
    with pytest.raises(TensorError, match="have no place"):
        place(skeleton, made.layout, rebuilds=True)  # a module as it was loaded
    awaited = place(skeleton, made.layout, stage="processed", rebuilds=True).bind(made.mappings)
    assert [path for path, _ in awaited] == [("kernel", "weight"), ("kernel", "table")]
    assert not hasattr(skeleton, "kernel")
    with pytest.raises(TensorError, match=r"kernel\.weight, kernel\.table of the shard are not what"):
        confirm(skeleton, awaited)
    skeleton.kernel = Rebuilt(skeleton)
    confirm(skeleton, awaited)
    assert skeleton.kernel.weight is skeleton.head.weight
    skeleton.kernel.table[0, 0] += 1
    with pytest.raises(TensorError, match=r"^kernel\.table of the shard are not what"):
        confirm(skeleton, awaited)


def test_what_was_removed_goes_where_as_much_is_to_be_rebuilt(shard: MakeShard) -> None:
    model, skeleton = small_model(tied=False), small_skeleton(tied=False)
    model.kernel = Rebuilt(model)
    for name in ("k_scale", "v_scale"):
        skeleton.head.register_parameter(name, nn.Parameter(torch.ones(1, device="meta")))
    made = shard(model)
    assert len(made.layout.entries) == len(walk(skeleton).slots)
    place(skeleton, made.layout, stage="processed", rebuilds=True).bind(made.mappings)
    assert [name for name, _ in skeleton.head.named_parameters()] == ["weight"]


def test_a_parameter_is_never_rebuilt(shard: MakeShard) -> None:
    model, skeleton = small_model(tied=False), small_skeleton(tied=False)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(TensorError, match=r"extra\.weight, extra\.bias have no place"):
        place(skeleton, shard(model).layout, stage="processed", rebuilds=True)
