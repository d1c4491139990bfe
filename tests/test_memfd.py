"""Sealed memory files: nobody changes them, whoever holds them."""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from appliance import memfd
from appliance.descriptors import Descriptor
from appliance.errors import PeerError, ResourceError
from tests.descriptors import count_descriptors, room_for


def test_a_sealed_file_holds_the_chunks_in_order() -> None:
    chunks: list[bytes | memoryview] = [b"one ", memoryview(b"two "), b"", memoryview(bytearray(b"three"))]
    with memfd.sealed("it", chunks) as descriptor:
        assert memfd.read(descriptor, what="it", limit_bytes=100) == b"one two three"


def test_a_chunk_of_another_item_size_is_written_whole() -> None:
    with memfd.sealed("it", [memoryview(b"12345678").cast("i")]) as descriptor:
        assert memfd.read(descriptor, what="it", limit_bytes=100) == b"12345678"


def test_a_sealed_file_cannot_be_written_grown_shrunk_unsealed_or_mapped_for_writing() -> None:
    with memfd.sealed("it", [b"\1" * 4096]) as descriptor:
        fd = descriptor.fileno()
        for change in (
            lambda: os.pwrite(fd, b"\2", 0),
            lambda: os.ftruncate(fd, 8192),
            lambda: os.ftruncate(fd, 0),
            lambda: memfd.seal(descriptor),
            lambda: mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE | mmap.PROT_READ),
        ):
            with pytest.raises(PermissionError):
                change()
        reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with Descriptor(reopened), pytest.raises(PermissionError):
            os.pwrite(reopened, b"\2", 0)
        assert memfd.read(descriptor, what="it", limit_bytes=4096) == b"\1" * 4096


def test_a_file_with_a_writable_mapping_is_not_sealed() -> None:
    with memfd.create("it") as descriptor:
        os.ftruncate(descriptor.fileno(), 4096)
        with mmap.mmap(descriptor.fileno(), 4096), pytest.raises(OSError, match="busy") as caught:
            memfd.seal(descriptor)
        assert caught.value.errno == errno.EBUSY


def test_what_is_not_sealed_is_not_read() -> None:
    with memfd.create("it") as descriptor, pytest.raises(PeerError, match="it: not a sealed memory file"):
        memfd.read(descriptor, what="it", limit_bytes=100)


def test_only_a_memory_file_with_every_seal_counts_as_sealed() -> None:
    reading, writing = os.pipe()
    with Descriptor(reading), Descriptor(writing), tempfile.TemporaryFile() as file:
        assert not memfd.is_sealed(reading)
        assert not memfd.is_sealed(file.fileno())
    with Descriptor(os.memfd_create("it")) as plain:
        assert not memfd.is_sealed(plain.fileno())
    import fcntl

    for seal in (fcntl.F_SEAL_SEAL, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_WRITE):
        with memfd.create("it") as partly:
            fcntl.fcntl(partly.fileno(), fcntl.F_ADD_SEALS, memfd.SEALS & ~seal)
            assert not memfd.is_sealed(partly.fileno())


def test_a_file_larger_than_the_limit_is_refused_before_it_is_read() -> None:
    with memfd.create("it") as descriptor:
        os.ftruncate(descriptor.fileno(), 1 << 40)  # no memory behind it
        memfd.seal(descriptor)
        with pytest.raises(PeerError, match=f"{1 << 40} bytes, more than the 100 allowed"):
            memfd.read(descriptor, what="it", limit_bytes=100)


def test_a_memory_file_does_not_outlive_an_exec() -> None:
    with memfd.create("it") as descriptor:
        assert not os.get_inheritable(descriptor.fileno())


def test_without_descriptors_there_is_no_memory_file() -> None:
    with room_for(0), pytest.raises(ResourceError, match="cannot create memory file 'it': Too many open files"):
        memfd.create("it")


def test_a_failure_half_way_leaves_no_descriptor(tmp_path: Path) -> None:
    import resource

    def chunks() -> Iterator[bytes]:
        yield b"first"
        # From here on a file may have five bytes: what a full memory file system says, said at once.
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
        yield b"second"

    before = count_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(ResourceError, match="cannot fill memory file 'it'"):
            memfd.sealed("it", chunks())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert count_descriptors() == before


def test_an_error_of_the_caller_half_way_leaves_no_descriptor() -> None:
    def chunks() -> Iterable[bytes]:
        yield b"first"
        raise ValueError("a bug of the caller")

    before = count_descriptors()
    with pytest.raises(ValueError, match="a bug of the caller"):
        memfd.sealed("it", chunks())
    assert count_descriptors() == before
