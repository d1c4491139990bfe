"""Attaching: what is bound where, what is private, and what does not fit."""

import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from appliance.errors import PeerError, ResourceError
from appliance.layout import Layout, Region
from appliance.tensors import homes, storage
from appliance.tensors.attachment import attach
from appliance.tensors.homes import Stage
from appliance.tensors.inventory import TensorError, walk
from tests.tensors.modules import Box, Marked, Special
from tests.tensors.shards import MakeShard, buffer_as_attribute, small_model, small_skeleton


def test_parameters_are_read_in_place_and_everything_else_is_a_private_copy(shard: MakeShard) -> None:
    made = shard(small_model())
    one, other = made.attach(small_skeleton()), made.attach(small_skeleton())
    assert one.embed.weight.data_ptr() == other.embed.weight.data_ptr()
    for private, others in ((one.frequencies, other.frequencies), (one.method.scale, other.method.scale)):
        assert private.data_ptr() != others.data_ptr()
        private.fill_(9)
        assert not (others == 9).any()


def test_attaching_reads_no_byte_of_the_parameters(shard: MakeShard) -> None:
    made = shard(nn.Linear(4096, 4096))
    before = _mapped_bytes()
    model = made.attach(nn.Linear(4096, 4096, device="meta"))
    assert _mapped_bytes() - before < 1 << 20
    model.weight.sum().item()
    assert _mapped_bytes() - before > 60 << 20


def _mapped_bytes() -> int:
    """Return how much shared memory this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:"))


@pytest.mark.parametrize("tied", [True, False])
def test_ties_are_the_shards_whatever_the_skeletons_are(shard: MakeShard, tied: bool) -> None:
    model = shard(small_model(tied=tied)).attach(small_skeleton(tied=not tied))
    assert (model.embed.weight is model.head.weight) == tied
    assert walk(model).slots.keys() == walk(small_model()).slots.keys()


def test_where_the_shard_has_another_places_tensor_the_skeletons_class_is_of_no_account(shard: MakeShard) -> None:
    skeleton = small_skeleton(tied=False)
    skeleton.head.weight = Special(torch.ones(4, 3))
    model = shard(small_model()).attach(skeleton)
    assert model.head.weight is model.embed.weight
    assert type(model.head.weight) is nn.Parameter


def test_a_copy_leaves_nothing_mapped(shard: MakeShard) -> None:
    made, original = shard(small_model()), small_model()
    model = made.attach(small_skeleton(), copy=True)
    made.close()
    assert not made.mapped
    with torch.no_grad():
        model.embed.weight.zero_()
    model.embed.load_state_dict(original.embed.state_dict())
    assert torch.equal(model.head.weight, original.embed.weight)


def test_slabs_stay_mapped_for_as_long_as_a_tensor_lies_in_them(shard: MakeShard) -> None:
    made = shard(nn.Linear(2, 2))
    model = made.attach(nn.Linear(2, 2, device="meta"))
    made.close()
    weight = model.weight.detach()[0]
    del model
    assert made.mapped
    assert weight.isfinite().all()
    del weight
    assert not made.mapped


def test_the_object_keeps_the_skeletons_class_and_attributes(shard: MakeShard) -> None:
    def make(device: str) -> Any:
        model = Box()
        model.register_parameter("weight", Special(torch.ones(2, 2, device=device)))
        return model

    packed = make("cpu")
    packed.weight.output_dim = "of the donor"
    skeleton = make("meta")
    skeleton.weight.loader = skeleton.forward
    model = shard(packed).attach(skeleton)
    assert type(model.weight) is Special
    assert isinstance(model.weight, nn.Parameter)
    assert vars(model.weight) == {"loader": skeleton.forward}


def test_what_a_parameter_keeps_in_slots_stays(shard: MakeShard) -> None:
    """In the module that was packed, too."""
    original, skeleton = Box(), Box()
    for model, device in ((original, "cpu"), (skeleton, "meta")):
        model.register_parameter("weight", Marked(torch.ones(2, device=device)))
        model.weight.mark = device
    made = shard(original)
    assert [made.attach(model).weight.mark for model in (original, skeleton)] == ["cpu", "meta"]


def test_tensors_on_an_attribute_of_a_parameter_come_along(shard: MakeShard) -> None:
    def make(device: str) -> Any:
        model: Any = nn.Linear(2, 2, device=device)
        model.weight.state = SimpleNamespace(absmax=torch.rand(2, device=device))
        model.weight.direct = torch.rand(2, device=device)
        return model

    model = make("cpu")
    expected = model.weight.state.absmax.clone(), model.weight.direct.clone()
    made = shard(model)
    for target in (model, make("meta")):
        made.attach(target)
        assert torch.equal(target.weight.state.absmax, expected[0])
        assert torch.equal(target.weight.direct, expected[1])


@pytest.mark.parametrize("grad", [True, False])
def test_gradient_flags_are_the_shards(shard: MakeShard, grad: bool) -> None:
    made = shard(nn.Linear(2, 2).requires_grad_(grad))
    model = made.attach(nn.Linear(2, 2, device="meta").requires_grad_(not grad))
    assert model.weight.requires_grad == grad
    assert model.weight.is_leaf


def test_writing_to_one_tensor_is_no_change_of_another_to_autograd(shard: MakeShard) -> None:
    model = Box()
    model.one, model.other, model.lazy = torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.complex64).conj()
    made = shard(model)
    made.attach(model)
    version = model.other._version
    model.one.add_(1)
    assert model.other._version == version
    assert model.lazy.is_conj()
    assert not any(slot.value._is_view() for slot in walk(model).slots.values())


def test_a_lazy_skeleton_takes_the_shape_and_class_of_the_shard(shard: MakeShard) -> None:
    made = shard(nn.Linear(3, 2))
    lazy: Any = Box()
    lazy.weight, lazy.bias = nn.parameter.UninitializedParameter(), nn.Parameter(torch.empty(2))
    lazy.weight.loader = 1
    made.attach(lazy)
    assert (type(lazy.weight), lazy.weight.shape, lazy.weight.loader) == (nn.Parameter, (2, 3), 1)


def test_memory_formats_are_the_shards(shard: MakeShard) -> None:
    made = shard(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    model = made.attach(nn.Conv2d(3, 4, 2, device="meta"))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_surroundings_of_the_caller_do_not_matter(shard: MakeShard) -> None:
    made = shard(small_model())
    with torch.device("meta"), torch.inference_mode():
        model = made.attach(small_skeleton())
    assert not any(slot.value.is_meta or slot.value.is_inference() for slot in walk(model).slots.values())


def test_the_mappings_must_be_the_layouts_slabs(shard: MakeShard) -> None:
    made = shard(small_model())
    with pytest.raises(PeerError, match="slabs of"):
        attach(small_skeleton(), made.layout, [])
    with pytest.raises(PeerError, match="slabs of"):
        attach(small_skeleton(), made.layout, [*made.mappings, *made.mappings])
    other = Layout((8192,), made.layout.regions, made.layout.entries)
    with pytest.raises(PeerError, match="slabs of"):
        attach(small_skeleton(), other, made.mappings)


def _without_buffer(model: Any) -> None:
    del model.frequencies


def _persistent(model: Any) -> None:
    buffer = model.frequencies
    del model.frequencies
    model.register_buffer("frequencies", buffer)


MISFITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no place": (_without_buffer, "frequencies have no place in this module"),
    "no place in a helper": (lambda model: vars(model.method).clear(), r"method\.scale have no place"),
    "none in its place": (lambda model: setattr(model.method, "scale", None), r"method\.scale have no place"),
    "one too many": (
        lambda model: model.register_buffer("extra", torch.ones(1)),
        "extra are in this module and not in the shard",
    ),
    "one too many in a helper": (
        lambda model: setattr(model.method, "zero", torch.ones(1)),
        r"method\.zero are in this module and not in the shard",
    ),
    "shape": (
        lambda model: setattr(model.embed, "weight", nn.Parameter(torch.ones(3, 4))),
        r"embed\.weight \(here parameter torch\.nn\.parameter\.Parameter float32 \[3, 4\], in the shard .* \[4, 3\]\)",
    ),
    "dtype": (
        lambda model: model._buffers.update(frequencies=torch.ones(5, dtype=torch.float64)),
        r"frequencies \(here .* float64 \[5\], in the shard .* float32 \[5\]\)",
    ),
    "class": (
        lambda model: setattr(model.embed, "weight", Special(torch.ones(4, 3))),
        r"embed\.weight \(here parameter tests\.tensors\.modules\.Special",
    ),
    "persistence": (_persistent, "here buffer .*, in the shard non-persistent buffer"),
    "kind": (buffer_as_attribute, "here attribute .*, in the shard non-persistent buffer"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_named_and_the_module_stays_what_it_was(shard: MakeShard, misfit: str) -> None:
    change, match = MISFITS[misfit]
    made, module = shard(small_model()), small_model()
    change(module)
    before = {path: slot.value for path, slot in walk(module).slots.items()}
    with pytest.raises(TensorError, match=match):
        made.attach(module)
    after = {path: slot.value for path, slot in walk(module).slots.items()}
    assert before.keys() == after.keys()
    assert all(before[path] is after[path] for path in before)


def test_the_first_few_misfits_of_each_sort_are_named(shard: MakeShard) -> None:
    made = shard(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))))
    other = nn.Sequential()
    other.inner = nn.Linear(1, 1)
    with pytest.raises(TensorError) as raised:
        made.attach(other)
    assert raised.value.message == (
        "the shard does not fit the module: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more have no place in"
        " this module; inner.weight, inner.bias are in this module and not in the shard"
    )


def test_a_skeleton_that_shares_a_module_where_the_shard_does_not_is_refused(shard: MakeShard) -> None:
    def make(*, shared: bool) -> Any:
        model = Box()
        model.one = nn.Linear(2, 2, bias=False)
        model.other = model.one if shared else nn.Linear(2, 2, bias=False)
        return model

    made = shard(make(shared=False))
    with pytest.raises(TensorError, match=r"other\.weight would share a place"):
        made.attach(make(shared=True))
    model = shard(make(shared=True)).attach(make(shared=False))
    assert model.one.weight is model.other.weight


def test_a_dtype_that_this_torch_does_not_know_is_refused(shard: MakeShard, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shard(small_model())
    known = {name: dtype for name, dtype in storage.DTYPES.items() if name != "float32"}
    monkeypatch.setattr(homes, "DTYPES", known)
    stages: tuple[Stage, ...] = ("loaded", "processed")
    for stage in stages:
        with pytest.raises(TensorError, match="float32"):
            made.attach(small_skeleton(), stage=stage)


def test_no_memory_for_a_private_copy_is_an_error_and_the_module_stays_what_it_was(shard: MakeShard) -> None:
    model = Box()
    model.register_buffer("large", torch.ones(256 << 20, dtype=torch.uint8))
    made = shard(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 20, hard))
    try:
        with pytest.raises(ResourceError, match="private copy of 256 MiB on cpu"):
            made.attach(model)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert model.large.is_meta


def test_a_region_that_a_layout_calls_shared_is_mapped_and_one_that_it_does_not_is_copied(shard: MakeShard) -> None:
    made = shard(nn.Linear(2, 2))
    regions = tuple(Region(*region[:3], False) for region in made.layout.regions)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for model in (one, other):
        attach(model, Layout(made.layout.slab_sizes, regions, made.layout.entries), made.mappings)
    assert one.weight.data_ptr() != other.weight.data_ptr()
