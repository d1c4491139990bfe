"""Whether a new checkpoint has room beside what is there."""

from pathlib import Path

import pynvml
import pytest

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.files import find_root
from appliance.checkpoint.identity import Identity
from appliance.errors import HostError
from appliance.gpus import gpu_states
from appliance.room import GPU_SPARE_BYTES, HOST_SPARE_BYTES, crowded
from tests.test_gpus import GIB, FakeNvml

# What is free on each of the fake's GPUs.
FREE_BYTES = 109 * GIB


def identity_of(folder: Path, tensor_bytes: int) -> Identity:
    """Return a checkpoint with two files of tensors, holes as large as asked for, and another file that is no less."""
    for name in ("a.safetensors", "b.safetensors", "tokenizer.json"):
        (folder / name).touch()
    manifest = digest_checkpoint(folder)
    for name, size_bytes in (("a", tensor_bytes // 2), ("b", tensor_bytes - tensor_bytes // 2)):
        with (folder / f"{name}.safetensors").open("r+b") as file:
            file.truncate(size_bytes)
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(tensor_bytes)
    return Identity(find_root(folder), manifest, "signer")


@pytest.mark.parametrize(("more_bytes", "expected"), [(0, ()), (1, ("cpu",))])
def test_host_memory_must_hold_all_tensors_and_a_slab(
    tmp_path: Path, more_bytes: int, expected: tuple[str, ...]
) -> None:
    identity = identity_of(tmp_path, 10 * GIB + more_bytes)
    assert crowded(identity, ["cpu", "cpu"], host_bytes=lambda: 10 * GIB + HOST_SPARE_BYTES) == expected


@pytest.mark.parametrize(("more_bytes", "expected"), [(0, ()), (2, ("GPU-100", "GPU-101"))])
def test_each_gpu_must_hold_its_ranks_part(tmp_path: Path, more_bytes: int, expected: tuple[str, ...]) -> None:
    states = gpu_states(FakeNvml())
    identity = identity_of(tmp_path, 2 * (FREE_BYTES - GPU_SPARE_BYTES) + more_bytes)
    assert crowded(identity, ["GPU-100", "GPU-101"], states=lambda: states) == expected


def test_a_part_of_a_gpu_has_what_is_its_own(tmp_path: Path) -> None:
    states = gpu_states(FakeNvml(nvmlDeviceGetMigMode=[1, 1]))
    assert crowded(identity_of(tmp_path, FREE_BYTES), ["MIG-1003"], states=lambda: states) == ("MIG-1003",)


def test_what_nobody_can_tell_is_room(tmp_path: Path) -> None:
    identity = identity_of(tmp_path, 1 << 42)

    def refuse() -> int:
        raise HostError("the kernel does not tell")

    assert crowded(identity, ["cpu"], host_bytes=refuse) == ()
    assert crowded(identity, ["GPU-unknown"], states=lambda: gpu_states(FakeNvml())) == ()
    lost = FakeNvml(nvmlInit=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert crowded(identity, ["GPU-100"], states=lambda: gpu_states(lost)) == ()
