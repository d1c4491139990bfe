"""Memory that is short is told from everything else that goes wrong, and by what is short."""

import errno
import mmap
from collections.abc import Callable

import pytest
import torch

from appliance.errors import EXIT_RESOURCE, MissError, ResourceError
from appliance.vllm.shortage import shortage, telling_shortage

TOO_MUCH = 1 << 60
# What vLLM's worker processes raise is read from the text of another error.
OF_A_WORKER = "Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB.', please check the stack trace"
CACHES = [
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "(4.38 GiB KV cache is needed, which is larger than the available KV cache memory (2.0 GiB). Try decreasing",
    "Free memory on device cuda:0 (3/139 GiB) on startup is less than desired GPU memory utilization (0.9, 125 GiB).",
    "Available memory on node 0 (1/15 GiB) on startup is less than desired CPU memory utilization (0.9, 14 GiB).",
]


def raised(act: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        act()
    return caught.value


@pytest.mark.parametrize(
    "act",
    [lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), lambda: bytearray(TOO_MUCH), lambda: mmap.mmap(-1, TOO_MUCH)],
    ids=["torch", "Python", "mmap"],
)
def test_host_memory_that_really_runs_out_is_told_as_such(act: Callable[[], object]) -> None:
    found = shortage(raised(act), "comparing")
    assert found is not None
    assert found.message.startswith("comparing: host memory ran out")
    assert found.exit_status == EXIT_RESOURCE
    assert found.hint


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. GPU 0"), RuntimeError(OF_A_WORKER)])
def test_a_gpu_that_is_full_is_told_with_what_torch_says_of_it(error: Exception) -> None:
    found = shortage(error, "comparing")
    assert found is not None
    assert "comparing: GPU memory ran out" in found.message
    assert "CUDA out of memory" in found.message
    assert "`parallel`" in str(found.hint)


@pytest.mark.parametrize("text", CACHES)
def test_a_cache_that_does_not_fit_is_told_with_the_options_that_change_it(text: str) -> None:
    found = shortage(ValueError(text), "comparing")
    assert found is not None
    assert "cache ran out" in found.message
    assert "--max-model-len" in str(found.hint)


def test_a_shortage_is_found_behind_the_error_that_came_of_it() -> None:
    with pytest.raises(ResourceError, match="GPU memory") as caught, telling_shortage("comparing"):
        try:
            raise torch.OutOfMemoryError("full")
        except torch.OutOfMemoryError as error:
            raise ValueError("no engine") from error
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a memory of nothing"),
        KeyError("out of memory"),
        OSError(errno.EACCES, "memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_has_nothing_to_do_with_memory_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, telling_shortage("comparing"):
        raise error
    assert caught.value is error


def test_an_error_that_comes_of_itself_passes_as_it_is() -> None:
    one, other = RuntimeError("no engine"), RuntimeError("no worker")
    one.__cause__, other.__cause__ = other, one
    assert shortage(one, "comparing") is None


def test_what_is_told_already_is_told_as_it_was() -> None:
    with pytest.raises(MissError, match="out of memory"), telling_shortage("comparing"):
        raise MissError("nothing here is out of memory")
