"""Python's garbage collector, off while many objects are made that all stay.

A full collection walks everything a process holds: some 90 ms once torch is imported, in the middle of an attach.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing inside the block; afterwards as before."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
