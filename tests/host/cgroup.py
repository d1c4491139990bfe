"""A control group for one booted host, below this process's own in the version 2 tree, wherever that is mounted."""

import itertools
import os
import select
from contextlib import suppress
from pathlib import Path

PREFIX = "appliance-host-"
_numbers = itertools.count()


class ControlGroup:
    """Owns a control group. `remove` waits until the processes in it, which somebody else kills, are gone."""

    def __init__(self) -> None:
        parent = _own()
        _remove_leftovers(parent)
        self.path = parent / f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()

    def remove(self, *, timeout_s: float) -> None:
        """Remove it and what is below. TimeoutError while a process is in it."""
        wait_until_empty(self.path, timeout_s=timeout_s)
        _remove_tree(self.path)


def wait_until_empty(cgroup: Path, *, timeout_s: float) -> None:
    """Return when no process is left in this control group or below it; TimeoutError after `timeout_s`."""
    with (cgroup / "cgroup.events").open() as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while "populated 1" in events.read():
            if not poll.poll(timeout_s * 1000):
                raise TimeoutError(f"{cgroup}: still has processes after {timeout_s:g} s")
            events.seek(0)


def _own() -> Path:
    mount = next(
        fields[4]
        for fields in map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
        if fields[fields.index("-") + 1] == "cgroup2"
    )
    path = next(
        line.removeprefix("0::")
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.startswith("0::")
    )
    return Path(mount + path)


def _remove_leftovers(parent: Path) -> None:
    # Of test runs that were killed: the processes died with them, the empty groups stay.
    for leftover in parent.glob(f"{PREFIX}*"):
        pid = leftover.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            with suppress(OSError):
                _remove_tree(leftover)


def _remove_tree(cgroup: Path) -> None:
    for directory, _, _ in os.walk(cgroup, topdown=False):
        Path(directory).rmdir()
