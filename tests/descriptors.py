"""Counting and rationing this process's descriptors."""

import contextlib
import gc
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path

OPEN = Path("/proc/self/fd")


def count_descriptors() -> int:
    """Return how many are open, without those in an earlier test's cycles, which may be closed at any moment."""
    gc.collect()
    return len(list(OPEN.iterdir()))


def open_files() -> set[tuple[int, int]]:
    """Return the device and inode of every open file."""
    found = set()
    for entry in OPEN.iterdir():
        with contextlib.suppress(OSError):  # the descriptor that listed the directory
            found.add(identity(int(entry.name)))
    return found


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def room_for(count: int) -> Iterator[None]:
    """Let this process open only so many descriptors more, before EMFILE."""
    free = (number for number in itertools.count() if not _is_open(number))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
