"""Whether a device has room for a checkpoint's weights beside what is on it now."""

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from appliance.checkpoint.digests import present, stat_files
from appliance.checkpoint.identity import Identity
from appliance.errors import ApplianceError
from appliance.gpus import GpuState, gpu_states
from appliance.slabs.memory import available_bytes

# What a load needs beside the weights: a slab, and on a GPU the context of a process that computes.
HOST_SPARE_BYTES = 512 << 20
GPU_SPARE_BYTES = 6 << 30


def crowded(
    identity: Identity,
    devices: Sequence[str],
    *,
    states: Callable[[], Sequence[GpuState]] = gpu_states,
    host_bytes: Callable[[], int] = available_bytes,
) -> tuple[str, ...]:
    """Return those of the devices, one for each rank, that have no room for their part of the checkpoint's tensors.

    Where that cannot be known, as without NVML, a device is taken to have room: whoever loads finds out.
    """
    total_bytes = _tensor_bytes(identity)
    found = []
    for device in dict.fromkeys(devices):
        needed_bytes = total_bytes * devices.count(device) // len(devices)
        spare_bytes = HOST_SPARE_BYTES if device == "cpu" else GPU_SPARE_BYTES
        free_bytes = _free_bytes(device, states, host_bytes)
        if free_bytes is not None and free_bytes < needed_bytes + spare_bytes:
            found.append(device)
    return tuple(found)


def _tensor_bytes(identity: Identity) -> int:
    paths = [path for path in identity.manifest.digests if PurePosixPath(path).suffix == ".safetensors"]
    return sum(stat.size_bytes for stat in present(identity.root, stat_files(identity.root, paths)).values())


def _free_bytes(device: str, states: Callable[[], Sequence[GpuState]], host_bytes: Callable[[], int]) -> int | None:
    try:
        if device == "cpu":
            return host_bytes()
        return next((place.free_bytes for state in states() if (place := state.place(device)) is not None), None)
    except ApplianceError:
        return None
