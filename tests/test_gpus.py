import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from appliance.errors import ConfigError, HostError
from appliance.gpus import GpuProcess, gpu_states

GIB = 1 << 30


class FakeNvml:
    """nvidia-ml-py's module with an NVML of two GPUs behind it; names it does not have are the real module's."""

    def __init__(self, **answers: Any) -> None:
        self.open = 0
        self._answers = answers

    def nvmlInit(self) -> None:  # noqa: N802
        self._answer("nvmlInit", None)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:  # noqa: N802
        return self._answer("nvmlSystemGetDriverVersion", "580.65.06")

    def nvmlDeviceGetCount(self) -> Any:  # noqa: N802
        return self._answer("nvmlDeviceGetCount", 2)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return 100 + index

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int) -> Any:  # noqa: N802
        assert version == pynvml.nvmlMemory_v2
        return SimpleNamespace(total=140 * GIB, used=30 * GIB, free=109 * GIB, reserved=GIB)

    def nvmlDeviceGetCudaComputeCapability(self, device: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0

    def nvmlDeviceGetUUID(self, device: int) -> str:  # noqa: N802
        return f"GPU-{device}" if device < 1000 else f"MIG-{device}"

    def nvmlDeviceGetName(self, device: int) -> str:  # noqa: N802
        return "NVIDIA H200" if device < 1000 else "NVIDIA H200 MIG 1g.18gb"

    def nvmlDeviceGetPersistenceMode(self, device: int) -> Any:  # noqa: N802
        return self._answer("nvmlDeviceGetPersistenceMode", 1 if device == 100 else 0)

    def nvmlDeviceGetMigMode(self, device: int) -> Any:  # noqa: N802
        return self._answer("nvmlDeviceGetMigMode", [0, 1])

    def nvmlDeviceGetMaxMigDeviceCount(self, device: int) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: int, number: int) -> int:  # noqa: N802
        if number not in (0, 3):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 1000 + number

    def nvmlDeviceGetGpuInstanceId(self, device: int) -> int:  # noqa: N802
        return device - 1000 + 7

    def nvmlDeviceGetComputeInstanceId(self, device: int) -> int:  # noqa: N802
        return device - 1000

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> Any:  # noqa: N802
        processes = [SimpleNamespace(pid=42, usedGpuMemory=8 * GIB), SimpleNamespace(pid=7, usedGpuMemory=2 * GIB)]
        return self._answer("nvmlDeviceGetComputeRunningProcesses", processes)

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def _answer(self, name: str, answer: Any) -> Any:
        answer = self._answers.get(name, answer)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_each_gpu_is_told_with_its_processes() -> None:
    nvml = FakeNvml()
    first, second = gpu_states(nvml)
    assert (first.index, first.uuid, first.model) == (0, "GPU-100", "NVIDIA H200")
    assert (first.driver_version, first.compute_capability) == ("580.65.06", "9.0")
    assert (first.total_bytes, first.used_bytes, first.free_bytes) == (140 * GIB, 30 * GIB, 109 * GIB)
    assert first.processes == (GpuProcess(7, 2 * GIB), GpuProcess(42, 8 * GIB))
    assert [first.persistence_mode, second.persistence_mode] == [True, False]
    assert first.mig_mode is False  # the mode that is pending until a reset is not the mode
    assert nvml.open == 0


def test_the_parts_of_a_divided_gpu_are_told() -> None:
    state = gpu_states(FakeNvml(nvmlDeviceGetMigMode=[1, 1]))[0]
    assert state.mig_mode is True
    assert [(part.uuid, part.model, part.gpu_instance, part.compute_instance) for part in state.parts] == [
        ("MIG-1000", "NVIDIA H200 MIG 1g.18gb", 7, 0),
        ("MIG-1003", "NVIDIA H200 MIG 1g.18gb", 10, 3),
    ]
    assert state.place("MIG-1003") is state.parts[1]
    assert state.place("GPU-100") is state
    assert state.place("MIG-1001") is None
    assert gpu_states(FakeNvml())[0].parts == ()


def test_what_no_process_accounts_for_is_held_by_descriptors() -> None:
    assert gpu_states(FakeNvml())[0].unattributed_bytes == 20 * GIB


def test_a_process_whose_memory_is_not_told_leaves_the_rest_unknown() -> None:
    processes = [SimpleNamespace(pid=42, usedGpuMemory=None)]
    state = gpu_states(FakeNvml(nvmlDeviceGetComputeRunningProcesses=processes))[0]
    assert state.processes == (GpuProcess(42, None),)
    assert state.unattributed_bytes is None


def test_what_a_gpu_does_not_know_is_none() -> None:
    unsupported = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    names = ("nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeRunningProcesses")
    state = gpu_states(FakeNvml(**dict.fromkeys(names, unsupported)))[0]
    assert (state.persistence_mode, state.mig_mode, state.processes) == (None, None, ())


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_host_without_a_driver_has_no_gpus(code: int) -> None:
    assert gpu_states(FakeNvml(nvmlInit=pynvml.NVMLError(code))) == ()


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetPersistenceMode"])
def test_an_nvml_that_fails_is_the_hosts_fault_and_is_closed(call: str) -> None:
    nvml = FakeNvml(**{call: pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)})
    with pytest.raises(HostError, match="NVML: GPU is lost"):
        gpu_states(nvml)
    assert nvml.open == 0


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="pynvml") as raised:
        gpu_states()
    assert raised.value.hint is not None
    assert "appliance[cuda]" in raised.value.hint
