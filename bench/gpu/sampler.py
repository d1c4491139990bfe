"""Device memory in use, sampled with NVML by a thread of its own."""

import threading
from types import TracebackType
from typing import Any, Self

PERIOD_S = 0.002


class MemorySampler:
    """While entered, watches one GPU; `start_bytes`, `peak_bytes` and `end_bytes` are of the whole GPU.

    Where there is no such GPU (the fake ones) all three are 0.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self.start_bytes = self.peak_bytes = self.end_bytes = self.samples = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self.start_bytes = self.peak_bytes = used_bytes(self._uuid)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.end_bytes = used_bytes(self._uuid)

    def _watch(self) -> None:
        nvml = _nvml()
        device = None if nvml is None else _device(nvml, self._uuid)
        while nvml is not None and device is not None and not self._ended.wait(PERIOD_S):
            self.peak_bytes = max(
                self.peak_bytes, nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).used
            )
            self.samples += 1


def used_bytes(uuid: str) -> int:
    """Return the bytes in use on a GPU now, whoever uses them; 0 where NVML has no such GPU."""
    nvml = _nvml()
    device = None if nvml is None else _device(nvml, uuid)
    return (
        0 if nvml is None or device is None else nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).used
    )


def _nvml() -> Any:
    import pynvml

    try:
        pynvml.nvmlInit()  # counted, and ended with the process
    except pynvml.NVMLError:
        return None
    return pynvml


def _device(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None
