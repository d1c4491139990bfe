"""A checksum of resident weights, taken where they lie and as fast as the device reads its memory.

It tells that bytes changed (a flipped bit, a lost or swapped page, a stray write). It is no protection against people:
whoever can write the weights can make others of the same sum. For that there are the checkpoint's digests.

In host memory it is the first 64 bits of the slab's BLAKE3 digest, which processors are fastest at. On a GPU:

The bytes of a slab are 64-bit little-endian lanes w[0], w[1], ... The checksum is the sum over all i, modulo 2**64, of
mix(w[i] + (i + 1) * 0x9E3779B97F4A7C15), where mix does three times `x ^= x >> 32` and, between them, twice
`x *= 0xD6E8FEB86659FD93`, all modulo 2**64. Each step of mix can be undone, so a change within one lane always changes
the sum; any other change goes unnoticed once in 2**64. The lane's number goes in before the mixing, so lanes in another
order have another sum. A sum has no order: every device and number of threads gives the same.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast

import torch
from blake3 import blake3

from appliance.descriptors import Descriptor
from appliance.slabs.cuda_driver import compile_kernel, open_device
from appliance.slabs.devices import CPU, backend
from appliance.slabs.interface import Mapping
from appliance.tensors.storage import over, torch_device

GAMMA = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd: Weyl's sequence of SplitMix64
MULTIPLIER = 0xD6E8FEB86659FD93  # odd; of degski's 64-bit mixer, which mix is

_STEP_BYTES = 16  # what a thread of the kernel reads at once
# Torch's intermediate results stay in a cache. On a CPU a chunk is what torch leaves to one thread: on a busy host its
# threads wait for each other ten times as long as they compute.
_CHUNK_LANES = {"cpu": 1 << 15, "cuda": 1 << 21}
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8

_SOURCE = """
__device__ unsigned long long mix(unsigned long long x)
{
    x ^= x >> 32; x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 32; x *= 0xD6E8FEB86659FD93ull;
    return x ^ x >> 32;
}

__device__ unsigned long long two(ulonglong2 lanes, unsigned long long pair)
{
    unsigned long long weyl = (2 * pair + 1) * 0x9E3779B97F4A7C15ull;
    return mix(lanes.x + weyl) + mix(lanes.y + (weyl + 0x9E3779B97F4A7C15ull));
}

extern "C" __global__ void checksum(const ulonglong2 *memory, unsigned long long pairs, unsigned long long *sums)
{
    unsigned long long all = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long self = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long sum = 0, at = self;
    for (; at + 3 * all < pairs; at += 4 * all) {
        ulonglong2 a = memory[at], b = memory[at + all], c = memory[at + 2 * all], d = memory[at + 3 * all];
        sum += two(a, at) + two(b, at + all) + two(c, at + 2 * all) + two(d, at + 3 * all);
    }
    for (; at < pairs; at += all)
        sum += two(memory[at], at);
    sums[self] = sum;
}
"""


def slab_checksums(device: str, slabs: Sequence[Descriptor], slab_sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the checksum of each sealed slab, mapped read-only for as long as that takes; errors as `checksums`.

    PeerError where a descriptor is not a slab of that device and size, ResourceError where it cannot be mapped.
    """
    with ExitStack() as stack:
        return checksums([stack.enter_context(mapping) for mapping in backend(device).map_all(slabs, slab_sizes)])


def make_ready(device: str) -> None:
    """Open the device and compile what it needs, so that the next checksum takes no longer than reading."""
    if device != CPU:
        int(gpu_checksum(device)(torch.zeros(_STEP_BYTES, dtype=torch.uint8, device=torch_device(device))))


def checksums(mappings: Sequence[Mapping]) -> tuple[str, ...]:
    """Return the checksum of each slab's bytes as 16 hex digits, computed on the slab's device.

    ConfigError or HostError where a GPU cannot run the kernel.
    """
    values = [_host_checksum(mapping) if mapping.device == CPU else _started(mapping) for mapping in mappings]
    # Read back only now: a GPU works through all of them without waiting for us.
    return tuple(f"{int(value) % 2**64:016x}" for value in values)


def _host_checksum(mapping: Mapping) -> int:
    memory = cast("memoryview", mapping.window(0, mapping.size_bytes))
    return int.from_bytes(blake3(memory, max_threads=blake3.AUTO).digest(8))


def _started(mapping: Mapping) -> torch.Tensor:
    memory = over([mapping.window(0, mapping.size_bytes)], torch_device(mapping.device))[0]
    return gpu_checksum(mapping.device)(memory)


def checksum(memory: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor of bytes as one int64 (its 64 bits), on the tensor's device.

    Made of torch's own operations; on a GPU `gpu_checksum` is several times as fast. ValueError unless the bytes are
    contiguous and a multiple of 16.
    """
    lanes = _checked(memory).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    chunk_lanes = _CHUNK_LANES[memory.device.type]
    weyl = torch.arange(1, min(chunk_lanes, lanes.numel()) + 1, dtype=torch.int64, device=memory.device)
    weyl *= _signed(GAMMA)
    for chunk in torch.split(lanes, chunk_lanes):
        total += _mixed(chunk + weyl[: chunk.numel()]).sum()
        weyl += _signed(chunk_lanes * GAMMA)
    return total


@functools.cache
def gpu_checksum(uuid: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what `checksum` is on this GPU, in one pass over the memory; queued on torch's current stream.

    ConfigError where NVRTC, which torch's packages bring, is missing; HostError where the driver refuses.
    """
    gpu = open_device(uuid)
    kernel = gpu.load_kernel(compile_kernel(_SOURCE, compute_capability=gpu.compute_capability), "checksum")

    def take(memory: torch.Tensor) -> torch.Tensor:
        pairs = _checked(memory).numel() // _STEP_BYTES
        device = memory.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        blocks = processors * _BLOCKS_PER_MULTIPROCESSOR
        sums = torch.empty(blocks * _THREADS, dtype=torch.int64, device=device)
        kernel.launch(
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_ulonglong(pairs),
            ctypes.c_void_p(sums.data_ptr()),
            blocks=blocks,
            threads=_THREADS,
            stream=torch.cuda.current_stream(device).cuda_stream,
        )
        return sums.sum()

    return take


def _checked(memory: torch.Tensor) -> torch.Tensor:
    if memory.dtype != torch.uint8 or not memory.is_contiguous() or memory.numel() % _STEP_BYTES:
        raise ValueError(f"a checksum is of contiguous bytes, a multiple of {_STEP_BYTES} of them")
    return memory


def _mixed(lanes: torch.Tensor) -> torch.Tensor:
    """Return mix of every lane; the argument is used up."""
    for _ in range(2):
        # torch has no unsigned shift: the mask takes the sign's copies away again.
        lanes ^= (lanes >> 32) & 0xFFFFFFFF
        lanes *= _signed(MULTIPLIER)
    lanes ^= (lanes >> 32) & 0xFFFFFFFF
    return lanes


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
