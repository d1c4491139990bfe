"""One process at a time does what all would do alike, below the state directory; the others find it done."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(state: Path, name: str) -> Iterator[None]:
    """Hold the lock STATE/locks/NAME.lock. Where the state directory cannot be written, everybody goes at once."""
    path = state / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
