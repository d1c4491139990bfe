"""How a GPU's memory is divided while weights are compared: they lie there twice, and vLLM's cache beside them.

That cache is told its size, half of what a second copy leaves free: `--gpu-memory-utilization` is of all memory, and
releases of vLLM differ in whether the keeper's weights are a part of it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from appliance.client import KeeperClient
from appliance.errors import ResourceError
from appliance.gpus import GpuState, gpu_states
from appliance.manifest.arguments import option_name
from appliance.quantities import format_size
from appliance.slabs.devices import CPU
from appliance.target import Target

CACHE = "--kv-cache-memory-bytes"
UTILIZATION = "--gpu-memory-utilization"
# Of all memory, what vLLM is to see free beside the weights: with a cache of a given size it asks no more.
FREE = 0.02


def memory_arguments(target: Target, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what ends the arguments of an engine that loads by itself, and of one that attaches: after them it wins.

    Nothing on a CPU, nor where they give the cache a size. ResourceError where a GPU has no room for two copies.
    """
    if any(option_name(argument) == CACHE for argument in arguments):
        return [], []
    with KeeperClient.connect(target.socket_path, timeout_s=target.model.wait_s) as client:
        held = held_bytes(client.status()["shards"])
    return divided(held, gpu_states()) if held else ([], [])


def held_bytes(shards: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return how much of each GPU's memory these shards take."""
    held: Counter[str] = Counter()
    for shard in shards:
        if shard["device"] != CPU:
            held[shard["device"]] += shard["size_bytes"]
    return held


def divided(held: Mapping[str, int], states: Sequence[GpuState]) -> tuple[list[str], list[str]]:
    """Return both engines' arguments where each of these GPUs, or parts of one, holds so many bytes."""
    seen = {device: place for device in held for state in states if (place := state.place(device)) is not None}
    left_bytes, device = min((seen[device].free_bytes - size_bytes, device) for device, size_bytes in held.items())
    if left_bytes <= 0:
        raise ResourceError(
            f"{device}: no room to load {format_size(held[device])} of weights once more beside the keeper's",
            hint="divide the model over more GPUs with `parallel`, or compare it where there is more memory",
        )
    share = max(size_bytes / seen[device].total_bytes for device, size_bytes in held.items())
    cache = [CACHE, str(left_bytes // 2)]
    return [*cache, UTILIZATION, f"{FREE}"], [*cache, UTILIZATION, f"{share + FREE:.4f}"]
