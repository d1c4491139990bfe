"""The processes of a unit: its process group, its session, and whoever left both but carries its mark.

An ordinary user has no cgroup to put a unit into, so a variable in the environment says where a process belongs.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.descriptors import Descriptor, close_all

MARK = "APPLIANCE_UNIT"

_PROC = Path("/proc")


@dataclass(frozen=True)
class Member:
    """A process that has not been reaped: its group and session, from /proc/PID/stat."""

    pid: int
    group: int
    session: int


def kill_members(leader_pid: int, mark: str, *, timeout_s: float) -> bool:
    """SIGKILL what is left of a unit and wait until it is gone; False if something is still there.

    `leader_pid` is its main process, ended but not reaped: until then nobody else can have that number.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal.SIGKILL)
    return _kill_all(
        lambda member: leader_pid in (member.group, member.session) or _marked(member.pid, mark.encode() + b"\0"),
        timeout_s=timeout_s,
    )


def kill_leftovers(mark_prefix: str, *, timeout_s: float) -> bool:
    """SIGKILL every process whose mark starts like this: its supervisor is dead. False if one is still there."""
    return _kill_all(lambda member: _marked(member.pid, mark_prefix.encode()), timeout_s=timeout_s)


def in_group(pid: int, leader_pid: int) -> bool:
    """Tell whether a process is in this one's process group or session."""
    member = _member(pid)
    return member is not None and leader_pid in (member.group, member.session)


def _kill_all(belongs: Callable[[Member], bool], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    # Again after each round: a process may have forked between being seen and being killed.
    while doomed := [pidfd for member in _members() if (pidfd := _killed(member, belongs)) is not None]:
        try:
            if not _all_end(doomed, deadline):
                return False
        finally:
            close_all(doomed)
    return True


def _killed(member: Member, belongs: Callable[[Member], bool]) -> Descriptor | None:
    if member.pid == os.getpid() or not belongs(member):
        return None
    try:
        pidfd = Descriptor(os.pidfd_open(member.pid))
    except ProcessLookupError:
        return None
    # Whoever has this number now keeps it while the descriptor is open: look again, then kill.
    again = _member(member.pid)
    if again is None or not belongs(again) or _has_ended(pidfd, 0.0):
        pidfd.close()
        return None
    try:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pidfd.close()
        return None
    return pidfd


def _all_end(pidfds: list[Descriptor], deadline: float) -> bool:
    return all(_has_ended(pidfd, max(0.0, deadline - time.monotonic())) for pidfd in pidfds)


def _has_ended(pidfd: Descriptor, timeout_s: float) -> bool:
    # Of a process with threads /proc says "zombie" as soon as the first has ended; this is about the last.
    poll = select.poll()
    poll.register(pidfd.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _members() -> Iterator[Member]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (member := _member(int(entry.name))) is not None:
            yield member


def _member(pid: int) -> Member | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name before the last ')' may contain anything, that character included.
    _, _, group, session, *_ = stat[stat.rindex(b")") + 2 :].split()
    return Member(pid, int(group), int(session))


def _marked(pid: int, start: bytes) -> bool:
    try:
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # gone, or another user's
        return False
    return b"\0" + MARK.encode() + b"=" + start in b"\0" + environ
