"""Addresses of this process that stand for a fake GPU's: reserved, mapped to a memfd, with or without access."""

import ctypes
import mmap
import os
from dataclasses import dataclass, field

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


@dataclass
class Memory:
    """One allocation: a memfd of the fake's own, and whose memory it is."""

    fd: int
    size_bytes: int
    ordinal: int

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class Mapped:
    """Memory at an address; `access` is "", "r" or "rw", for the GPUs in `accessors`."""

    memory: Memory
    size_bytes: int
    access: str = ""
    accessors: set[int] = field(default_factory=set)


def reserve(size_bytes: int, *, alignment_bytes: int) -> int:
    """Return the aligned start of a range that nothing else uses; MemoryError where there is none."""
    start = _mmap(0, size_bytes + alignment_bytes)
    reserved = -(-start // alignment_bytes) * alignment_bytes
    free(start, reserved - start)
    free(reserved + size_bytes, start + alignment_bytes - reserved)
    return reserved


def free(address: int, size_bytes: int) -> None:
    """Give a range, or a part of one, back."""
    if size_bytes:
        _libc.munmap(address, size_bytes)


def put(memory: Memory, address: int, size_bytes: int) -> None:
    """Map memory into a reserved range, with no access to it."""
    _mmap(address, size_bytes, fd=memory.fd)


def take_away(address: int, size_bytes: int) -> None:
    """Leave the range reserved and empty."""
    _mmap(address, size_bytes)


def protect(address: int, size_bytes: int, *, writable: bool) -> None:
    """Let a mapping be read, and perhaps written."""
    _libc.mprotect(address, size_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))


def _mmap(address: int, size_bytes: int, *, fd: int = -1) -> int:
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    result: int | None = _libc.mmap(address or None, size_bytes, 0, flags | (_MAP_FIXED if address else 0), fd, 0)
    if result is None or result == 2**64 - 1:
        raise MemoryError
    return result
