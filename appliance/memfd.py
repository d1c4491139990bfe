"""Sealed memfds: bytes in memory that nobody can change, behind a descriptor that can be passed on."""

import fcntl
import os
from collections.abc import Iterable

from appliance.descriptors import Descriptor
from appliance.errors import PeerError, ResourceError

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def create(name: str) -> Descriptor:
    """Return an empty memfd that can be sealed. The caller closes it."""
    try:
        return Descriptor(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        raise ResourceError(f"cannot create memory file {name!r}: {error.strerror}") from error


def sealed(name: str, chunks: Iterable[bytes | memoryview]) -> Descriptor:
    """Return a sealed memfd with these bytes. ResourceError where memory is short. The caller closes it."""
    descriptor = create(name)
    try:
        for chunk in chunks:
            _write_all(descriptor.fileno(), memoryview(chunk).cast("B"))
        seal(descriptor)
    except OSError as error:
        descriptor.close()
        raise ResourceError(f"cannot fill memory file {name!r}: {error.strerror}") from error
    return descriptor


def seal(descriptor: Descriptor) -> None:
    """Fix size and bytes for ever. OSError (EBUSY) while a writable mapping exists."""
    fcntl.fcntl(descriptor.fileno(), fcntl.F_ADD_SEALS, SEALS)


def is_sealed(fd: int) -> bool:
    """Tell whether this is a memfd whose size and bytes can no longer change."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # not a memfd
        return False


def read(descriptor: Descriptor, *, what: str, limit_bytes: int) -> bytes:
    """Return all bytes of a sealed memfd; PeerError if it is not sealed, or larger than the limit."""
    fd = descriptor.fileno()
    if not is_sealed(fd):
        raise PeerError(f"{what}: not a sealed memory file")
    size_bytes = os.fstat(fd).st_size
    if size_bytes > limit_bytes:
        raise PeerError(f"{what}: {size_bytes} bytes, more than the {limit_bytes} allowed")
    data = os.pread(fd, size_bytes, 0)
    if len(data) != size_bytes:
        raise PeerError(f"{what}: {len(data)} of {size_bytes} bytes could be read")
    return data


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
