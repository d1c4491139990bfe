"""A descriptor has one owner, who closes it exactly once."""

import os
import subprocess
import sys

import pytest

from appliance.descriptors import ROOM, Descriptor, close_all
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
    assert count_descriptors() == before


def test_close_all_closes_all() -> None:
    before = count_descriptors()
    descriptors = [opened() for _ in range(5)]
    descriptors[2].close()
    close_all(descriptors)
    assert count_descriptors() == before
    assert all(descriptor.closed for descriptor in descriptors)


def table_size(*, limit: int | None = None) -> tuple[int, int]:
    """Return how many descriptors a process has room for (FDSize of proc_pid_status(5)) and open, once it made room."""
    limited = (
        "" if limit is None else f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
    )
    code = (
        f"import os; from appliance.descriptors import make_room\n{limited}make_room()\n"
        "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('FDSize')],"
        " len(os.listdir('/proc/self/fd')) - 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    slots, opened = map(int, done.stdout.split())
    return slots, opened


def test_room_is_made_before_it_is_needed_and_nothing_stays_open() -> None:
    slots, opened = table_size()
    assert slots >= ROOM
    assert opened == 3


def test_a_limit_of_open_files_below_that_is_no_error() -> None:
    slots, _ = table_size(limit=100)
    assert slots < ROOM
