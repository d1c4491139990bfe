import asyncio
import os
import random
import resource
import socket
import struct
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from appliance.descriptors import Descriptor, close_all
from appliance.errors import HostError
from appliance.up.message import Message
from appliance.up.notify_socket import NotifySocket
from tests.up.stage import TIMEOUT_S, until, until_file


@dataclass
class Ear:
    """What one socket heard."""

    messages: list[Message] = field(default_factory=list)
    descriptors: list[Descriptor] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def take(self, message: Message, descriptors: list[Descriptor]) -> None:
        self.messages.append(message)
        self.descriptors += descriptors


def heard(
    path: Path, send: Callable[[socket.socket], object], *, belongs: Callable[[int], bool] = lambda pid: True
) -> Ear:
    """Return what a socket heard after this was sent to it. No descriptor may be left afterwards."""
    ear = Ear()
    before = open_descriptors()

    async def scenario() -> None:
        receiver = NotifySocket(path, belongs=belongs, take=ear.take, refuse=ear.refusals.append)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(str(path))
                send(sender)
            receiver.receive(1000)
        finally:
            receiver.close()
            close_all(ear.descriptors)

    asyncio.run(scenario())
    assert open_descriptors() == before
    return ear


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def with_files(sender: socket.socket, text: bytes, count: int) -> None:
    fds = [os.memfd_create("test") for _ in range(count)]
    socket.send_fds(sender, [text], fds)
    for fd in fds:
        os.close(fd)


def noting(senders: list[int]) -> Callable[[int], bool]:
    def belongs(pid: int) -> bool:
        senders.append(pid)
        return True

    return belongs


def test_a_message_arrives_with_its_descriptors_which_no_program_inherits(folder: Path) -> None:
    inheritable: list[bool] = []

    def check(sender: socket.socket) -> None:
        with_files(sender, b"FDSTORE=1\nFDNAME=a", 3)

    ear = Ear()

    async def scenario() -> None:
        def take(message: Message, descriptors: list[Descriptor]) -> None:
            inheritable.extend(os.get_inheritable(descriptor.fileno()) for descriptor in descriptors)
            ear.take(message, descriptors)

        receiver = NotifySocket(folder / "n", belongs=lambda pid: True, take=take, refuse=ear.refusals.append)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(str(folder / "n"))
            check(sender)
        receiver.receive(10)
        receiver.close()
        close_all(ear.descriptors)

    asyncio.run(scenario())
    assert ear.messages == [Message(store=True, name="a")]
    assert inheritable == [False] * 3


def test_as_many_descriptors_as_the_kernel_passes_arrive(folder: Path) -> None:
    ear = heard(folder / "n", lambda sender: with_files(sender, b"FDSTORE=1", 253))
    assert (len(ear.descriptors), ear.refusals) == (253, [])


@pytest.mark.parametrize(
    ("text", "count", "why"),
    [
        (b"FDSTORE=1\nX=" + b"x" * 4096, 3, "more than 4096 bytes"),
        (b"FDSTORE=1\0\nFDNAME=a", 3, "NUL bytes"),
        (b"BARRIER=1", 0, "barrier with 0"),
        (b"BARRIER=1", 2, "barrier with 2"),
        (b"BARRIER=1\nFDSTORE=1", 1, "BARRIER=1 and something else"),
    ],
)
def test_a_descriptor_on_a_refused_message_is_closed(folder: Path, text: bytes, count: int, why: str) -> None:
    ear = heard(folder / "n", lambda sender: with_files(sender, text, count))
    assert (ear.messages, ear.descriptors) == ([], [])
    assert len(ear.refusals) == 1 and why in ear.refusals[0]


def test_a_descriptor_that_no_message_asks_to_store_is_closed(folder: Path) -> None:
    ear = heard(folder / "n", lambda sender: with_files(sender, b"READY=1", 3))
    assert (ear.messages, ear.descriptors) == ([Message(ready=True)], [])


def test_a_barrier_is_answered_after_what_came_before_it(folder: Path) -> None:
    answers: list[tuple[int, bytes]] = []
    ear = Ear()
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    def take(message: Message, descriptors: list[Descriptor]) -> None:
        ear.take(message, descriptors)
        with suppress(BlockingIOError):  # not answered yet
            answers.append((len(ear.messages), os.read(ours, 1)))

    async def scenario() -> None:
        receiver = NotifySocket(folder / "n", belongs=lambda pid: True, take=take, refuse=ear.refusals.append)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(str(folder / "n"))
            sender.send(b"READY=1")
            socket.send_fds(sender, [b"BARRIER=1"], [theirs])
        os.close(theirs)
        receiver.receive(10)
        receiver.close()

    asyncio.run(scenario())
    os.close(ours)
    assert ear.messages == [Message(ready=True), Message(barrier=True)]
    assert answers == [(2, b"")]  # the end of the file: its last copy is closed


def test_a_sender_that_does_not_belong_is_refused_and_named(folder: Path) -> None:
    ear = heard(folder / "n", lambda sender: with_files(sender, b"FDSTORE=1", 2), belongs=lambda pid: False)
    assert (ear.messages, ear.descriptors) == ([], [])
    assert str(os.getpid()) in ear.refusals[0]


def test_the_kernel_says_who_sent_whatever_the_sender_claims(folder: Path) -> None:
    senders: list[int] = []

    async def scenario() -> int:
        receiver = NotifySocket(folder / "n", belongs=noting(senders), take=Ear().take, refuse=lambda why: None)
        code = (
            "import os, socket, sys\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(sys.argv[1]); s.send(b'MAINPID=1')\n"
        )
        child = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", code, str(folder / "n"))
        await child.wait()
        receiver.receive(10)
        receiver.close()
        return child.pid

    assert [asyncio.run(scenario())] == senders


def test_more_descriptors_than_this_process_may_have_are_refused_and_closed(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in open_descriptors()}
    room_for_20 = [number for number in range(100_000) if number not in used][20]

    def send(sender: socket.socket) -> None:
        with_files(sender, b"FDSTORE=1", 50)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room_for_20, hard))

    try:
        ear = heard(folder / "n", send)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (ear.messages, ear.descriptors) == ([], [])
    assert "more descriptors than can be received" in ear.refusals[0]


def test_a_flood_leaves_the_loop_time_for_others(folder: Path) -> None:
    ear = Ear()

    async def scenario() -> int:
        receiver = NotifySocket(folder / "n", belongs=lambda pid: True, take=ear.take, refuse=ear.refusals.append)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.connect(str(folder / "n"))
            turns = 0
            while len(ear.messages) < 200:
                try:
                    sender.send(b"WATCHDOG=1")
                except BlockingIOError:
                    await asyncio.sleep(0)
                    turns += 1
        receiver.close()
        return turns

    assert asyncio.run(scenario()) >= 200 // 64


def test_a_socket_left_by_a_supervisor_that_was_killed_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        stale.bind(str(folder / "n"))
    ear = heard(folder / "n", lambda sender: sender.send(b"READY=1"))
    assert ear.messages == [Message(ready=True)]
    assert not (folder / "n").exists()


def test_a_path_too_long_for_a_socket_is_refused_with_a_way_out(folder: Path) -> None:
    async def scenario() -> None:
        NotifySocket(folder / ("x" * 100), belongs=bool, take=Ear().take, refuse=lambda why: None)

    with pytest.raises(HostError, match="longer than the 107 bytes") as caught:
        asyncio.run(scenario())
    assert caught.value.hint is not None


def test_random_datagrams_leak_nothing_and_break_nothing(folder: Path) -> None:
    chance = random.Random(7)
    keys = [b"READY=1", b"FDSTORE=1", b"FDNAME=a", b"FDNAME=:", b"BARRIER=1", b"STATUS=\xff", b"\0", b"x" * 4100]

    def send(sender: socket.socket) -> None:
        sender.setblocking(False)
        for _ in range(8):  # as many as a receiver's queue surely takes
            text = b"\n".join(chance.choice([*keys, chance.randbytes(20)]) for _ in range(chance.randint(0, 4)))
            with_files(sender, text, chance.choice([0, 0, 1, 2, 10]))

    for _ in range(40):
        ear = heard(folder / "n", send)
        assert len(ear.messages) + len(ear.refusals) == 8


def test_credentials_that_a_sender_adds_itself_change_nothing(folder: Path) -> None:
    senders: list[int] = []

    def send(sender: socket.socket) -> None:
        own = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
        fd = os.memfd_create("test")
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))
        sender.sendmsg([b"FDSTORE=1"], [rights, (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, own)])
        os.close(fd)

    ear = heard(folder / "n", send, belongs=noting(senders))
    assert (senders, len(ear.descriptors)) == ([os.getpid()], 1)


def test_what_arrives_is_heard_without_being_asked_for(folder: Path) -> None:
    ear = Ear()

    async def scenario() -> None:
        receiver = NotifySocket(folder / "n", belongs=lambda pid: True, take=ear.take, refuse=ear.refusals.append)
        code = (
            "import os, socket, sys\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(sys.argv[1]); s.send(b'READY=1')\n"
            "open(sys.argv[2], 'w').close()\n"
        )
        arguments = str(folder / "n"), str(folder / "sent")
        child = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", code, *arguments)
        async with asyncio.timeout(TIMEOUT_S):
            await until_file(folder / "sent")
            await until(lambda: ear.messages)
        await child.wait()
        receiver.close()

    asyncio.run(scenario())
    assert ear.messages == [Message(ready=True)]
