"""What `stat` said of a file when its bytes were verified, to notice later, without opening it, that it changed.

Equal stats say that nobody wrote through the file system. They do not prove bytes: a disk that rots, or a write within
one tick of the file system's clock (4 ms before Linux 6.13), is found by hashing only.
"""

import os
import stat
from dataclasses import dataclass, fields

from appliance.errors import PeerError


@dataclass(frozen=True)
class FileStat:
    """Device, inode, size in bytes, and modification and change times in nanoseconds since the epoch."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, result: os.stat_result) -> "FileStat":
        """Keep what tells one state of a file from another; the access time is not part of it."""
        return cls(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns, result.st_ctime_ns)

    @classmethod
    def take(cls, fd_or_path: int | str | os.PathLike[str]) -> "FileStat | None":
        """Return the stat of a regular file, links followed; None where none is there. Other OSErrors pass through."""
        try:
            result = os.stat(fd_or_path)  # noqa: PTH116  Path.stat takes no descriptor
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls.of(result) if stat.S_ISREG(result.st_mode) else None

    def differing(self, other: "FileStat") -> tuple[str, ...]:
        """Name the fields that differ, in order; empty when the file is as it was."""
        return tuple(name for name in _NAMES if getattr(self, name) != getattr(other, name))

    def to_json(self) -> tuple[int, int, int, int, int]:
        """Return the five integers in the order of the fields, as a shard's record keeps them."""
        return (self.device, self.inode, self.size_bytes, self.mtime_ns, self.ctime_ns)

    @classmethod
    def from_json(cls, value: object) -> "FileStat":
        """Read back what `to_json` gave, also as a list; PeerError for anything else."""
        if not isinstance(value, (list, tuple)) or len(value) != len(_NAMES):
            raise PeerError("file stat: not a list of " + ", ".join(_NAMES))
        if not all(type(number) is int and abs(number) < 1 << 64 for number in value):
            raise PeerError("file stat: not a list of 64-bit integers")
        return cls(*value)


_NAMES = tuple(field.name for field in fields(FileStat))
