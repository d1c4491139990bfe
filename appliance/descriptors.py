"""A file descriptor with one owner, closed exactly once."""

import os
from collections.abc import Iterable
from types import TracebackType


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
