"""Slabs in host memory: sealed memfds, which nobody can write, grow or shrink once they are passed on.

Pages are reserved when the slab is made: a memory file that runs out of memory while it is written through a mapping
kills its writer with SIGBUS instead of telling it.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from appliance import memfd
from appliance.descriptors import Descriptor
from appliance.errors import HostError, PeerError, ResourceError
from appliance.quantities import format_size
from appliance.slabs.interface import Mapping, mapped_one_by_one
from appliance.slabs.memory import available_bytes


class MemfdBackend:
    """The backend of device "cpu"."""

    device = "cpu"
    granularity_bytes = mmap.PAGESIZE
    default_slab_bytes = 64 << 20

    def create(self, name: str, size_bytes: int) -> "MemfdSlab":
        """Return a writable slab, as `interface.Backend.create`."""
        return MemfdSlab(name, size_bytes)

    def map(self, descriptor: Descriptor, size_bytes: int) -> "MemfdMapping":
        """Return a read-only mapping, as `interface.Backend.map`.

        1. the descriptor is a memfd whose size and bytes can no longer change
        2. it has exactly the announced size
        3. all of it is in memory: a hole would be allocated at its first read, by whoever reads
        """
        fd = descriptor.fileno()
        if size_bytes <= 0:
            raise PeerError(f"slab: {size_bytes} bytes announced")
        if not memfd.is_sealed(fd):
            raise PeerError("slab: not a sealed memory file")
        stat = os.fstat(fd)
        if stat.st_size != size_bytes:
            raise PeerError(f"slab: {stat.st_size} bytes instead of the {size_bytes} announced")
        if stat.st_blocks * 512 < size_bytes:
            raise PeerError(f"slab: only {stat.st_blocks * 512} of its {size_bytes} bytes are in memory")
        return MemfdMapping(fd, size_bytes)

    def map_all(self, descriptors: Sequence[Descriptor], sizes_bytes: Sequence[int]) -> list[Mapping]:
        """Return the slabs of a shard, as `interface.Backend.map_all`."""
        return mapped_one_by_one(self, descriptors, sizes_bytes)


class MemfdSlab:
    """A memfd mapped for writing, until it is sealed."""

    device = "cpu"

    def __init__(self, name: str, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % mmap.PAGESIZE:
            raise ValueError(f"slab size {size_bytes} is not a positive multiple of {mmap.PAGESIZE}")
        # Asking first: the kernel answers an allocation it cannot meet by killing a process of its choice.
        available = available_bytes()
        if size_bytes > available:
            raise ResourceError(
                f"slab {name!r}: {format_size(size_bytes)} wanted, {format_size(available)} of memory available",
                hint="stop what else uses memory, or raise the unit's MemoryMax=",
            )
        self.size_bytes = size_bytes
        self._descriptor = memfd.create(name)
        self._mmap: mmap.mmap | None = None
        try:
            os.ftruncate(self._descriptor.fileno(), size_bytes)
            os.posix_fallocate(self._descriptor.fileno(), 0, size_bytes)
            self._mmap = mmap.mmap(self._descriptor.fileno(), size_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            self.close()
            raise ResourceError(f"slab {name!r}: cannot reserve {format_size(size_bytes)}: {error.strerror}") from error

    def window(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return these bytes, writable."""
        return _window(self._mmap, offset_bytes, size_bytes)

    def seal(self) -> Descriptor:
        """End writing, as `interface.Slab.seal`."""
        if self._mmap is None:
            raise ValueError("slab is closed")
        try:
            self._mmap.close()
        except BufferError as error:
            raise HostError("cannot seal a slab: something still holds its memory for writing") from error
        self._mmap = None
        try:
            memfd.seal(self._descriptor)
        except OSError as error:
            raise HostError(f"cannot seal a slab: {error.strerror}") from error
        return Descriptor(self._descriptor.take())

    def close(self) -> None:
        self._mmap = None  # the mapping goes with its last window
        self._descriptor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemfdMapping:
    """A sealed memfd mapped read-only: a write through it ends the process with SIGSEGV."""

    device = "cpu"

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        try:
            self._mmap: mmap.mmap | None = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise ResourceError(f"slab: cannot map {format_size(size_bytes)}: {error.strerror}") from error
        self._weak = weakref.ref(self._mmap)

    @property
    def mapped(self) -> bool:
        return self._weak() is not None

    def window(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return these bytes, read-only; they stay mapped for as long as anything holds the window."""
        return _window(self._mmap, offset_bytes, size_bytes)

    def close(self) -> None:
        self._mmap = None  # the mapping goes with its last window

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _window(mapping: mmap.mmap | None, offset_bytes: int, size_bytes: int) -> memoryview:
    if mapping is None:
        raise ValueError("slab is closed")
    if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > len(mapping):
        raise ValueError(f"{size_bytes} bytes at {offset_bytes} are not inside of {len(mapping)} bytes")
    return memoryview(mapping)[offset_bytes : offset_bytes + size_bytes]
