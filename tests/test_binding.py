"""A shard is mapped by one thread while another finds its places; whichever of the two fails, nothing stays."""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from appliance import layout as layouts
from appliance.descriptors import Descriptor, close_all
from appliance.errors import PeerError, ResourceError
from appliance.handover.binding import bind
from appliance.slabs.interface import Mapping
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors.inventory import TensorError
from appliance.tensors.packing import Packed, pack
from tests.tensors.shards import small_model, small_skeleton

WAIT_S = 30.0


class Noted(MemfdBackend):
    """Remembers what it mapped, and may refuse."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.mappings: list[Mapping] = []
        self.began = threading.Event()
        self._refusal = refusal

    def map_all(self, descriptors: Sequence[Descriptor], sizes_bytes: Sequence[int]) -> list[Mapping]:
        self.began.set()
        self.mappings = super().map_all(descriptors, sizes_bytes)
        if self._refusal is not None:
            for mapping in self.mappings:
                mapping.close()
            raise self._refusal
        return self.mappings


@pytest.fixture
def packed() -> Iterator[Packed]:
    torch.manual_seed(0)
    packed = pack(small_model(), MemfdBackend())
    yield packed
    close_all(packed.slabs)


def bound(module: nn.Module, packed: Packed, device: MemfdBackend) -> Any:
    bind(module, packed.layout.encode(), device, packed.slabs, packed.layout.slab_sizes)
    return module


def test_a_module_gets_its_tensors_and_keeps_them_mapped(packed: Packed) -> None:
    torch.manual_seed(0)
    original, device = small_model(), Noted()
    module = bound(small_skeleton(), packed, device)
    assert torch.equal(module.embed.weight, original.embed.weight)
    assert all(mapping.mapped for mapping in device.mappings)
    assert not any(slab.closed for slab in packed.slabs)
    del module
    assert not any(mapping.mapped for mapping in device.mappings)


def test_slabs_are_mapped_while_the_layout_is_read(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    device, decode = Noted(), layouts.decode

    def decoded(data: bytes) -> layouts.Layout:
        assert device.began.wait(WAIT_S), "nothing was mapped meanwhile"
        return decode(data)

    monkeypatch.setattr(layouts, "decode", decoded)
    bound(small_skeleton(), packed, device)


def test_a_slab_that_is_refused_leaves_the_module_as_it_was(packed: Packed) -> None:
    skeleton = small_skeleton()
    with pytest.raises(PeerError, match="no slab"):
        bound(skeleton, packed, Noted(PeerError("no slab")))
    assert skeleton.embed.weight.is_meta


def test_a_shard_that_does_not_fit_stays_mapped_nowhere(packed: Packed) -> None:
    device = Noted()
    with pytest.raises(TensorError, match="does not fit"):
        bound(nn.Linear(2, 2, device="meta"), packed, device)
    assert device.mappings
    assert not any(mapping.mapped for mapping in device.mappings)


def test_a_shard_is_refused_for_its_places_before_its_slabs(packed: Packed) -> None:
    with pytest.raises(TensorError, match="does not fit"):
        bound(nn.Linear(2, 2, device="meta"), packed, Noted(PeerError("no slab")))


@pytest.mark.parametrize("refusal", [None, PeerError("no slab")], ids=["mapped", "refused"])
def test_threads_take_turns_as_before_afterwards(packed: Packed, refusal: Exception | None) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0125)
    try:
        with contextlib.suppress(PeerError):
            bound(small_skeleton(), packed, Noted(refusal))
        assert sys.getswitchinterval() == pytest.approx(0.0125, rel=0.01)
    finally:
        sys.setswitchinterval(before)


class Held(Noted):
    """Maps nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def map_all(self, descriptors: Sequence[Descriptor], sizes_bytes: Sequence[int]) -> list[Mapping]:
        self.began.set()
        assert self.may_go_on.wait(WAIT_S)
        return super().map_all(descriptors, sizes_bytes)


def test_threads_take_turns_as_before_after_two_binds_at_once(packed: Packed) -> None:
    before, devices = sys.getswitchinterval(), [Held(), Held()]
    threads = [threading.Thread(target=bound, args=(small_skeleton(), packed, device)) for device in devices]
    for thread, device in zip(threads, devices, strict=True):
        thread.start()
        assert device.began.wait(WAIT_S)
    for thread, device in zip(threads, devices, strict=True):
        device.may_go_on.set()
        thread.join(WAIT_S)
    assert sys.getswitchinterval() == pytest.approx(before, rel=0.01)


def test_a_process_that_may_have_no_more_threads_is_short_of_something(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before, device = sys.getswitchinterval(), Noted()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(ResourceError, match="can't start new thread"):
            bound(small_skeleton(), packed, device)
    assert not device.began.is_set()
    assert sys.getswitchinterval() == pytest.approx(before, rel=0.01)
