"""The backends of the contract's tests that need no GPU."""

import ctypes
from typing import Any

from appliance.slabs.cuda import CudaBackend
from appliance.slabs.memfd import MemfdBackend
from tests.slabs.contract import Lab
from tests.slabs.fake_driver import FakeCuda


class MemfdLab(Lab):
    kind = "memfd"

    def __init__(self) -> None:
        self.backend = MemfdBackend()

    def write(self, window: Any, data: bytes) -> None:
        window[:] = data

    def read(self, window: Any) -> bytes:
        return bytes(window)


class CudaLab(Lab):
    """CUDA by the given bindings; bytes are copied by the driver, as no CPU can reach them."""

    def __init__(self, kind: str, uuid: str, cuda: Any) -> None:
        self.kind = kind
        self.cuda = cuda
        self.backend: CudaBackend = CudaBackend(uuid, bindings=cuda)

    def write(self, window: Any, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        self._copy("cuMemcpyHtoD", window.address, ctypes.addressof(source), len(data))

    def read(self, window: Any) -> bytes:
        destination = ctypes.create_string_buffer(window.size_bytes)
        self._copy("cuMemcpyDtoH", ctypes.addressof(destination), window.address, window.size_bytes)
        return destination.raw

    def _copy(self, call: str, *arguments: int) -> None:
        if arguments[2]:
            self.backend.gpu._call(call, *arguments)


class FakeCudaLab(CudaLab):
    def __init__(self) -> None:
        self.fake = FakeCuda()
        super().__init__("fake", self.fake.gpus[0].uuid, self.fake)
