"""A small regular file read whole, and nothing that only looks like one."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from appliance.descriptors import Descriptor


@dataclass(frozen=True)
class SmallFile:
    """A file's bytes and its permission bits."""

    data: bytes
    mode: int


def read_small_file(path: Path, *, limit_bytes: int, follow_link: bool = True) -> SmallFile | None:
    """Return the file, or None where that path is not a regular file. OSErrors pass through.

    Of a file larger than `limit_bytes` one byte more than that is read, for the caller to see that it is.
    """
    # O_NONBLOCK: a pipe of that name must not hold us.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow_link else os.O_NOFOLLOW)
    with Descriptor(os.open(path, flags)) as descriptor:
        mode = os.fstat(descriptor.fileno()).st_mode
        if not stat.S_ISREG(mode):
            return None
        return SmallFile(read_up_to(descriptor, limit_bytes + 1), stat.S_IMODE(mode))


def read_up_to(descriptor: Descriptor, size_bytes: int) -> bytes:
    """Return the file's first bytes, fewer where it is shorter."""
    data = bytearray()
    while len(data) < size_bytes and (part := os.pread(descriptor.fileno(), size_bytes - len(data), len(data))):
        data += part
    return bytes(data)
