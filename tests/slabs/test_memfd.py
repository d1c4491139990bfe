"""What holds for sealed memfds beyond the contract of all backends."""

import fcntl
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from appliance import memfd
from appliance.descriptors import Descriptor
from appliance.errors import PeerError, ResourceError
from appliance.slabs.memfd import MemfdBackend
from tests.descriptors import count_descriptors, room_for

PAGE = mmap.PAGESIZE


def _sealed(size_bytes: int = PAGE) -> Descriptor:
    with MemfdBackend().create("test", size_bytes) as slab:
        return slab.seal()


def test_nobody_changes_a_sealed_slab() -> None:
    with _sealed() as slab:
        fd = slab.fileno()
        for change in (lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 2 * PAGE)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, PAGE, flags=mmap.MAP_SHARED)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)


def test_all_of_a_new_slab_is_in_memory() -> None:
    with _sealed(16 * PAGE) as slab:
        assert os.fstat(slab.fileno()).st_blocks * 512 == 16 * PAGE


def test_a_slab_with_a_hole_is_refused() -> None:
    with memfd.create("hollow") as hollow:
        os.ftruncate(hollow.fileno(), 1 << 40)
        os.pwrite(hollow.fileno(), b"x" * PAGE, 0)
        memfd.seal(hollow)
        with pytest.raises(PeerError, match=f"only {PAGE} of its {1 << 40} bytes"):
            MemfdBackend().map(hollow, 1 << 40)


def test_a_slab_of_no_bytes_is_refused() -> None:
    with memfd.sealed("empty", []) as empty, pytest.raises(PeerError, match="0 bytes announced"):
        MemfdBackend().map(empty, 0)


def test_a_larger_slab_than_announced_is_refused() -> None:
    with _sealed(2 * PAGE) as slab, pytest.raises(PeerError, match=f"{2 * PAGE} bytes instead of the {PAGE} announced"):
        MemfdBackend().map(slab, PAGE)


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_GROW])
def test_a_slab_with_a_seal_missing_is_refused(seal: int) -> None:
    with memfd.create("open") as slab:
        os.write(slab.fileno(), b"x" * PAGE)
        fcntl.fcntl(slab.fileno(), fcntl.F_ADD_SEALS, memfd.SEALS & ~seal)
        with pytest.raises(PeerError, match="not a sealed memory file"):
            MemfdBackend().map(slab, PAGE)


def test_python_refuses_a_write_to_a_window_before_the_kernel_does() -> None:
    with _sealed() as slab, MemfdBackend().map(slab, PAGE) as mapping, pytest.raises(TypeError):
        mapping.window(0, 1)[0] = 1


@contextmanager
def _limit(what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.parametrize(
    "limit",
    [
        lambda: _limit(resource.RLIMIT_FSIZE, PAGE),
        lambda: room_for(0),
        lambda: room_for(1),  # a mapping holds a descriptor of its own
        lambda: _limit(resource.RLIMIT_AS, 1 << 20),
    ],
    ids=["file size", "no descriptor", "one descriptor", "address space"],
)
def test_a_slab_that_cannot_be_made_leaves_nothing(limit: Callable[[], AbstractContextManager[None]]) -> None:
    before = count_descriptors()
    with limit(), pytest.raises(ResourceError) as raised:
        MemfdBackend().create("test", 64 * PAGE)
    assert count_descriptors() == before, raised  # while the error still holds what it happened in


def test_a_mapping_that_cannot_be_made_leaves_nothing() -> None:
    with _sealed() as slab:
        before = count_descriptors()
        with _limit(resource.RLIMIT_AS, 1 << 20), pytest.raises(ResourceError, match="cannot map"):
            MemfdBackend().map(slab, PAGE)
        assert count_descriptors() == before
