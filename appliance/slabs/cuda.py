"""Slabs in a GPU's memory: allocations of CUDA's virtual memory management, each behind a POSIX descriptor.

The memory lives as long as a descriptor or a mapping of it does, in whatever process; a process that only holds the
descriptor needs no CUDA and takes no memory on the GPU. What a descriptor allows cannot be limited: who has it can map
it for writing. `CudaMapping` does not, which guards against mistakes and not against people.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from appliance.descriptors import Descriptor
from appliance.errors import ApplianceError, HostError, PeerError, ResourceError
from appliance.quantities import format_size
from appliance.slabs.cuda_driver import OPERATING_SYSTEM, OUT_OF_MEMORY, CudaDevice, CudaError, open_device
from appliance.slabs.interface import Mapping, mapped_one_by_one

# What the driver says of a descriptor that is no memory of this GPU, or less of it than announced.
_NOT_A_SLAB = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *(
            "INVALID_VALUE",
            "INVALID_HANDLE",
            "INVALID_DEVICE",
            "INVALID_RESOURCE_TYPE",
            "INVALID_RESOURCE_CONFIGURATION",
        ),
        *("NOT_SUPPORTED", "NOT_PERMITTED", "OPERATING_SYSTEM", "MAP_FAILED", "PEER_ACCESS_UNSUPPORTED"),
    )
)


class CudaBackend:
    """The backend of one GPU, named by its UUID; ConfigError where this process cannot see it, as `open_device`."""

    # 140 GiB in 35 descriptors, and no more than this beside the weights while they are packed.
    default_slab_bytes = 4 << 30

    def __init__(self, uuid: str, *, bindings: Any = None) -> None:
        self.device = uuid
        self.gpu = open_device(uuid, bindings=bindings)
        self.granularity_bytes = self.gpu.granularity_bytes

    @property
    def ordinal(self) -> int:
        """Return the GPU's number in this process, torch's `cuda:N`."""
        return self.gpu.ordinal

    def create(self, name: str, size_bytes: int) -> "CudaSlab":
        """Return a writable slab, as `interface.Backend.create`."""
        return CudaSlab(self.gpu, name, size_bytes)

    def map(self, descriptor: Descriptor, size_bytes: int) -> "CudaMapping":
        """Return a read-only mapping, as `interface.Backend.map`. Of a larger slab it maps the first bytes.

        1. the descriptor is exportable memory that the driver knows
        2. it has at least the announced size
        3. it is memory of this GPU, and not of another that this one can reach
        """
        return CudaMapping(self.gpu, descriptor, size_bytes)

    def map_all(self, descriptors: Sequence[Descriptor], sizes_bytes: Sequence[int]) -> list[Mapping]:
        """Return the slabs of a shard, as `interface.Backend.map_all`."""
        try:
            with self.gpu.current():
                return mapped_one_by_one(self, descriptors, sizes_bytes)
        except CudaError as error:
            raise HostError(
                f"slabs: GPU {self.device} cannot be used: {error}", hint="does nvidia-smi work?"
            ) from error


class CudaSlab:
    """Device memory mapped for writing, until it is sealed."""

    def __init__(self, gpu: CudaDevice, name: str, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % gpu.granularity_bytes:
            raise ValueError(f"slab size {size_bytes} is not a positive multiple of {gpu.granularity_bytes}")
        self.device = gpu.uuid
        self.size_bytes = size_bytes
        self._gpu = gpu
        try:
            with ExitStack() as undo:
                # Descriptor and mapping hold the memory from here on: the handle is one thing less to give back.
                with _released(gpu, gpu.create(size_bytes)) as handle:
                    descriptor = undo.enter_context(Descriptor(gpu.export(handle)))
                    mapped = undo.enter_context(_Range(gpu, size_bytes, handle, writable=True))
                undo.pop_all()
        except CudaError as error:
            raise _creation_error(error, gpu, name, size_bytes) from error
        self._descriptor = descriptor
        self._range: _Range | None = mapped
        self._windows: weakref.WeakSet[CudaWindow] = weakref.WeakSet()

    def window(self, offset_bytes: int, size_bytes: int) -> "CudaWindow":
        """Return these bytes, writable."""
        window = _window(self._range, offset_bytes, size_bytes)
        self._windows.add(window)
        return window

    def seal(self) -> Descriptor:
        """End writing, as `interface.Slab.seal`; the mapping for writing is gone afterwards."""
        if self._range is None:
            raise ValueError("slab is closed")
        if self._windows:
            raise HostError("cannot seal a slab: something still holds its memory for writing")
        try:
            self._range.unmap()
        except CudaError as error:
            raise HostError(f"cannot seal a slab on GPU {self._gpu.uuid}: {error}") from error
        self._range = None
        return Descriptor(self._descriptor.take())

    def close(self) -> None:
        self._range = None  # the mapping goes with its last window
        self._descriptor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CudaMapping:
    """Device memory mapped read-only: a write through it is a fault that ends all work of this process on the GPU."""

    def __init__(self, gpu: CudaDevice, descriptor: Descriptor, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % gpu.granularity_bytes:
            raise PeerError(f"slab: {size_bytes} bytes announced, no multiple of {gpu.granularity_bytes}")
        self.device = gpu.uuid
        self.size_bytes = size_bytes
        try:
            with ExitStack() as undo:
                with _released(gpu, gpu.import_handle(descriptor.fileno())) as handle:
                    if gpu.home(handle) != gpu.ordinal:
                        raise PeerError(f"slab: memory of another GPU than {gpu.uuid}")
                    mapped = undo.enter_context(_Range(gpu, size_bytes, handle, writable=False))
                undo.pop_all()
        except CudaError as error:
            raise _mapping_error(error, gpu, size_bytes) from error
        self._range: _Range | None = mapped
        self._weak = weakref.ref(mapped)

    @property
    def mapped(self) -> bool:
        return self._weak() is not None

    def window(self, offset_bytes: int, size_bytes: int) -> "CudaWindow":
        """Return these bytes, read-only; they stay mapped for as long as anything holds the window."""
        return _window(self._range, offset_bytes, size_bytes)

    def close(self) -> None:
        self._range = None  # the mapping goes with its last window

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CudaWindow:
    """Bytes of device memory, which stay mapped for as long as this object, or a tensor made from it, lives.

    `torch.as_tensor(window)` is a tensor over them, of dtype uint8 and without a copy.
    """

    def __init__(self, mapped: "_Range", offset_bytes: int, size_bytes: int) -> None:
        self.address = mapped.address + offset_bytes
        self.size_bytes = size_bytes
        self.ordinal = mapped.gpu.ordinal
        self._mapped = mapped

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # numba's CUDA array interface, version 3. The flag for read-only memory would be true for a mapping, but
        # torch refuses such arrays.
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class _Range:
    """An address range with memory mapped to it; both are given back once, when asked or with the last reference."""

    def __init__(self, gpu: CudaDevice, size_bytes: int, handle: int, *, writable: bool) -> None:
        self.gpu = gpu
        self.size_bytes = size_bytes
        with ExitStack() as undo:
            self.address = gpu.reserve(size_bytes)
            undo.callback(gpu.free, self.address, size_bytes)
            gpu.map(self.address, size_bytes, handle)
            undo.callback(gpu.unmap, self.address, size_bytes)
            gpu.allow(self.address, size_bytes, writable=writable)
            undo.pop_all()
        self._finalizer = weakref.finalize(self, _give_back, gpu, self.address, size_bytes)
        self._finalizer.atexit = False  # other threads may still compute with it; the driver takes it back anyway

    def unmap(self) -> None:
        """Give both back now, once the device is done with them. After a CudaError they may stay until the exit."""
        self.gpu.synchronize()
        self._finalizer.detach()
        _take_down(self.gpu, self.address, self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finalizer()


@contextmanager
def _released(gpu: CudaDevice, handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        gpu.release(handle)


def _give_back(gpu: CudaDevice, address: int, size_bytes: int) -> None:
    # It may be the garbage collector that asks: there is nobody to tell. After a fault the driver refuses everything.
    with suppress(CudaError):
        gpu.synchronize()
    with suppress(CudaError):
        _take_down(gpu, address, size_bytes)


def _take_down(gpu: CudaDevice, address: int, size_bytes: int) -> None:
    gpu.unmap(address, size_bytes)
    gpu.free(address, size_bytes)


def _window(mapped: _Range | None, offset_bytes: int, size_bytes: int) -> CudaWindow:
    if mapped is None:
        raise ValueError("slab is closed")
    if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > mapped.size_bytes:
        raise ValueError(f"{size_bytes} bytes at {offset_bytes} are not inside of {mapped.size_bytes} bytes")
    return CudaWindow(mapped, offset_bytes, size_bytes)


def _creation_error(error: CudaError, gpu: CudaDevice, name: str, size_bytes: int) -> ApplianceError:
    wanted = f"slab {name!r}: {format_size(size_bytes)} wanted"
    if error.name == OUT_OF_MEMORY:
        return ResourceError(f"{wanted}, {_free(gpu)} on GPU {gpu.uuid}", hint="stop what else uses this GPU's memory")
    if error.name == OPERATING_SYSTEM:
        hint = "raise the limit of open files (LimitNOFILE= in a unit)"
        return ResourceError(f"{wanted}, the system gives the driver nothing ({error})", hint=hint)
    return HostError(f"{wanted}, GPU {gpu.uuid} refuses: {error}", hint="does nvidia-smi work?")


def _mapping_error(error: CudaError, gpu: CudaDevice, size_bytes: int) -> ApplianceError:
    if error.name == OUT_OF_MEMORY:
        return ResourceError(
            f"slab: cannot map {format_size(size_bytes)}, {_free(gpu)} on GPU {gpu.uuid} ({error.call})"
        )
    # The driver does not know better either when it is asked what a stranger's descriptor is.
    if error.name in _NOT_A_SLAB or (error.call, error.name) == (
        "cuMemImportFromShareableHandle",
        "CUDA_ERROR_UNKNOWN",
    ):
        return PeerError(f"slab: no {format_size(size_bytes)} of memory of GPU {gpu.uuid} ({error})")
    return HostError(f"slab: GPU {gpu.uuid} cannot map it: {error}", hint="does nvidia-smi work?")


def _free(gpu: CudaDevice) -> str:
    try:
        free_bytes, total_bytes = gpu.memory()
    except CudaError as error:
        return f"free memory unknown ({error})"
    return f"{format_size(free_bytes)} of {format_size(total_bytes)} free"
