import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from appliance.up import same_file as module
from appliance.up.same_file import same_file

WAYS = ("newest", "kcmp", "neither")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of asking the kernel, on kernels that know fewer."""
    if request.param != "newest":
        real = fcntl.fcntl

        def older(fd: int, command: int, argument: int = 0) -> int:
            if command == module._F_DUPFD_QUERY:
                raise OSError(22, "Invalid argument")
            return real(fd, command, argument)

        monkeypatch.setattr(fcntl, "fcntl", older)
    if request.param == "neither":
        monkeypatch.setattr(module, "_KCMP_NUMBERS", {})
    return str(request.param)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def keep(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def test_a_duplicate_is_the_same_open_file(way: str, opened: ExitStack) -> None:
    memory = keep(opened, os.memfd_create("x"))
    assert same_file(memory, keep(opened, os.dup(memory)))
    assert same_file(memory, memory)


def test_two_memory_files_are_not_one(way: str, opened: ExitStack) -> None:
    assert not same_file(keep(opened, os.memfd_create("x")), keep(opened, os.memfd_create("x")))


def test_two_contexts_of_one_device_are_not_one(way: str, opened: ExitStack) -> None:
    first, second = (keep(opened, os.open("/dev/null", os.O_RDWR)) for _ in range(2))
    assert not same_file(first, second)


def test_two_events_that_share_their_inode_are_not_one(way: str, opened: ExitStack) -> None:
    first, second = (keep(opened, os.eventfd(0)) for _ in range(2))
    assert not same_file(first, second)


def test_a_file_opened_twice_is_not_one_open_file(opened: ExitStack) -> None:
    first, second = (keep(opened, os.open("/proc/self/exe", os.O_RDONLY)) for _ in range(2))
    assert not same_file(first, second)


def test_both_ends_of_a_socket_pair_are_two(way: str) -> None:
    first, second = socket.socketpair()
    with first, second:
        assert not same_file(first.fileno(), second.fileno())
