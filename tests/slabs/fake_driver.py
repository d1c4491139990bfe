"""A CUDA driver without a GPU: stands in for `cuda.bindings.driver` and refuses what CUDA refuses.

Device memory is a memfd and a device address is an address of this process, so that descriptors really cross processes
and whoever reads a mapping without access to it, or writes a read-only one, really faults. What each call refuses is
from the CUDA driver API's documentation of virtual memory management and of contexts.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import uuid as uuids
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.slabs import fake_addresses
from tests.slabs.fake_addresses import Mapped, Memory
from tests.slabs.fake_results import CUresult, Refused, invalid

GRANULARITY_BYTES = 2 << 20
_NAME = "fake-cuda-"


@dataclass
class FakeGpu:
    """One GPU of the fake host."""

    uuid: str
    total_bytes: int = 1 << 30
    supports_descriptors: bool = True
    retained: int = 0


@dataclass
class FakeCuda:
    """`cuda.bindings.driver` as far as the project calls it; `live` says what has not been given back.

    `fail(...)` makes one call fail, `break_down()` all of them from now on. `busy` stands for work that the device has
    not finished: unmapping under it is noted in `faults`.
    """

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu(f"GPU-{uuids.UUID(int=0xA0)}")])
    calls: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    busy: bool = False
    boot: str = "0"  # memory of another boot of the driver is not known to this one
    images: Any = None  # a FakeNvrtc, where kernels are to run

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._initialized = False
        self._next_handle = 1000
        self._handles: dict[int, Memory] = {}
        self._reservations: dict[int, int] = {}
        self._mappings: dict[int, Mapped] = {}
        self._current = threading.local()
        self._failures: dict[int, CUresult] = {}
        self._broken: CUresult | None = None

    @property
    def live(self) -> Counter[str]:
        """Return what is held of each kind, nothing of it being zero."""
        return +Counter(
            handles=len(self._handles),
            reservations=len(self._reservations),
            mappings=len(self._mappings),
            contexts=sum(gpu.retained for gpu in self.gpus),
            pushed=len(self._stack()),
        )

    def fail(self, call_number: int, result: CUresult = CUresult.CUDA_ERROR_OUT_OF_MEMORY) -> None:
        """Let the call of this number, counted from 0 over all calls, fail without any effect."""
        self._failures[call_number] = result

    def break_down(self, result: CUresult | None = CUresult.CUDA_ERROR_DEINITIALIZED) -> None:
        """Let every call fail from now on; None ends it."""
        self._broken = result

    def drop_memory(self) -> None:
        """Let go of what nobody gave back, as the end of a process does."""
        for memory in [*self._handles.values(), *(mapped.memory for mapped in self._mappings.values())]:
            with contextlib.suppress(OSError):  # both a handle and a mapping hold it
                memory.close()
        for address, size_bytes in self._reservations.items():
            fake_addresses.free(address, size_bytes)
        self._handles.clear()
        self._mappings.clear()
        self._reservations.clear()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = getattr(type(self), f"_{name}", None)
        if function is None:
            raise AttributeError(f"the fake driver has no {name}")
        return lambda *arguments: self._answer(name, function, arguments)

    # The names, enums and structs of cuda.bindings.driver.

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    )

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:  # noqa: N802
        location = SimpleNamespace(type=0, id=-1)
        return SimpleNamespace(type=0, location=location, requestedHandleTypes=0)

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace(type=0, id=-1), flags=0)

    # Devices and contexts.

    def _cuInit(self, flags: int) -> None:  # noqa: N802
        self._initialized = flags == 0

    def _cuDeviceGetCount(self) -> int:  # noqa: N802
        if not self.gpus:
            raise Refused(CUresult.CUDA_ERROR_NO_DEVICE)
        return len(self.gpus)

    def _cuDeviceGet(self, ordinal: int) -> int:  # noqa: N802
        self._gpu(ordinal)
        return ordinal

    def _cuDeviceGetUuid(self, device: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(bytes=uuids.UUID(self._gpu(device).uuid.partition("-")[2]).bytes)

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> int:  # noqa: N802
        gpu = self._gpu(device)
        return {75: 9, 76: 0, 102: 1, 103: int(gpu.supports_descriptors)}[attribute]

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:  # noqa: N802
        self._gpu(device).retained += 1
        return 7000 + device

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:  # noqa: N802
        if self._gpu(device).retained == 0:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._gpu(device).retained -= 1

    def _cuCtxPushCurrent(self, context: int) -> None:  # noqa: N802
        if self._gpu(context - 7000).retained == 0:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._stack().append(context)

    def _cuCtxPopCurrent(self) -> int:  # noqa: N802
        self._ordinal()
        return self._stack().pop()

    def _cuCtxSynchronize(self) -> None:  # noqa: N802
        self._ordinal()
        self.busy = False

    def _cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        ordinal = self._ordinal()
        return self._free_bytes(ordinal), self._gpu(ordinal).total_bytes

    # Memory behind handles.

    def _cuMemGetAllocationGranularity(self, properties: Any, option: int) -> int:  # noqa: N802
        self._check_properties(properties)
        if option != 1:
            raise invalid()
        return GRANULARITY_BYTES

    def _cuMemCreate(self, size_bytes: int, properties: Any, flags: int) -> int:  # noqa: N802
        self._check_properties(properties)
        if size_bytes <= 0 or size_bytes % GRANULARITY_BYTES or flags:
            raise invalid()
        ordinal = properties.location.id
        if size_bytes > self._free_bytes(ordinal):
            raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        fd = os.memfd_create(f"{_NAME}{self.boot}-{self._gpu(ordinal).uuid}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return self._new_handle(Memory(fd, size_bytes, ordinal))

    def _cuMemRelease(self, handle: int) -> None:  # noqa: N802
        memory = self._memory(handle)
        del self._handles[handle]
        self._forget(memory)

    def _cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> SimpleNamespace:  # noqa: N802
        properties = self.CUmemAllocationProp()
        properties.location.id = self._memory(handle).ordinal
        return properties

    def _cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> int:  # noqa: N802
        if kind != 1 or flags:
            raise invalid()
        try:
            fd = os.dup(self._memory(handle).fd)
        except OSError:
            raise Refused(CUresult.CUDA_ERROR_OPERATING_SYSTEM) from None
        os.set_inheritable(fd, True)  # CLOEXEC is left to the caller
        return fd

    def _cuMemImportFromShareableHandle(self, fd: int, kind: int) -> int:  # noqa: N802
        if kind != 1:
            raise invalid()
        try:
            target = str(Path(f"/proc/self/fd/{fd}").readlink())
        except OSError:
            raise invalid() from None
        name = target.removeprefix(f"/memfd:{_NAME}").removesuffix(" (deleted)")
        if name == target.removesuffix(" (deleted)"):
            raise invalid()
        boot, _, uuid = name.partition("-")
        if boot != self.boot:
            raise invalid()
        ordinal = next((number for number, gpu in enumerate(self.gpus) if gpu.uuid == uuid), None)
        if ordinal is None:
            raise Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self._new_handle(Memory(os.dup(fd), os.fstat(fd).st_size, ordinal))

    # Addresses.

    def _cuMemAddressReserve(self, size_bytes: int, alignment: int, address: int, flags: int) -> int:  # noqa: N802
        if size_bytes <= 0 or size_bytes % mmap.PAGESIZE or alignment or address or flags:
            raise invalid()
        try:
            reserved = fake_addresses.reserve(size_bytes, alignment_bytes=GRANULARITY_BYTES)
        except MemoryError:
            raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY) from None
        self._reservations[reserved] = size_bytes
        return reserved

    def _cuMemAddressFree(self, address: int, size_bytes: int) -> None:  # noqa: N802
        if self._reservations.get(address) != size_bytes or self._mapping_at(address, size_bytes) is not None:
            raise invalid()
        del self._reservations[address]
        fake_addresses.free(address, size_bytes)

    def _cuMemMap(self, address: int, size_bytes: int, offset: int, handle: int, flags: int) -> None:  # noqa: N802
        memory = self._memory(handle)
        if offset or flags or size_bytes <= 0 or size_bytes % GRANULARITY_BYTES or address % GRANULARITY_BYTES:
            raise invalid()
        reserved = any(
            start <= address and address + size_bytes <= start + length for start, length in self._reservations.items()
        )
        if not reserved or size_bytes > memory.size_bytes or self._mapping_at(address, size_bytes) is not None:
            raise invalid()
        fake_addresses.put(memory, address, size_bytes)
        self._mappings[address] = Mapped(memory, size_bytes)

    def _cuMemUnmap(self, address: int, size_bytes: int) -> None:  # noqa: N802
        mapped = self._mappings.get(address)
        if mapped is None or mapped.size_bytes != size_bytes:
            raise invalid()
        if self.busy:
            self.faults.append(f"unmapped {address:#x} under the device's work")
        fake_addresses.take_away(address, size_bytes)
        del self._mappings[address]
        self._forget(mapped.memory)

    def _cuMemSetAccess(self, address: int, size_bytes: int, access: list[Any], count: int) -> None:  # noqa: N802
        mapped = self._mappings.get(address)
        if mapped is None or mapped.size_bytes != size_bytes or len(access) != count:
            raise invalid()
        for item in access:
            self._gpu(item.location.id)
            if item.location.type != 1 or item.flags not in (1, 3):
                raise invalid()
            mapped.access = "rw" if item.flags == 3 else "r"
            mapped.accessors.add(item.location.id)
        fake_addresses.protect(address, size_bytes, writable=mapped.access == "rw")

    def _cuMemcpyHtoD(self, address: int, source: int, size_bytes: int) -> None:  # noqa: N802
        self._check_access(address, size_bytes, "w")
        ctypes.memmove(address, source, size_bytes)

    def _cuMemcpyDtoH(self, destination: int, address: int, size_bytes: int) -> None:  # noqa: N802
        self._check_access(address, size_bytes, "r")
        ctypes.memmove(destination, address, size_bytes)

    # Kernels.

    def _cuModuleLoadData(self, image: bytes) -> Any:  # noqa: N802
        self._ordinal()
        return self.images.load(image)

    def _cuModuleGetFunction(self, module: Any, name: bytes) -> Any:  # noqa: N802
        return getattr(module, f"launch_{name.decode()}")

    def _cuLaunchKernel(self, function: Any, *arguments: int) -> None:  # noqa: N802
        self._ordinal()
        blocks, by, bz, threads, ty, tz, shared_bytes, _stream, addresses, extra = arguments
        if (by, bz, ty, tz, shared_bytes, extra) != (1, 1, 1, 1, 0, 0) or not 0 < threads <= 1024:
            raise invalid()
        function(ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.c_void_p(addresses))

    # What the calls share.

    def _answer(self, name: str, function: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        with self._lock:
            number = len(self.calls)
            self.calls.append(name)
            result = self._broken or self._failures.get(number)
            if result is None and not self._initialized and name != "cuInit":
                result = CUresult.CUDA_ERROR_NOT_INITIALIZED
            if result is None and name.startswith("cuMem") and not self._stack():
                result = CUresult.CUDA_ERROR_INVALID_CONTEXT
            if result is not None:
                return (result, None)
            try:
                value = function(self, *arguments)
            except Refused as refused:
                return (refused.result, None)
        return (CUresult.CUDA_SUCCESS, *(value if isinstance(value, tuple) else () if value is None else (value,)))

    def _stack(self) -> list[int]:
        stack: list[int] = self._current.__dict__.setdefault("stack", [])
        return stack

    def _ordinal(self) -> int:
        if not self._stack():
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return self._stack()[-1] - 7000

    def _gpu(self, ordinal: int) -> FakeGpu:
        if not 0 <= ordinal < len(self.gpus):
            raise Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self.gpus[ordinal]

    def _check_properties(self, properties: Any) -> None:
        self._gpu(properties.location.id)
        if (properties.type, properties.location.type, properties.requestedHandleTypes) != (1, 1, 1):
            raise invalid()

    def _memory(self, handle: int) -> Memory:
        if handle not in self._handles:
            raise invalid()
        return self._handles[handle]

    def _new_handle(self, memory: Memory) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = memory
        return self._next_handle

    def _forget(self, memory: Memory) -> None:
        if memory not in (*self._handles.values(), *(mapped.memory for mapped in self._mappings.values())):
            memory.close()

    def _mapping_at(self, address: int, size_bytes: int) -> Mapped | None:
        overlapping = (
            mapped
            for start, mapped in self._mappings.items()
            if start < address + size_bytes and address < start + mapped.size_bytes
        )
        return next(overlapping, None)

    def _check_access(self, address: int, size_bytes: int, wanted: str) -> None:
        mapped = self._mapping_at(address, size_bytes)
        if mapped is None or wanted not in mapped.access:
            self._broken = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS  # a fault ends the context
            raise Refused(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)

    def _free_bytes(self, ordinal: int) -> int:
        """Count what this process has: other processes' memory is theirs to count."""
        sizes = {}
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the listing's own descriptor
                if str(entry.readlink()).startswith(f"/memfd:{_NAME}{self.boot}-{self.gpus[ordinal].uuid}"):
                    stat = entry.stat()
                    sizes[stat.st_ino] = stat.st_size
        return self.gpus[ordinal].total_bytes - sum(sizes.values())
