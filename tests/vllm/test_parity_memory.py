"""What two copies of a model's weights leave of a GPU's memory, and what vLLM is told of it."""

from pathlib import Path
from typing import Any, cast

import pytest

from appliance.errors import ResourceError
from appliance.gpus import GpuPart, GpuState
from appliance.target import Target
from appliance.vllm.parity_memory import divided, held_bytes, memory_arguments

TOTAL = 100 << 30


def shard(device: str, size_gib: int) -> dict[str, Any]:
    return {"device": device, "size_bytes": size_gib << 30}


def gpu(uuid: str, held_gib: int, *, others_gib: int = 0) -> GpuState:
    """Return a GPU of TOTAL, of which a keeper has so much, and others too."""
    used = (held_gib + others_gib) << 30
    return GpuState(0, uuid, "H200", "580", "9.0", TOTAL, used, TOTAL - used, True, False, ())


def value_of(arguments: list[str], option: str) -> float:
    return float(arguments[arguments.index(option) + 1])


def test_a_gpu_holds_the_weights_of_a_draft_too_and_a_cpu_none() -> None:
    assert held_bytes([shard("GPU-0", 3), shard("GPU-1", 3), shard("GPU-1", 1), shard("cpu", 9)]) == {
        "GPU-0": 3 << 30,
        "GPU-1": 4 << 30,
    }


@pytest.mark.parametrize(("others_gib", "cache_gib"), [(0, 20), (10, 15)])
def test_both_engines_get_half_of_what_a_second_copy_leaves_as_cache(others_gib: int, cache_gib: int) -> None:
    states = [gpu("GPU-0", 10), gpu("GPU-1", 30, others_gib=others_gib)]
    for arguments in divided({"GPU-0": 10 << 30, "GPU-1": 30 << 30}, states):
        assert value_of(arguments, "--kv-cache-memory-bytes") == cache_gib << 30


def test_no_engine_asks_for_more_than_the_keeper_leaves_free() -> None:
    loading, attaching = divided({"GPU-0": 45 << 30}, [gpu("GPU-0", 45)])
    assert value_of(loading, "--gpu-memory-utilization") * TOTAL < TOTAL - (45 << 30)
    # Before 0.32 vLLM asks for this beside the keeper's weights, since then it takes these off.
    assert 45 << 30 < value_of(attaching, "--gpu-memory-utilization") * TOTAL < TOTAL - (45 << 30)


def test_weights_that_do_not_fit_twice_are_refused_with_what_to_do() -> None:
    with pytest.raises(ResourceError, match="GPU-0: no room") as caught:
        divided({"GPU-0": 50 << 30}, [gpu("GPU-0", 50)])
    assert "parallel" in str(caught.value)


@pytest.mark.parametrize("told", [["--kv-cache-memory-bytes", "5"], ["--kv_cache_memory_bytes=5"]])
def test_a_size_of_the_manifest_is_left_alone(told: list[str]) -> None:
    nobody = cast("Target", Path("/nowhere"))  # no keeper is asked
    assert memory_arguments(nobody, ["configs", *told]) == ([], [])


def test_a_part_of_a_gpu_has_memory_of_its_own() -> None:
    part = GpuPart("MIG-0", "H200", 10 << 30, 0, 10 << 30, 1, 0)
    state = GpuState(0, "GPU-0", "H200", "580", "9.0", TOTAL, 0, TOTAL, True, True, (), (part,))
    for arguments in divided({"MIG-0": 2 << 30}, [state]):
        assert value_of(arguments, "--kv-cache-memory-bytes") == 4 << 30
    for arguments in divided({"GPU-0": 2 << 30}, [state]):
        assert value_of(arguments, "--kv-cache-memory-bytes") == (TOTAL - (2 << 30)) // 2
