"""The contracts of slabs and of the driver, on a real GPU: what the fake driver claims is true here or fails."""

import os
import subprocess
import sys
from typing import Any

import pytest

from appliance.errors import ConfigError, PeerError, ResourceError
from appliance.slabs import devices
from appliance.slabs.cuda import CudaBackend
from appliance.slabs.cuda_driver import CudaDevice, open_device
from tests.slabs.contract import REPOSITORY, BackendContract
from tests.slabs.driver_contract import DriverContract
from tests.slabs.labs import CudaLab


class TestSlabs(BackendContract):
    @pytest.fixture
    def lab(self, uuid: str, cuda: Any) -> CudaLab:
        return CudaLab("gpu", uuid, cuda)


class TestDriver(DriverContract):
    @pytest.fixture
    def gpu(self, uuid: str) -> CudaDevice:
        return open_device(uuid)


def test_out_of_memory_says_how_much_is_free_and_keeps_nothing(backend: CudaBackend) -> None:
    free_bytes = backend.gpu.memory()[0]
    wanted = (free_bytes // backend.granularity_bytes + 64) * backend.granularity_bytes
    with pytest.raises(ResourceError, match=r"GiB wanted, .* free on GPU GPU-"):
        backend.create("weights", wanted)
    assert free_bytes - backend.gpu.memory()[0] < 64 << 20


def test_most_of_the_memory_can_be_one_slab(backend: CudaBackend) -> None:
    size_bytes = int(backend.gpu.memory()[0] * 0.9) // backend.granularity_bytes * backend.granularity_bytes
    with backend.create("weights", size_bytes) as slab, slab.seal() as descriptor:
        backend.map(descriptor, size_bytes).close()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="not visible"):
        devices.backend("GPU-00000000-0000-0000-0000-000000000000")


def test_a_hidden_gpu_is_not_visible(uuid: str) -> None:
    program = (
        "import sys; from appliance.slabs.devices import backend; from appliance.errors import ConfigError\n"
        "try: backend(sys.argv[1])\nexcept ConfigError as error: print(error.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, uuid],
        check=True,
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert "CUDA_VISIBLE_DEVICES" in done.stdout


def test_a_slab_of_another_gpu_is_refused(uuid: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    other = CudaBackend(f"GPU-{torch.cuda.get_device_properties(1).uuid}")
    with (
        other.create("weights", other.granularity_bytes) as slab,
        slab.seal() as descriptor,
        pytest.raises(PeerError, match="another GPU"),
    ):
        CudaBackend(uuid).map(descriptor, other.granularity_bytes)
