"""The property that everything rests on: what is attached is what was packed, bit for bit, whatever the module is."""

import faulthandler
import os
import signal
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from appliance.layout import decode
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.attachment import attach
from appliance.tensors.comparison import differences
from appliance.tensors.inventory import walk
from appliance.tensors.packing import pack
from appliance.tensors.storage import bytes_of
from tests.tensors.modules import Plan, mapped, plans

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
ROUNDS = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@ROUNDS
@given(plans())
def test_attached_equals_original_on_what_pack_left_and_on_a_skeleton(plan: Plan) -> None:
    original, left, skeleton = plan.build(), plan.build(), plan.skeleton()
    packed = pack(left, MemfdBackend(), slab_bytes=4096)
    assert all(slot.value.is_meta for slot in walk(left).slots.values())
    assert decode(packed.layout.encode()) == packed.layout
    for module in (left, skeleton):
        mappings = mapped(packed)
        attach(module, packed.layout, mappings)
        for mapping in mappings:
            mapping.close()
        assert differences(module, original) == []
    packed.close()


@ROUNDS
@given(plans())
def test_a_copy_equals_the_original_and_needs_no_slab(plan: Plan) -> None:
    original, module = plan.build(), plan.build()
    packed = pack(module, MemfdBackend())
    mappings = mapped(packed)
    packed.close()
    attach(module, packed.layout, mappings, copy=True)
    for mapping in mappings:
        mapping.close()
        assert not mapping.mapped
    assert differences(module, original) == []
    _overwrite(module, private_only=False)


@ROUNDS
@given(plans())
def test_what_is_written_to_private_copies_stays_there(plan: Plan) -> None:
    original, module, other = plan.build(), plan.build(), plan.skeleton()
    packed = pack(module, MemfdBackend())
    mappings = mapped(packed)
    attach(module, packed.layout, mappings)
    attach(other, packed.layout, mappings)
    _overwrite(module, private_only=True)
    assert differences(other, original) == []
    attach(module, packed.layout, mappings)
    assert differences(module, original) == []
    for mapping in mappings:
        mapping.close()
    packed.close()


@settings(ROUNDS, max_examples=40)
@given(plans())
def test_a_shard_of_either_stage_fits_the_module_it_was_taken_from(plan: Plan) -> None:
    original, module, skeleton = plan.build(), plan.build(), plan.skeleton()
    packed = pack(module, MemfdBackend())
    mappings = mapped(packed)
    attach(skeleton, packed.layout, mappings, stage="processed")
    assert differences(skeleton, original) == []
    for mapping in mappings:
        mapping.close()
    packed.close()


def test_a_write_to_a_parameter_ends_the_process_and_changes_nothing() -> None:
    module = torch.nn.Linear(4, 4)
    expected = module.weight.detach().clone()
    packed = pack(module, MemfdBackend())
    mappings = mapped(packed)
    attach(module, packed.layout, mappings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the child needs none of them
        child = os.fork()
    if child == 0:
        # Whatever happens here, the test session must not go on twice.
        try:
            faulthandler.disable()
            with torch.no_grad():
                module.weight.fill_(7)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert torch.equal(module.weight, expected)
    for mapping in mappings:
        mapping.close()
    packed.close()


def _overwrite(module: torch.nn.Module, *, private_only: bool) -> None:
    """Fill the memory of every tensor that is not in a slab, past its strides and its dtype."""
    slots = walk(module).slots.values()
    shared = {slot.value.untyped_storage().data_ptr() for slot in slots if isinstance(slot.value, torch.nn.Parameter)}
    for slot in slots:
        storage = slot.value.untyped_storage()
        if storage.nbytes() and not (private_only and storage.data_ptr() in shared):
            bytes_of(slot.value, 0, storage.nbytes()).fill_(0xA5)
