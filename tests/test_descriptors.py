"""A descriptor has one owner, who closes it exactly once."""

import gc
import os

import pytest

from appliance.descriptors import Descriptor, close_all
from tests.descriptors import count_descriptors


def opened() -> Descriptor:
    return Descriptor(os.open("/dev/null", os.O_RDONLY))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_closing_twice_does_not_close_whoever_got_the_number_next() -> None:
    descriptor = opened()
    fd = descriptor.fileno()
    descriptor.close()
    with opened() as next_one:
        assert next_one.fileno() == fd
        descriptor.close()
        assert is_open(fd)


def test_a_closed_descriptor_has_no_number() -> None:
    descriptor = opened()
    descriptor.close()
    assert descriptor.closed
    with pytest.raises(ValueError, match="closed"):
        descriptor.fileno()
    with pytest.raises(ValueError, match="closed"):
        descriptor.take()


def test_what_is_taken_is_not_closed() -> None:
    with opened() as descriptor:
        fd = descriptor.take()
    assert descriptor.closed
    assert is_open(fd)
    os.close(fd)


def test_the_end_of_a_with_block_closes() -> None:
    with opened() as descriptor:
        fd = descriptor.fileno()
    assert not is_open(fd)


def test_an_error_in_a_with_block_closes() -> None:
    with pytest.raises(RuntimeError), opened() as descriptor:
        raise RuntimeError
    assert descriptor.closed


def test_what_nobody_refers_to_any_more_is_closed() -> None:
    before = count_descriptors()
    descriptor = opened()
    del descriptor
    gc.collect()
    assert count_descriptors() == before


def test_close_all_closes_all() -> None:
    before = count_descriptors()
    descriptors = [opened() for _ in range(5)]
    descriptors[2].close()
    close_all(descriptors)
    assert count_descriptors() == before
    assert all(descriptor.closed for descriptor in descriptors)
