"""`appliance status --watch` on a terminal: it follows what a keeper does, and Ctrl-C leaves the terminal whole."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.checkpoints import make_checkpoint
from tests.sites import MODEL, WAIT_S, Site

ROWS, COLUMNS = 50, 200
FULL_SCREEN, FORMER_SCREEN, CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A terminal with `appliance status --watch` in its foreground."""

    def __init__(self, terminal: int, process: "subprocess.Popen[bytes]") -> None:
        self._terminal = terminal
        self._unread = b""
        self.process = process

    def wait_for(self, text: str) -> None:
        """Read on until the text is shown; what was shown before it does not count again."""
        deadline = time.monotonic() + WAIT_S
        while text.encode() not in self._unread:
            more = self._read(deadline)
            assert more, f"it ended: {self._unread!r}"
            self._unread += more
        self._unread = self._unread.partition(text.encode())[2]

    def press_control_c(self) -> bytes:
        """Return what is written from then on until the program has ended."""
        os.write(self._terminal, termios.tcgetattr(self._terminal)[6][termios.VINTR])
        deadline, written = time.monotonic() + WAIT_S, b""
        while more := self._read(deadline):
            written += more
        self.process.wait(timeout=WAIT_S)
        return written

    def _read(self, deadline: float) -> bytes:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"not shown: {self._unread!r}"
        try:
            return os.read(self._terminal, 1 << 16)
        except OSError:  # EIO: nobody has the other side any more
            return b""


@contextmanager
def watching(manifest: Path) -> Iterator[Terminal]:
    argv = [sys.executable, "-m", "appliance", "status", "--watch", "--manifest", str(manifest)]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    try:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        process = subprocess.Popen(
            # A session of its own, so that the terminal becomes its controlling one, and Ctrl-C a signal.
            # What runs the tests may have ignored that signal, and children inherit it.
            ["env", "--default-signal=INT", "setsid", "--ctty", *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
        )
    finally:
        os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site", make_checkpoint(tmp_path / "checkpoint"))


def test_what_a_keeper_does_is_shown_as_it_happens_and_ctrl_c_ends_it(site: Site) -> None:
    with watching(site.manifest) as terminal:
        terminal.wait_for(FULL_SCREEN.decode())
        terminal.wait_for("down")
        with site.keeper():
            root_digest = site.status()["root_digest"]
            terminal.wait_for("resident")
            terminal.wait_for(root_digest[:12])
            with site.client() as client:
                held = client.describe(role="target", rank=0, wait_s=0)
                held.configs.close()
                slabs = client.attach(
                    role="target", rank=0, client="a watched engine", fingerprint=held.record.fingerprint
                )
                for slab in slabs:
                    slab.close()
                terminal.wait_for(f"a watched engine (pid {os.getpid()}")
        terminal.wait_for("down")
        written = terminal.press_control_c()
        assert terminal.process.returncode == 128 + signal.SIGINT
        assert FORMER_SCREEN in written
        assert CURSOR in written
        assert b"Traceback" not in written
        assert MODEL.encode() not in written.partition(FORMER_SCREEN)[2]


def test_what_ends_before_it_shows_anything_leaves_the_screen_alone(site: Site) -> None:
    site.manifest.write_text("models: [")
    with watching(site.manifest) as terminal:
        terminal.wait_for(f"{site.manifest}:")
        assert terminal.process.wait(timeout=WAIT_S) == 78
