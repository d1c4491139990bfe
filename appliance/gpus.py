"""What each GPU holds and for whom, as NVML tells it; needs nvidia-ml-py, and opens no CUDA context.

Weights that nobody but a keeper or PID 1 holds belong to no process: NVML counts them as used, and lists nobody.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from appliance.errors import ConfigError, HostError


@dataclass(frozen=True)
class GpuProcess:
    """A process with a CUDA context on a GPU; `used_bytes` is None where the driver does not tell (in a container)."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class GpuPart:
    """A part of a GPU in MIG mode, which processes use in the GPU's place; memory as of a whole one.

    Of the GPU it is a compute instance within a GPU instance, each by its number.
    """

    uuid: str
    model: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True)
class GpuState:
    """One look at one GPU; `index` counts as nvidia-smi does. None stands for what this GPU or driver does not say.

    Without persistence mode the driver may tear down a GPU that no process uses, and with it what descriptors hold.
    """

    index: int
    uuid: str
    model: str
    driver_version: str
    compute_capability: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    persistence_mode: bool | None
    mig_mode: bool | None
    processes: tuple[GpuProcess, ...]
    parts: tuple[GpuPart, ...] = ()

    def place(self, uuid: str) -> "GpuState | GpuPart | None":
        """Return this GPU, or the part of it, that has this UUID; None where neither has."""
        return self if uuid == self.uuid else next((part for part in self.parts if part.uuid == uuid), None)

    @property
    def unattributed_bytes(self) -> int | None:
        """Return the bytes in use that no listed process accounts for; None where one of them is not told."""
        used = [process.used_bytes for process in self.processes]
        return None if None in used else max(0, self.used_bytes - sum(filter(None, used)))


def gpu_states(nvml: Any = None) -> tuple[GpuState, ...]:
    """Return the host's GPUs, in nvidia-smi's order; empty where there is no NVIDIA driver.

    ConfigError where nvidia-ml-py is missing, HostError where NVML fails.
    """
    if nvml is None:
        nvml = _load_nvml()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return ()
    except nvml.NVMLError as error:
        raise _failed(error) from error
    try:
        version = nvml.nvmlSystemGetDriverVersion()
        return tuple(_state(nvml, index, version) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        raise _failed(error) from error
    finally:
        nvml.nvmlShutdown()


def _load_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise ConfigError(
            f"GPU memory cannot be listed: {error}", hint="pip install 'appliance[cuda]', or look at nvidia-smi"
        ) from error
    return pynvml


def _state(nvml: Any, index: int, driver_version: str) -> GpuState:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _memory(nvml, device)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    persistence = _optional(nvml, lambda: nvml.nvmlDeviceGetPersistenceMode(device))
    mig = _optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(device)[0])
    divided = None if mig is None else mig == nvml.NVML_DEVICE_MIG_ENABLE
    return GpuState(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(device),
        model=nvml.nvmlDeviceGetName(device),
        driver_version=driver_version,
        compute_capability=f"{major}.{minor}",
        total_bytes=memory.total,
        used_bytes=memory.used,
        free_bytes=memory.free,
        persistence_mode=None if persistence is None else persistence == nvml.NVML_FEATURE_ENABLED,
        mig_mode=divided,
        processes=_processes(nvml, device),
        parts=tuple(_parts(nvml, device)) if divided else (),
    )


def _parts(nvml: Any, device: Any) -> Iterator[GpuPart]:
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number)
        except nvml.NVMLError_NotFound:  # fewer parts than there could be
            continue
        memory = _memory(nvml, part)
        uuid, model = nvml.nvmlDeviceGetUUID(part), nvml.nvmlDeviceGetName(part)
        instances = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
        yield GpuPart(uuid, model, memory.total, memory.used, memory.free, *instances)


def _memory(nvml: Any, device: Any) -> Any:
    # Version 2 counts what the driver keeps for itself apart, as nvidia-smi does.
    return nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)


def _processes(nvml: Any, device: Any) -> tuple[GpuProcess, ...]:
    running = _optional(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(device)) or []
    return tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in sorted(running, key=lambda one: one.pid))


def _optional(nvml: Any, query: Callable[[], Any]) -> Any:
    try:
        return query()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
        return None


def _failed(error: Exception) -> HostError:
    return HostError(f"NVML: {error}", hint="does nvidia-smi work?")
