"""The GPUs that a bench runs on: this host's, or those that the tests make in host memory."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch

from appliance.gpus import gpu_states

GIB = 1 << 30
FAKE = "BENCH_FAKE_GPU"  # handed on to the processes that a bench starts
REPOSITORY = Path(__file__).resolve().parents[2]
FAKE_UUIDS = tuple(f"GPU-{uuid.UUID(int=number)}" for number in (0xA0, 0xB1))


@contextlib.contextmanager
def prepared(*, fake: bool = False) -> Iterator[tuple[str, ...]]:
    """Give the UUIDs of the GPUs, first torch's `cuda:0`, with their contexts open."""
    if not (fake or os.environ.get(FAKE)):
        uuids = tuple(
            f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())
        )
        for index in range(len(uuids)):
            torch.zeros(1, device=f"cuda:{index}")
        yield uuids
        return
    from tests.slabs.cpu_gpu import installed
    from tests.slabs.fake_driver import FakeCuda, FakeGpu

    os.environ[FAKE] = "1"
    torch.set_num_threads(1)  # on a busy host torch's threads wait for each other longer than they compute
    with installed(FakeCuda([FakeGpu(uuid, total_bytes=16 * GIB) for uuid in FAKE_UUIDS])):
        yield FAKE_UUIDS


def visible(*, fake: bool) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs without opening a context on one."""
    if fake:
        os.environ[FAKE] = "1"
        return FAKE_UUIDS
    return tuple(gpu.uuid for gpu in gpu_states())


def is_fake() -> bool:
    return bool(os.environ.get(FAKE))


def torch_device(index: int) -> torch.device:
    """Return what torch calls the GPU of this index; the fake ones are the CPU."""
    return torch.device("cpu") if is_fake() else torch.device("cuda", index)


def synchronize() -> None:
    if not is_fake():
        torch.cuda.synchronize()


def environment() -> dict[str, str]:
    """Return the environment for a process of the bench: the repository importable, faults told with a stack."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
