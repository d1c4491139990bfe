"""Packing into device memory and attaching to it, on a GPU in host memory; tests/gpu does it on a real one."""

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from appliance.errors import ResourceError
from appliance.slabs.cuda import CudaBackend
from appliance.slabs.devices import backend
from appliance.tensors.attachment import attach
from appliance.tensors.checksum import checksums
from appliance.tensors.packing import Packed, pack
from tests.slabs.cpu_gpu import installed
from tests.slabs.fake_driver import FakeCuda, FakeGpu

MIB = 1 << 20
UUID = "GPU-00000000-0000-0000-0000-0000000000a0"


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with installed(FakeCuda([FakeGpu(UUID, total_bytes=64 * MIB)])) as fake:
        yield fake
        gc.collect()
        assert not fake.live
        assert not fake.faults


def _module(*, layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=True) for _ in range(layers)))  # 4 MiB and 4 KiB each
    module.register_buffer("scale", torch.rand(7, dtype=torch.bfloat16), persistent=False)
    return module


def _attached(packed: Packed, skeleton: nn.Module, *, copy: bool = False) -> None:
    device = backend(UUID)
    mappings = [device.map(slab, size) for slab, size in zip(packed.slabs, packed.layout.slab_sizes, strict=True)]
    try:
        attach(skeleton, packed.layout, mappings, copy=copy)
    finally:
        for mapping in mappings:
            mapping.close()


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def test_attached_tensors_are_the_packed_ones(fake: FakeCuda) -> None:
    module = _module()
    originals = {name: tensor.detach().clone() for name, tensor in _tensors(module).items()}
    packed = pack(module, backend(UUID), slab_bytes=6 * MIB)
    assert fake.live == {}  # nothing but descriptors holds the weights now
    assert len(packed.slabs) == 3
    _attached(packed, module)
    packed.close()
    for name, tensor in _tensors(module).items():
        assert torch.equal(tensor, originals[name]), name
    assert module(torch.zeros(1, 1024)).shape == (1, 1024)
    module.to("meta")
    assert "mappings" not in fake.live


def test_a_buffer_is_a_private_copy_and_a_parameter_is_not(fake: FakeCuda) -> None:
    module = _module()
    packed = pack(module, backend(UUID))
    device = backend(UUID)
    [mapping] = [device.map(packed.slabs[0], packed.layout.slab_sizes[0])]
    before = checksums([mapping])
    attach(module, packed.layout, [mapping])
    start = ctypes.addressof(mapping.window(0, 1))  # type: ignore[arg-type]
    inside = {name for name, tensor in _tensors(module).items() if 0 <= tensor.data_ptr() - start < mapping.size_bytes}
    assert inside == {name for name, _ in module.named_parameters()}
    module.get_buffer("scale").zero_()
    assert checksums([mapping]) == before
    mapping.close()
    packed.close()


def test_a_copy_needs_the_keeper_no_more(fake: FakeCuda) -> None:
    module = _module()
    expected = module(torch.ones(1, 1024))
    packed = pack(module, backend(UUID))
    _attached(packed, module, copy=True)
    packed.close()
    assert "mappings" not in fake.live
    assert torch.equal(module(torch.ones(1, 1024)), expected)


def test_a_gpu_without_room_for_the_next_slab_loses_no_memory(fake: FakeCuda) -> None:
    kept = CudaBackend(UUID).create("kept", 56 * MIB)
    with pytest.raises(ResourceError, match="6 MiB wanted, 2 MiB of 64 MiB free") as raised:
        pack(_module(), backend(UUID), slab_bytes=6 * MIB)
    assert "weights-1" in raised.value.message
    kept.close()
    packed = pack(_module(), backend(UUID), slab_bytes=6 * MIB)
    packed.close()


def test_the_device_is_done_before_slabs_are_passed_on(fake: FakeCuda) -> None:
    fake.busy = True
    pack(_module(), backend(UUID)).close()
    assert not fake.busy
