"""Counting and rationing this process's descriptors."""

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path

OPEN = Path("/proc/self/fd")


def count_descriptors() -> int:
    return len(list(OPEN.iterdir()))


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
