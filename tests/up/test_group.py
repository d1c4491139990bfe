import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.descriptors import Descriptor
from appliance.up import group
from appliance.up.group import MARK, in_group, kill_leftovers, kill_members
from tests.up.stage import ends

# Says its own number and its child's, then sleeps; the child is in a session of its own if asked for.
PARENT = """
import os, sys, time
if (pid := os.fork()) == 0:
    if sys.argv[1] == "own": os.setsid()
    os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(600)
"""
# Forks without pause: whoever kills one by one is always late.
FORKER = """
import os, time
for _ in range(30):
    if os.fork() == 0: os.setsid()
    time.sleep(0.001)
time.sleep(600)
"""

# Its first thread ends, and only its second says so: /proc calls that a zombie. To free its memory takes a while.
HEADLESS = """
import ctypes, os, platform, threading, time
memory = b"x" * (200 << 20)
def live():
    while " Z " not in open("/proc/self/stat").read(): time.sleep(0.001)
    os.write(1, b"0\\n")
    time.sleep(600)
threading.Thread(target=live).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def here(folder: Path) -> str:
    """A folder that no other test's units are marked with, also not one that runs beside this."""
    return str(folder)


def start(
    started: list[subprocess.Popen[bytes]], code: str, *arguments: str, mark: str = "", new_session: bool = True
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        start_new_session=new_session,
        env={**os.environ, MARK: mark},
    )
    started.append(process)
    return process


def child_of(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.parametrize("session", ["same", "own"])
def test_what_a_dead_process_started_is_killed_wherever_it_went(
    here: str, session: str, started: list[subprocess.Popen[bytes]]
) -> None:
    main = start(started, PARENT, session, mark=f"{here}/x/engine@a")
    child = child_of(main)
    main.kill()
    os.waitid(os.P_PID, main.pid, os.WEXITED | os.WNOWAIT)
    assert kill_members(main.pid, f"{here}/x/engine@a", timeout_s=20)
    assert ends(child)


def test_what_is_started_while_the_others_are_killed_is_killed_too(
    here: str, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = start(started, PARENT, "own", mark=f"{here}/x/engine@a")
    child, late = child_of(main), list[int]()
    all_end = group._all_end

    def all_end_late(pidfds: list[Descriptor], deadline: float) -> bool:
        if not late:
            late.append(child_of(start(started, PARENT, "own", mark=f"{here}/x/engine@a")))
        return all_end(pidfds, deadline)

    monkeypatch.setattr(group, "_all_end", all_end_late)
    assert kill_members(main.pid, f"{here}/x/engine@a", timeout_s=20)
    assert ends(child) and ends(late[0])


def test_a_process_that_forks_while_it_is_killed_leaves_nothing(
    here: str, started: list[subprocess.Popen[bytes]]
) -> None:
    main = start(started, FORKER, mark=f"{here}/x/forker")
    assert kill_members(main.pid, f"{here}/x/forker", timeout_s=20)
    marked = [
        pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and is_marked(pid, here.encode() + b"/x/forker")
    ]
    assert marked == []


def is_marked(process: Path, mark: bytes) -> bool:
    try:
        return b"\0" + MARK.encode() + b"=" + mark in (process / "environ").read_bytes()
    except OSError:
        return False


def test_another_unit_is_left_alone_though_its_name_begins_alike(
    here: str, started: list[subprocess.Popen[bytes]]
) -> None:
    main, other = (start(started, PARENT, "own", mark=mark) for mark in (f"{here}/x/engine@a", f"{here}/x/engine@a2"))
    children = child_of(main), child_of(other)
    assert kill_members(main.pid, f"{here}/x/engine@a", timeout_s=20)
    assert ends(children[0])
    assert other.poll() is None
    os.kill(children[1], 0)
    assert kill_members(other.pid, f"{here}/x/engine@a2", timeout_s=20)
    assert ends(children[1])


def test_what_another_supervisor_left_is_killed_by_the_folder_it_belonged_to(
    here: str,
    started: list[subprocess.Popen[bytes]],
) -> None:
    main, other = (
        start(started, PARENT, "own", mark=mark) for mark in (f"{here}/x/.up/engine@a", f"{here}/y/.up/engine@a")
    )
    children = child_of(main), child_of(other)
    assert kill_leftovers(f"{here}/x/.up/", timeout_s=20)
    assert ends(main.pid) and ends(children[0])
    assert other.poll() is None
    assert kill_leftovers(f"{here}/y/.up/", timeout_s=20)
    assert ends(children[1])


def test_a_process_whose_first_thread_has_ended_is_not_taken_for_dead(
    here: str, started: list[subprocess.Popen[bytes]]
) -> None:
    main = start(started, HEADLESS)
    child_of(main)
    assert kill_members(main.pid, f"{here}/engine@a", timeout_s=20)
    assert main.poll() is not None


def test_nothing_to_kill_is_no_failure(here: str) -> None:
    assert kill_leftovers(f"{here}/nobody/ever/", timeout_s=1)


def test_the_caller_itself_is_never_killed(here: str) -> None:
    code = (
        "import os, sys; sys.path[:] = sys.argv[1].split(':')\n"
        "from appliance.up.group import kill_leftovers\n"
        "print(kill_leftovers(sys.argv[2], timeout_s=1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, ":".join(sys.path), f"{here}/"],
        env={**os.environ, MARK: f"{here}/engine@a"},
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (0, b"True\n"), done.stderr


def test_membership_is_by_group_or_session(started: list[subprocess.Popen[bytes]]) -> None:
    main = start(started, PARENT, "own")
    child = child_of(main)
    assert in_group(main.pid, main.pid)
    assert not in_group(child, main.pid)
    assert not in_group(os.getpid(), main.pid)
    os.kill(child, signal.SIGKILL)
    assert ends(child)


def test_a_process_that_is_gone_is_in_no_group(started: list[subprocess.Popen[bytes]]) -> None:
    main = start(started, PARENT, "same")
    child = child_of(main)
    assert in_group(child, main.pid)
    os.killpg(main.pid, signal.SIGKILL)
    main.wait()
    assert ends(child)
    assert not in_group(main.pid, main.pid)


def test_a_process_name_full_of_brackets_and_spaces_is_no_trap(started: list[subprocess.Popen[bytes]]) -> None:
    code = "open('/proc/self/comm', 'w').write(') 1 1 1 S (x'); print(flush=True); import time; time.sleep(600)"
    main = start(started, code)
    assert main.stdout is not None
    main.stdout.readline()
    assert in_group(main.pid, main.pid)
