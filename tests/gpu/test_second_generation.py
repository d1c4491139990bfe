"""A new checkpoint on a real GPU that has no room for two: NVML says so, and the engine ends first."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from appliance.ports import free_port
from appliance.slabs.cuda import CudaBackend
from tests import gpu_process
from tests.engine.checkpoints import make_checkpoint
from tests.engine.test_second_generation import replace_checkpoint
from tests.gpu_site import GpuSite

LEFT_BYTES = 5 << 30  # a keeper's planner wants 6 GiB beside the weights


@pytest.fixture
def full(uuid: str) -> Iterator[None]:
    """The first GPU, with room for a model and its processes, and not for what a second one would need."""
    backend = CudaBackend(uuid)
    torch.cuda.empty_cache()
    size_bytes = (backend.gpu.memory()[0] - LEFT_BYTES) // backend.granularity_bytes * backend.granularity_bytes
    with backend.create("ballast", size_bytes):
        yield


@pytest.mark.usefixtures("full")
def test_without_room_for_both_the_engine_ends_and_comes_back_with_the_new_weights(tmp_path: Path, uuid: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with gpu_process.gpus((uuid,), fake=False):
        site = GpuSite(tmp_path / "site", checkpoint, uuid, fake=False, engine={"port": free_port()})
        replace_checkpoint(site, site.environment)
