"""A program that does what its arguments say, one after another: the fake keeper and engine of these tests.

It speaks sd_notify(3) from the manual page, not through the project's own client.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SLEEPER = "import time; time.sleep(600)"
SPEAKER = """
import os, socket, time
speaker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
speaker.connect(os.environ["NOTIFY_SOCKET"])
speaker.send(b"STATUS=child")
time.sleep(600)
"""


def notify(text: str, fds: list[int] | None = None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(os.environ["NOTIFY_SOCKET"])
        socket.send_fds(channel, [text.encode()], fds or [])


def write(path: str, text: str) -> None:
    """At once, so that whoever waits for the file finds all of it."""
    Path(f"{path}.new").write_text(text)
    Path(f"{path}.new").replace(path)


def given() -> list[tuple[str, int]]:
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    names = os.environ["LISTEN_FDNAMES"].split(":")
    return list(zip(names, range(3, 3 + int(os.environ["LISTEN_FDS"])), strict=True))


def store(name: str, content: str, count: str = "1") -> None:
    """Store memory files NAME-0, NAME-1 and so on, each with the content and its index in it."""
    for index in range(int(count)):
        fd = os.memfd_create(name)
        os.write(fd, f"{content}-{index}".encode())
        notify(f"FDSTORE=1\nFDNAME={name}-{index}\nFDPOLL=0", [fd])
        os.close(fd)


def store_once(name: str, content: str, count: str = "1") -> None:
    if not given():
        store(name, content, count)


def barrier() -> None:
    ours, theirs = os.pipe()
    notify("BARRIER=1", [theirs])
    os.close(theirs)
    poll = select.poll()
    poll.register(ours, 0)
    if not poll.poll(10_000):
        sys.exit("no answer to the barrier")
    os.close(ours)


def report(path: str) -> None:
    """Write what was inherited to a file, as JSON."""
    held = {name: os.pread(fd, 100, 0).decode() for name, fd in given()}
    environment = {name: value for name, value in os.environ.items() if name.isupper()}
    fds = sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())[:-1]
    write(path, json.dumps({"held": held, "environment": environment, "fds": fds, "pid": os.getpid()}))


def spawn(path: str, session: str = "same", code: str = SLEEPER) -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=session == "own")
    write(path, str(child.pid))
    child.returncode = 0  # it outlives us, and that is meant


def unless(path: str, *step: str) -> None:
    """Take a step only if there is no such file yet; the next run will find one."""
    if not Path(path).exists():
        Path(path).touch()
        take(" ".join(step))


def only_if(path: str, *step: str) -> None:
    if Path(path).exists():
        take(" ".join(step))


def count(path: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{time.monotonic()}\n")


def feed(times: str, interval_s: str) -> None:
    for _ in range(int(times)):
        notify("WATCHDOG=1")
        time.sleep(float(interval_s))


def wait() -> None:
    """As long as nobody ends it: without end, but a test that fails must not leave it running for ever."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        # Python answers a signal that comes just before a sleep only after it.
        time.sleep(0.05)


def until(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.005)


def unquote(text: str) -> str:
    """A step is cut at its spaces: what a word shall contain is written as in an address."""
    return text.replace("%20", " ").replace("%7B", "{").replace("%7D", "}")


def end_on_term(path: str) -> None:
    def end(*_: object) -> None:
        write(path, "ended")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)


STEPS: dict[str, Callable[..., object]] = {
    "notify": lambda *lines: notify(unquote("\n".join(lines))),
    "ready": lambda: notify("READY=1"),
    "store": store,
    "store-once": store_once,
    "barrier": barrier,
    "report": report,
    "spawn": spawn,
    "spawn-speaker": lambda path: spawn(path, code=SPEAKER),
    "unless": unless,
    "if": only_if,
    "count": count,
    "feed": feed,
    "wait": wait,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "until": until,
    "say": lambda *words: print(unquote(" ".join(words)), flush=True),
    "complain": lambda *words: print(*words, file=sys.stderr, flush=True),
    "ignore": lambda name: signal.signal(signal.Signals[name], signal.SIG_IGN),
    "end-on-term": end_on_term,
    "flood": lambda lines: print("\n".join(["x" * 1000] * int(lines)), flush=True),
    "die": lambda name: os.kill(os.getpid(), signal.Signals[name]),
    "exit": lambda status: sys.exit(int(status)),
}


def take(step: str) -> None:
    verb, *arguments = step.split()
    STEPS[verb](*arguments)


if __name__ == "__main__":
    for step in sys.argv[1:]:
        take(step)
