import ctypes
import os
import random
from pathlib import Path
from shutil import which

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from appliance.slabs.cuda_driver import compile_kernel, open_device
from appliance.slabs.memfd import MemfdBackend
from appliance.tensors import checksum as module
from appliance.tensors.checksum import GAMMA, MULTIPLIER, checksum, checksums
from tests.slabs.fake_driver import FakeCuda
from tests.slabs.fake_nvrtc import FakeNvrtc


def by_definition(data: bytes) -> int:
    """The docstring's formula, in Python's own integers."""
    total = 0
    for index in range(len(data) // 8):
        x = int.from_bytes(data[8 * index : 8 * index + 8], "little") + (index + 1) * GAMMA
        for _ in range(2):
            x %= 2**64
            x ^= x >> 32
            x *= MULTIPLIER
        x %= 2**64
        total += x ^ (x >> 32)
    return total % 2**64


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def value_of(data: bytes) -> int:
    return int(checksum(bytes_tensor(data))) % 2**64


@given(st.binary(max_size=400).map(lambda data: data[: len(data) // 16 * 16]))
def test_it_is_what_the_definition_says(data: bytes) -> None:
    assert value_of(data) == by_definition(data)


def test_its_values_are_for_ever() -> None:
    # Checksums are kept with the shards: another value for the same bytes would call whole weights damaged.
    assert value_of(bytes(16)) == 0x891BECC266AE16B6
    assert value_of(bytes(range(256)) * 16) == 0x5E1A5448169A0DCD


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(1).randbytes(8 * 1024 + 16)
    whole = value_of(data)
    for lanes in (1, 2, 7, 64, 1023, 1024, 1025):
        monkeypatch.setattr(module, "_CHUNK_LANES", {"cpu": lanes})
        assert value_of(data) == whole == by_definition(data)


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"\x80"])
def test_every_single_bit_counts(fill: bytes) -> None:
    data = bytearray(fill * 64)
    seen = {value_of(bytes(data))}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(value_of(bytes(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(data)


def test_two_flips_of_the_same_bit_do_not_cancel() -> None:
    data = random.Random(2).randbytes(256)
    seen = {value_of(data)}
    for bit in (0, 31, 32, 63):
        for lane in range(1, 32):
            changed = bytearray(data)
            for place in (0, lane):
                changed[8 * place + bit // 8] ^= 1 << bit % 8
            seen.add(value_of(bytes(changed)))
    assert len(seen) == 1 + 4 * 31


def test_swapped_lanes_and_moved_pages_are_seen() -> None:
    data = random.Random(3).randbytes(4096 * 4)
    lanes = [data[start : start + 8] for start in range(0, len(data), 8)]
    pages = [data[start : start + 4096] for start in range(0, len(data), 4096)]
    first_two = b"".join([lanes[1], lanes[0], *lanes[2:]])
    rolled = data[8:] + data[:8]
    page_swapped = b"".join([pages[1], pages[0], *pages[2:]])
    page_lost = b"".join([pages[0], bytes(4096), *pages[2:]])
    page_doubled = b"".join([pages[0], pages[0], *pages[2:]])
    assert len({value_of(one) for one in (data, first_two, rolled, page_swapped, page_lost, page_doubled)}) == 6


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(8, dtype=torch.uint8), torch.zeros(16), torch.zeros(64, dtype=torch.uint8)[::2]],
    ids=["half a step", "floats", "with gaps"],
)
def test_what_is_no_stretch_of_bytes_is_refused(memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous bytes"):
        checksum(memory)


def test_in_host_memory_it_is_of_the_slabs_blake3_digests() -> None:
    backend = MemfdBackend()
    data = [os.urandom(backend.granularity_bytes) for _ in range(2)]
    mappings = []
    for index, content in enumerate(data):
        with backend.create(f"test-{index}", len(content)) as slab:
            slab.window(0, len(content))[:] = content
            with slab.seal() as descriptor:
                mappings.append(backend.map(descriptor, len(content)))
    assert checksums(mappings) == tuple(blake3(content).hexdigest()[:16] for content in data)
    for mapping in mappings:
        mapping.close()
        assert not mapping.mapped


@pytest.mark.skipif(which("g++") is None, reason="no g++ to run the GPU's kernel on the CPU with")
@pytest.mark.parametrize("size_bytes", [0, 16, 32, 4096, 4096 + 16, 100_000 * 16])
def test_the_gpus_kernel_gives_the_same(tmp_path: Path, size_bytes: int) -> None:
    nvrtc = FakeNvrtc(tmp_path)
    fake = FakeCuda(images=nvrtc)
    gpu = open_device(fake.gpus[0].uuid, bindings=fake)
    image = compile_kernel(module._SOURCE, compute_capability=(9, 0), nvrtc=nvrtc)
    kernel = gpu.load_kernel(image, "checksum")
    data = random.Random(size_bytes).randbytes(size_bytes)
    memory = ctypes.create_string_buffer(data, max(size_bytes, 1))
    for blocks, threads in ((1, 1), (3, 32), (40, 256)):
        sums = torch.full((blocks * threads,), -1, dtype=torch.int64)  # what nobody writes would show
        kernel.launch(
            ctypes.c_void_p(ctypes.addressof(memory)),
            ctypes.c_ulonglong(size_bytes // 16),
            ctypes.c_void_p(sums.data_ptr()),
            blocks=blocks,
            threads=threads,
            stream=0,
        )
        assert int(sums.sum()) % 2**64 == value_of(data)
