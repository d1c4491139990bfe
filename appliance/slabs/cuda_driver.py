"""The CUDA driver, every call of it checked: the one module that touches `cuda.bindings`.

A failed call raises CudaError, which knows nothing of slabs; who calls says what it means. `cuda.bindings` is imported
when a device is opened, so that nobody needs it who has no GPU.
"""

import contextlib
import ctypes
import os
import threading
import uuid as uuids
import weakref
from collections.abc import Iterator
from typing import Any

from appliance.errors import ConfigError, HostError

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
OPERATING_SYSTEM = "CUDA_ERROR_OPERATING_SYSTEM"

_COMPUTE_CAPABILITY = ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR")
_NEEDED = {
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "virtual memory management",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "memory behind file descriptors",
}


class CudaError(Exception):
    """A driver call that failed; `name` is that of the CUresult."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call = call
        self.name = name


def load_bindings() -> Any:
    """Return `cuda.bindings.driver`; ConfigError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _not_installed(error) from error
    return driver


def open_device(uuid: str, *, bindings: Any = None) -> "CudaDevice":
    """Return the GPU of this UUID, its primary context retained; ConfigError where this process does not see it.

    HostError where there is no working driver. The primary context is the one that torch uses, so pointers and
    streams are shared with it.
    """
    cuda = load_bindings() if bindings is None else bindings
    try:
        _checked(cuda, "cuInit", 0)
        ordinals = {_uuid(cuda, ordinal): ordinal for ordinal in range(_checked(cuda, "cuDeviceGetCount"))}
    except CudaError as error:
        if error.name == "CUDA_ERROR_NO_DEVICE":
            ordinals = {}
        else:
            raise HostError(f"the NVIDIA driver does not start: {error}", hint="does nvidia-smi work?") from error
    except RuntimeError as error:  # cuda.bindings finds no libcuda.so.1
        raise HostError("there is no NVIDIA driver library on this host", hint="does nvidia-smi work?") from error
    # GPU-... and MIG-... have different prefixes, and the driver gives the number alone.
    ordinal = ordinals.get(uuid.partition("-")[2])
    if ordinal is None:
        raise ConfigError(f"GPU {uuid} is not visible to this process", hint=_visible(ordinals))
    try:
        return CudaDevice(cuda, uuid, ordinal)
    except CudaError as error:
        raise HostError(f"GPU {uuid} cannot be used: {error}", hint="does nvidia-smi work?") from error


class CudaDevice:
    """One GPU: its memory, its address space and its primary context, retained for as long as this object lives.

    Handles are ints owned by the caller: each is released once, each reservation freed once, each mapping unmapped
    once. All sizes and addresses are multiples of `granularity_bytes`. Every method may raise CudaError.
    """

    def __init__(self, cuda: Any, uuid: str, ordinal: int) -> None:
        self.uuid = uuid
        self.ordinal = ordinal
        self._cuda = cuda
        self._pushed = threading.local()
        self._device = _checked(cuda, "cuDeviceGet", ordinal)
        for name, what in _NEEDED.items():
            if not self._attribute(name):
                raise HostError(f"GPU {uuid} has no {what}", hint="on a virtual GPU the host's operator can enable it")
        self._context = _checked(cuda, "cuDevicePrimaryCtxRetain", self._device)
        release = weakref.finalize(self, _release_context, cuda, self._device)
        release.atexit = False  # at exit torch may still be using it, and the driver gives all back anyway
        self.granularity_bytes = int(
            self._call("cuMemGetAllocationGranularity", self._properties(), self._granularity_option())
        )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Keep the context current in this thread for all calls of the block: each by itself would push and pop it."""
        if self._is_current():
            yield
            return
        # Pushed and popped: the thread's own current device, which torch chose, is none of our business.
        _checked(self._cuda, "cuCtxPushCurrent", self._context)
        self._pushed.here = True
        try:
            yield
        finally:
            self._pushed.here = False
            # It fails only where nothing is pushed; raising would lose what the block has given.
            self._cuda.cuCtxPopCurrent()

    @property
    def compute_capability(self) -> tuple[int, int]:
        major, minor = map(self._attribute, _COMPUTE_CAPABILITY)
        return major, minor

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are free and the bytes that there are."""
        free_bytes, total_bytes = self._call("cuMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def create(self, size_bytes: int) -> int:
        """Return a handle to new memory of this GPU that can be exported."""
        return int(self._call("cuMemCreate", size_bytes, self._properties(), 0))

    def release(self, handle: int) -> None:
        """Give the handle back; the memory stays while it is mapped or exported."""
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """Return a new descriptor of the memory. The caller closes it."""
        fd = int(self._call("cuMemExportToShareableHandle", handle, self._descriptor_type(), 0))
        os.set_inheritable(fd, False)
        return fd

    def import_handle(self, fd: int) -> int:
        """Return a handle to the memory behind a descriptor, which stays the caller's."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._descriptor_type()))

    def reserve(self, size_bytes: int) -> int:
        """Return the address of a free range of the address space."""
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        """Give a whole reservation back."""
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Map memory at a reserved address. Nothing can be read there before `allow`."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def unmap(self, address: int, size_bytes: int) -> None:
        """End a whole mapping. The caller has made sure that the device no longer uses it: `synchronize`."""
        self._call("cuMemUnmap", address, size_bytes)

    def allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Let this GPU, and no other, read or also write a mapping."""
        cuda = self._cuda
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        flags = cuda.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, size_bytes, [access], 1)

    def home(self, handle: int) -> int:
        """Return the ordinal of the GPU whose memory is behind a handle.

        Not from a mapped address: driver 580 calls every imported allocation one of GPU 0 there.
        """
        return int(self._call("cuMemGetAllocationPropertiesFromHandle", handle).location.id)

    def synchronize(self) -> None:
        """Return once everything that this process has asked of this GPU is done."""
        self._call("cuCtxSynchronize")

    def load_kernel(self, image: bytes, name: str) -> "CudaKernel":
        """Return a kernel of what `compile_kernel` made."""
        module = self._call("cuModuleLoadData", image)
        return CudaKernel(self, module, self._call("cuModuleGetFunction", module, name.encode()))

    def _launch(self, function: Any, blocks: int, threads: int, stream: int, arguments: int) -> None:
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, name)
        return int(_checked(self._cuda, "cuDeviceGetAttribute", attribute, self._device))

    def _properties(self) -> Any:
        cuda = self._cuda
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        properties.requestedHandleTypes = self._descriptor_type()
        return properties

    def _descriptor_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _granularity_option(self) -> Any:
        return self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED

    def _call(self, name: str, *arguments: Any) -> Any:
        with self.current():
            return _checked(self._cuda, name, *arguments)

    def _is_current(self) -> bool:
        return getattr(self._pushed, "here", False)


class CudaKernel:
    """A function that runs on the GPU; its module stays loaded with the context."""

    def __init__(self, device: CudaDevice, module: Any, function: Any) -> None:
        self._device = device
        self._module = module
        self._function = function

    def launch(self, *arguments: ctypes.c_void_p | ctypes.c_ulonglong, blocks: int, threads: int, stream: int) -> None:
        """Queue one run on a stream (a cudaStream_t as an int), `threads` in each of `blocks`. Returns at once."""
        # The driver copies the values before it returns.
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._device._launch(self._function, blocks, threads, stream, ctypes.addressof(addresses))


def compile_kernel(source: str, *, compute_capability: tuple[int, int], nvrtc: Any = None) -> bytes:
    """Return CUDA C++ source as machine code for GPUs of this capability; ConfigError where there is no NVRTC.

    HostError if NVRTC refuses the source or does not know the GPU.
    """
    if nvrtc is None:
        nvrtc = _load_nvrtc()
    try:
        program = _checked(nvrtc, "nvrtcCreateProgram", source.encode(), b"appliance.cu", 0, [], [])
    except RuntimeError as error:  # cuda.bindings finds no libnvrtc
        raise ConfigError(f"kernels cannot be compiled: {error}", hint="pip install nvidia-cuda-nvrtc") from error
    try:
        # Machine code and not PTX: an NVRTC newer than the driver writes PTX that the driver refuses.
        options = ["--gpu-architecture=sm_{}{}".format(*compute_capability).encode()]
        _checked(nvrtc, "nvrtcCompileProgram", program, len(options), options)
        image: bytes = b" " * _checked(nvrtc, "nvrtcGetCUBINSize", program)
        _checked(nvrtc, "nvrtcGetCUBIN", program, image)
    except CudaError as error:
        raise HostError(f"a kernel cannot be compiled: {error}") from error
    finally:
        _checked(nvrtc, "nvrtcDestroyProgram", program)
    return bytes(image)


def _load_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _not_installed(error) from error
    return nvrtc


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(f"a GPU needs the package cuda-bindings: {error}", hint="pip install 'appliance[cuda]'")


def _checked(library: Any, call: str, *arguments: Any) -> Any:
    """Return what the call gives besides its result; a tuple where that is more than one thing."""
    result, *values = getattr(library, call)(*arguments)
    if int(result) != 0:
        raise CudaError(call, result.name)
    return values[0] if len(values) == 1 else tuple(values)


def _uuid(cuda: Any, ordinal: int) -> str:
    return str(uuids.UUID(bytes=bytes(_checked(cuda, "cuDeviceGetUuid", _checked(cuda, "cuDeviceGet", ordinal)).bytes)))


def _visible(ordinals: dict[str, int]) -> str:
    seen = f"visible: {', '.join(f'GPU-{uuid}' for uuid in ordinals) or 'none'}"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen if chosen is None else f"{seen}; CUDA_VISIBLE_DEVICES is {chosen!r}"


def _release_context(cuda: Any, device: Any) -> None:
    with contextlib.suppress(CudaError):
        _checked(cuda, "cuDevicePrimaryCtxRelease", device)
