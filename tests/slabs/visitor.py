"""`python -m tests.slabs.visitor KIND DEVICE FD SIZE read|write`: another process that maps a slab it was given."""

import hashlib
import sys

from appliance.descriptors import Descriptor
from tests.slabs.contract import Lab
from tests.slabs.fake_driver import FakeCuda
from tests.slabs.labs import CudaLab, MemfdLab


def main() -> None:
    kind, device, fd, size, act = sys.argv[1:]
    lab = _lab(kind, device)
    with Descriptor(int(fd)) as descriptor:
        mapping = lab.backend.map(descriptor, int(size))
    if act == "read":
        print(hashlib.sha256(lab.read(mapping.window(0, int(size)))).hexdigest())
    elif kind == "memfd":
        _write_memory(mapping.window(0, 1))
        print("written")
    else:
        lab.write(mapping.window(0, 1), b"x")
        print("written")


def _lab(kind: str, device: str) -> Lab:
    if kind == "memfd":
        return MemfdLab()
    if kind == "fake":
        return CudaLab("fake", device, FakeCuda())
    from cuda.bindings import driver

    return CudaLab("gpu", device, driver)


def _write_memory(window: object) -> None:
    """Write past Python's own check: the memory itself is what refuses."""
    import ctypes

    import numpy

    address = numpy.frombuffer(window, dtype=numpy.uint8).ctypes.data  # type: ignore[call-overload]
    ctypes.memset(address, ord("x"), 1)


if __name__ == "__main__":
    main()
