"""Torch over device memory: views, lifetimes, packing and attaching."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.safetensors import TensorInfo
from appliance.errors import TrustError
from appliance.slabs.cuda import CudaBackend, CudaMapping
from appliance.tensors import checksum as module
from appliance.tensors.attachment import attach
from appliance.tensors.checksum import checksum, checksums, gpu_checksum
from appliance.tensors.packing import Packed, pack
from appliance.tensors.staging import read_to_device
from appliance.tensors.storage import torch_device
from bench.gpu.model import random_model
from bench.gpu.sampler import MemorySampler
from tests.checkpoint.checkpoints import SHARDS, flip_a_byte, make_checkpoint
from tests.slabs.contract import REPOSITORY

MIB = 1 << 20
GPU = torch.device("cuda", 0)
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
WRITER = """
import sys, torch
from appliance.descriptors import Descriptor
from appliance.slabs.cuda import CudaBackend
device = CudaBackend(sys.argv[1])
mapping = device.map(Descriptor(int(sys.argv[2])), device.granularity_bytes)
tensor = torch.as_tensor(mapping.window(0, 4096), device="cuda:0")
print(int(tensor[0]))
tensor.zero_()
torch.cuda.synchronize()
print("written")
"""


def mapped(backend: CudaBackend, packed: Packed) -> list[CudaMapping]:
    return [backend.map(slab, size) for slab, size in zip(packed.slabs, packed.layout.slab_sizes, strict=True)]


def test_torch_and_the_slabs_mean_the_same_gpu(backend: CudaBackend, uuid: str) -> None:
    assert torch_device(uuid) == GPU
    assert backend.ordinal == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float64])
def test_a_window_is_a_tensor_of_any_dtype_without_a_copy(backend: CudaBackend, dtype: torch.dtype) -> None:
    with backend.create("weights", backend.granularity_bytes) as slab:
        window = slab.window(512, 4096)
        tensor = torch.as_tensor(window, device=GPU)
        assert (tensor.data_ptr(), tensor.dtype, tensor.shape) == (window.address, torch.uint8, (4096,))
        values = torch.arange(4096 // dtype.itemsize, device=GPU).remainder(100).to(dtype)
        tensor.view(dtype).copy_(values)
        del tensor, window
        with slab.seal() as descriptor, backend.map(descriptor, backend.granularity_bytes) as mapping:
            again = torch.as_tensor(mapping.window(512, 4096), device=GPU).view(dtype)
            assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))


def test_a_tensor_keeps_its_memory_mapped_and_no_longer(backend: CudaBackend) -> None:
    with backend.create("weights", backend.granularity_bytes) as slab, slab.seal() as descriptor:
        mapping = backend.map(descriptor, backend.granularity_bytes)
    tensor = torch.as_tensor(mapping.window(0, 4096), device=GPU)
    view = tensor[100:200].view(torch.int8)
    mapping.close()
    del tensor
    assert mapping.mapped
    assert int(view.sum()) is not None
    del view
    assert not mapping.mapped


def test_another_stream_may_still_read_when_a_mapping_goes(backend: CudaBackend) -> None:
    size_bytes = 512 * MIB
    with backend.create("weights", size_bytes) as slab:
        torch.as_tensor(slab.window(0, size_bytes), device=GPU).fill_(1)
        with slab.seal() as descriptor:
            mapping = backend.map(descriptor, size_bytes)
    tensor = torch.as_tensor(mapping.window(0, size_bytes), device=GPU)
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(50):
            results.append(tensor.view(torch.int64).sum())
    mapping.close()
    del tensor
    assert not mapping.mapped
    torch.cuda.synchronize()
    assert {int(result) for result in results} == {0x0101010101010101 * (size_bytes // 8) % 2**64}


def test_attached_weights_compute_what_the_originals_did(backend: CudaBackend) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(GPU, torch.bfloat16)
    model.register_buffer("scale", torch.rand(7, device=GPU), persistent=False)
    originals = {name: value.detach().clone() for name, value in model.state_dict().items()}
    inputs = torch.rand(4, 512, device=GPU, dtype=torch.bfloat16)
    expected = model(inputs)
    packed = pack(model, backend, slab_bytes=4 * MIB)
    assert len(packed.slabs) > 1
    mappings = mapped(backend, packed)
    before = checksums(mappings)
    attach(model, packed.layout, mappings)
    for mapping in mappings:
        mapping.close()
    assert torch.equal(model(inputs), expected)
    assert all(torch.equal(value, originals[name]) for name, value in model.state_dict().items())
    assert model.get_buffer("scale").device == GPU
    model.get_buffer("scale").zero_()
    again = mapped(backend, packed)
    assert checksums(again) == before
    for mapping in again:
        mapping.close()
    packed.close()
    del model, expected
    assert not any(mapping.mapped for mapping in mappings)


def test_a_graph_captured_over_attached_weights_replays(backend: CudaBackend) -> None:
    model = nn.Linear(512, 512, bias=False).to(GPU, torch.bfloat16).requires_grad_(False)
    inputs = torch.rand(4, 512, device=GPU, dtype=torch.bfloat16)
    expected = model(inputs)
    packed = pack(model, backend)
    mappings = mapped(backend, packed)
    attach(model, packed.layout, mappings)
    for mapping in mappings:
        mapping.close()
    packed.close()
    model(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(inputs)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
    del graph


def test_packing_needs_one_slab_beside_the_weights(backend: CudaBackend, uuid: str) -> None:
    slab_bytes, size_bytes = 1024 * MIB, 8 * 1024 * MIB
    with MemorySampler(uuid) as making:
        model = random_model(256, size_bytes, GPU, seed=0)
        torch.cuda.synchronize()
    with MemorySampler(uuid) as packing:
        packed = pack(model, backend, slab_bytes=slab_bytes)
    weights_bytes = making.end_bytes - making.start_bytes
    assert packing.samples > 5
    assert packing.peak_bytes - making.start_bytes <= weights_bytes + slab_bytes + 128 * MIB
    assert packing.end_bytes - making.start_bytes <= weights_bytes + 128 * MIB
    packed.close()


def test_a_kernel_that_writes_weights_ends_its_process_and_nothing_else(backend: CudaBackend) -> None:
    with backend.create("weights", backend.granularity_bytes) as slab:
        torch.as_tensor(slab.window(0, slab.size_bytes), device=GPU).fill_(7)
        descriptor = slab.seal()
    with descriptor:
        done = subprocess.run(
            [sys.executable, "-c", WRITER, backend.device, str(descriptor.fileno())],
            check=False,
            pass_fds=[descriptor.fileno()],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 0
        assert done.stdout.split() == ["7"], done.stderr
        with backend.map(descriptor, backend.granularity_bytes) as mapping:
            assert int(torch.as_tensor(mapping.window(0, 4096), device=GPU).to(torch.int64).sum()) == 7 * 4096


@pytest.mark.parametrize("size_bytes", [16, 4096, 4096 + 16, 100 * MIB + 48])
def test_the_kernels_checksum_is_torchs_on_both_sides(uuid: str, size_bytes: int) -> None:
    memory = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=GPU)
    value = int(gpu_checksum(uuid)(memory))
    assert value == int(checksum(memory)) == int(checksum(memory.cpu()))
    memory[size_bytes // 2] ^= 64
    assert int(gpu_checksum(uuid)(memory)) != value


def test_a_checkpoint_arrives_on_the_gpu_as_it_was_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    manifest = digest_checkpoint(checkpoint)
    tensors: dict[str, torch.Tensor] = {}

    def allocate(info: TensorInfo) -> torch.Tensor:
        tensors[info.name] = torch.empty(info.shape, dtype=DTYPES[info.dtype], device=GPU)
        return tensors[info.name]

    read_to_device(checkpoint, manifest, device=GPU, allocate=allocate)
    for shard in SHARDS.values():
        for name, (_, _, data) in shard.items():
            assert tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().tobytes() == data, name
    flip_a_byte(checkpoint / next(iter(SHARDS)))
    with pytest.raises(TrustError, match="not the file"):
        read_to_device(checkpoint, manifest, device=GPU, allocate=allocate)


def test_the_kernel_is_compiled_once(uuid: str) -> None:
    assert module.gpu_checksum(uuid) is module.gpu_checksum(uuid)
