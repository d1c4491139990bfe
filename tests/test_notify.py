"""The notify protocol, spoken to a service manager that is stricter than PID 1, and what it hands back."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import memfd, notify
from appliance.descriptors import Descriptor
from appliance.errors import HostError, ResourceError
from appliance.notify import Notifier, take_listen_descriptors
from tests.descriptors import count_descriptors, room_for
from tests.service_manager import MAX_DATAGRAM_BYTES, ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


@pytest.fixture
def notifier(manager: ServiceManager) -> Iterator[Notifier]:
    notifier = Notifier(manager.environ)
    yield notifier
    notifier.close()


def test_every_call_says_what_sd_notify_documents(manager: ServiceManager, notifier: Notifier) -> None:
    notifier.status("reading 3 of 8")
    notifier.extend_timeout(1.5)
    notifier.ready("all is resident")
    notifier.watchdog()
    notifier.remove("w1.settings")
    notifier.stopping("stopping")
    notifier.barrier()
    assert manager.said() == [
        ("STATUS=reading 3 of 8",),
        ("EXTEND_TIMEOUT_USEC=1500000",),
        ("READY=1", "STATUS=all is resident"),
        ("WATCHDOG=1",),
        ("FDSTOREREMOVE=1", "FDNAME=w1.settings"),
        ("STOPPING=1", "STATUS=stopping"),
        ("BARRIER=1",),
    ]


def test_a_stored_descriptor_is_the_same_file_and_stays_ours(manager: ServiceManager, notifier: Notifier) -> None:
    with memfd.sealed("it", [b"weights"]) as descriptor:
        notifier.store("it", descriptor.fileno())
        notifier.barrier()
        (named,) = manager.handed_over()
        with named.descriptor:
            assert named.name == "it"
            assert os.path.sameopenfile(named.descriptor.fileno(), descriptor.fileno())
        assert not descriptor.closed


def test_without_a_manager_every_call_does_nothing() -> None:
    before = count_descriptors()
    notifier = Notifier({})
    assert not notifier.present
    notifier.ready("")
    notifier.status("")
    notifier.store("a", 0)
    notifier.remove("a")
    notifier.barrier()
    notifier.close()
    assert count_descriptors() == before


def test_an_abstract_address_is_understood(tmp_path: Path) -> None:
    import socket

    name = f"appliance-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}"})
        notifier.ready("here")
        notifier.close()
        assert manager.recv(100) == b"READY=1\nSTATUS=here"


def test_a_manager_that_is_gone_is_an_error_for_what_must_arrive_and_none_for_what_informs(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    calls: list[Callable[[], None]] = [
        lambda: notifier.ready(""),
        lambda: notifier.store("a", 0),
        lambda: notifier.remove("a"),
        notifier.barrier,
    ]
    for must_arrive in calls:
        with pytest.raises(HostError, match=r"cannot notify the service manager at .*gone: No such file"):
            must_arrive()
    notifier.status("")
    notifier.watchdog()
    notifier.extend_timeout(1)
    notifier.stopping("")
    notifier.close()


def test_an_address_that_is_too_long_is_an_error_that_says_so(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": "/" + "a" * 200})
    with pytest.raises(HostError, match="path too long"):
        notifier.ready("")
    notifier.close()


@given(st.text(max_size=3000))
def test_any_status_is_one_short_line(text: str) -> None:
    line = notify._one_line(text)
    assert len(line.encode()) <= notify.MAX_STATUS_BYTES
    assert "\n" not in line
    assert line.isprintable()


@pytest.mark.parametrize(
    "text", ["x" * 10_000, "é" * 10_000, "\U0001f600" * 5000, "a\0b", "two\nlines", "\ud800", "\x1b[2J", "READY=0\nX=1"]
)
def test_ready_arrives_whatever_the_status_says(manager: ServiceManager, notifier: Notifier, text: str) -> None:
    notifier.ready(text)
    notifier.barrier()
    assert manager.heard("READY=1")
    assert all(len("\n".join(lines).encode()) <= MAX_DATAGRAM_BYTES for lines in manager.said())


def test_the_barrier_waits_for_what_was_sent_before(manager: ServiceManager, notifier: Notifier) -> None:
    manager.pause()
    with memfd.sealed("it", [b""]) as descriptor:
        notifier.store("it", descriptor.fileno())
    passed = threading.Event()

    def wait() -> None:
        notifier.barrier()
        passed.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not passed.wait(0.1)
    assert manager.names() == []
    manager.go_on()
    assert passed.wait(10)
    assert manager.names() == ["it"]
    waiting.join()


def test_a_manager_that_does_not_answer_is_not_waited_for_for_ever(manager: ServiceManager, notifier: Notifier) -> None:
    before = count_descriptors()
    manager.pause()
    with pytest.raises(HostError, match=r"did not answer within 0.05 s"):
        notifier.barrier(timeout_s=0.05)
    manager.go_on()
    notifier.barrier()
    assert count_descriptors() == before


def test_what_informs_does_not_wait_for_a_manager_that_takes_no_messages(
    manager: ServiceManager, notifier: Notifier
) -> None:
    manager.pause()
    began = time.monotonic()
    for _ in range(3000):  # more than any queue has room for
        notifier.status("again")
    assert time.monotonic() - began < 5
    with pytest.raises(HostError, match="takes no messages"):
        notifier.send(["READY=1"], timeout_s=0.05)
    manager.go_on()
    notifier.ready("now")  # waits for room
    notifier.barrier()
    assert manager.heard("READY=1")


def test_a_process_without_a_free_descriptor_can_still_notify(manager: ServiceManager, notifier: Notifier) -> None:
    with room_for(0):
        notifier.ready("still here")
        with pytest.raises(ResourceError, match="no descriptor left"):
            notifier.barrier()
    notifier.barrier()
    assert manager.heard("READY=1")


def test_two_threads_may_store_at_once(manager: ServiceManager, notifier: Notifier) -> None:
    def store(prefix: str) -> None:
        for index in range(50):
            with memfd.sealed("it", [b""]) as descriptor:
                notifier.store(f"{prefix}{index}", descriptor.fileno())

    threads = [threading.Thread(target=store, args=(prefix,)) for prefix in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notifier.barrier()
    assert sorted(manager.names()) == sorted(f"{prefix}{index}" for prefix in "ab" for index in range(50))


@pytest.mark.parametrize(
    ("environ", "limit"),
    [({}, 0), ({"FDSTORE": "1024"}, 1024), ({"FDSTORE": ""}, 0), ({"FDSTORE": "many"}, 0), ({"FDSTORE": "-1"}, 0)],
)
def test_the_limit_of_the_store_is_what_the_manager_says(environ: dict[str, str], limit: int) -> None:
    assert Notifier(environ).store_limit == limit


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
    ],
)
def test_the_watchdog_is_that_of_this_process(environ: dict[str, str], watchdog_s: float | None) -> None:
    assert Notifier(environ).watchdog_s == watchdog_s


# Runs in a process of its own: descriptors come by number.
TAKE = """
import os, sys
from appliance.notify import take_listen_descriptors
if os.environ["LISTEN_PID"] == "me":
    os.environ["LISTEN_PID"] = str(os.getpid())
taken = take_listen_descriptors(os.environ)
left = [name for name in os.environ if name.startswith("LISTEN_")]
print([(named.name, named.descriptor.fileno(), os.get_inheritable(named.descriptor.fileno())) for named in taken], left)
"""


def taken(count: int, **environ: str) -> str:
    with memfd.sealed("it", [b"it"]) as low, Descriptor(fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, 100)) as descriptor:
        moved = "; ".join(f"os.dup2({descriptor.fileno()}, {3 + index})" for index in range(count))
        shim = f"import os, sys; {moved}; os.execv(sys.executable, [sys.executable, '-c', {TAKE!r}])"
        return subprocess.run(
            [sys.executable, "-c", shim],
            env={**os.environ, **environ},
            pass_fds=[descriptor.fileno()],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()


def test_descriptors_are_taken_by_name_and_the_variables_are_gone() -> None:
    given_back = taken(3, LISTEN_FDS="3", LISTEN_PID="me", LISTEN_FDNAMES="b:a:c", LISTEN_PIDFDID="7")
    assert given_back == "[('b', 3, False), ('a', 4, False), ('c', 5, False)] []"


def test_a_descriptor_without_a_name_is_unknown() -> None:
    assert (
        taken(2, LISTEN_FDS="2", LISTEN_PID="me", LISTEN_FDNAMES="a") == "[('a', 3, False), ('unknown', 4, False)] []"
    )


@pytest.mark.parametrize("pid", ["1", "", "0"])
def test_descriptors_for_another_process_are_left_alone(pid: str) -> None:
    assert taken(1, LISTEN_FDS="1", LISTEN_PID=pid, LISTEN_FDNAMES="a") == "[] []"


@pytest.mark.parametrize("count", ["", "-1", "x", "²", "1e3", "99999999999999999999999"])
def test_a_count_that_is_no_number_gives_nothing(count: str) -> None:
    environ = {"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "a"}
    assert take_listen_descriptors(environ) == []
    assert environ == {}


def test_a_count_beyond_what_is_there_ends_with_what_is_there() -> None:
    assert taken(1, LISTEN_FDS="999999999", LISTEN_PID="me", LISTEN_FDNAMES="a").startswith("[('a', 3, False)")
