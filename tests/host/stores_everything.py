"""A Type=notify service of its own, in the standard library: it asks of a descriptor store all that it must decide.

    python3 stores_everything.py FOLDER [stubborn]

Each start writes what it was given, and what was answered, to FOLDER/report.N. The first start fills the store. One
that is told to be stubborn does not end when it is asked to, and FOLDER/refuse makes a start end with status 78.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 16


def main(folder: Path, *, stubborn: bool) -> None:
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    names = ("FDSTORE", "LISTEN_FDS", "WATCHDOG_USEC")
    report: dict[str, Any] = {"given": given(), "variables": {name: os.environ.get(name) for name in names}}
    if not (folder / "filled").exists():
        (folder / "filled").touch()
        report["answered"] = fill()
    path = folder / f"report.{len(list(folder.glob('report.*')))}"
    Path(f"{path}~").write_text(json.dumps(report))
    Path(f"{path}~").rename(path)
    if (folder / "refuse").exists():
        (folder / "refuse").unlink()
        sys.exit(78)
    notify("READY=1")
    time.sleep(600)


def given() -> list[list[str]]:
    """Return names and contents in the order in which they came."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    held = []
    for fd, name in enumerate(os.environ["LISTEN_FDNAMES"].split(":"), start=3):
        kind = str(Path(f"/proc/self/fd/{fd}").readlink())
        held.append([name, os.pread(fd, 50, 0).decode() if "memfd" in kind else kind.partition(":")[0]])
    return held


def fill() -> dict[str, list[bool]]:
    first = memory("first")
    duplicate = os.dup(first)
    store("FDNAME=first\nFDPOLL=0", first)
    store("FDNAME=several", memory("0"), memory("1"))
    store("FDNAME=duplicate", duplicate)
    store("FDNAME=with:colon", memory("colon"))
    store("FDNAME=\u00e9", memory("not ASCII"))
    store("", memory("no name"))
    store("FDNAME=", memory("empty name"))
    store(f"FDNAME={'l' * 255}", memory("255"))
    store(f"FDNAME={'l' * 256}", memory("256"))
    store("FDNAME=hangs-up", half_of_a_pipe())
    store("FDNAME=not-polled\nFDPOLL=0", half_of_a_pipe())
    store("FDNAME=one\nFDNAME=two", memory("two names"))
    store("FDNAME=opened", os.open("/etc/passwd", os.O_RDONLY))
    store("FDNAME=opened", os.open("/etc/passwd", os.O_RDONLY))
    store("FDNAME=both\nFDSTOREREMOVE=1", memory("both"))
    store("FDNAME=large\nX_PADDING=" + "x" * 4096, memory("large"))
    store("FDNAME=with\0nul", memory("nul"))
    store("FDNAME=nul-at-the-end\0", memory("nul at the end"))
    notify("FDNAME=not-asked-for", memory("not asked for"))
    notify("FDSTOREREMOVE=1\nFDNAME=several")
    notify("FDSTOREREMOVE=1\nFDNAME=unknown")
    answered = {
        "barrier": answers("BARRIER=1", 1),
        "barrier with two": answers("BARRIER=1", 2),
        "barrier and more": answers("BARRIER=1\nSTATUS=x", 1),
        "no store": answers("STATUS=x", 2),
    }
    time.sleep(0.2)  # the manager may take its time to notice the pipe that hung up, and what follows needs its place
    for index in range(LIMIT):
        store("FDNAME=too-many", memory(str(index)))
    answers("BARRIER=1", 1)
    return answered


def answers(text: str, count: int) -> list[bool]:
    """Send ends of pipes, and tell which of them the manager has closed by the time it answers a barrier."""
    pipes = [os.pipe() for _ in range(count)]
    notify(text, *(writing for _, writing in pipes))
    if text != "BARRIER=1" or count != 1:
        answers("BARRIER=1", 1)
    closed = []
    for reading, _ in pipes:
        poll = select.poll()
        poll.register(reading, 0)
        closed.append(bool(poll.poll(10_000)))
        os.close(reading)
    return closed


def memory(content: str) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content.encode())
    return fd


def half_of_a_pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def store(assignments: str, *fds: int) -> None:
    notify(f"FDSTORE=1\n{assignments}", *fds)


def notify(text: str, *fds: int) -> None:
    """Send and close these."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
        socket.send_fds(manager, [text.encode()], fds)
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main(Path(sys.argv[1]), stubborn="stubborn" in sys.argv)
