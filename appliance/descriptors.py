"""A file descriptor with one owner, closed exactly once."""

import errno
import fcntl
import os
from collections.abc import Iterable
from types import TracebackType

ROOM = 512  # a shard's slabs and record, and what an engine has open beside them


class Descriptor:
    """Owns one descriptor number; use it as a context manager or call `close`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Return the number; it stays owned here. ValueError once closed or taken."""
        if self._fd < 0:
            raise ValueError("descriptor is closed")
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def take(self) -> int:
        """Give the number away: the caller closes it from now on."""
        fd, self._fd = self.fileno(), -1
        return fd

    def close(self) -> None:
        # A closed number is reused at once: a stale one may be somebody else's descriptor.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "Descriptor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Descriptor({self._fd})"


def close_all(descriptors: Iterable[Descriptor]) -> None:
    """Close every one of them."""
    for descriptor in descriptors:
        descriptor.close()


def make_room(count: int = ROOM) -> None:
    """Have the kernel make this process's table of descriptors large enough for this many, as far as the limit allows.

    To be called before there are threads: once there are, the kernel waits for every processor each time the table
    grows, which made the arrival of 31 slabs take 8 to 11 ms instead of 1 (Linux, `expand_fdtable` in fs/file.c).
    """
    with Descriptor(os.open("/", os.O_PATH | os.O_CLOEXEC)) as any_one:
        try:
            Descriptor(fcntl.fcntl(any_one.fileno(), fcntl.F_DUPFD_CLOEXEC, count - 1)).close()
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EMFILE):  # the limit of open files
                raise
