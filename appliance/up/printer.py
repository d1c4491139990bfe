"""Every unit's lines on one terminal, each with its unit's name. Whoever says a line never waits for the terminal."""

import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

OWN_NAME = "up"

QUEUE_LINES = 10_000

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
_BATCH_LINES = 200


class LinePrinter(Protocol):
    """What a supervisor needs of its terminal."""

    def line(self, name: str, text: str, *, serious: bool = False) -> None:
        """Show one line of one unit, or of the supervisor (OWN_NAME), soon. Never blocks."""


class Printer:
    """Writes to `file` from a thread of its own. While the terminal takes nothing, lines beyond the queue are dropped.

    Colours are rich's decision: none where the file is no terminal or NO_COLOR is set.
    """

    def __init__(self, file: TextIO, *, names: Sequence[str], queue_lines: int = QUEUE_LINES) -> None:
        self._file = file
        # A buffered file that a thread is stuck in cannot be closed at exit; a bare descriptor has no lock.
        self._fd = _number(file)
        self._prefixes, self._serious = _prefixes(file, names)
        self._queue: deque[str] = deque()
        self._queue_lines = queue_lines
        self._dropped = 0
        self._closing = self._broken = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="printer", daemon=True)
        self._thread.start()

    def line(self, name: str, text: str, *, serious: bool = False) -> None:
        """Queue one line; it is dropped, and counted, while the queue is full."""
        before, after = self._serious if serious else ("", "")
        with self._changed:
            if self._broken or self._closing:
                return
            if len(self._queue) >= self._queue_lines:
                self._dropped += 1
                return
            self._queue.append(f"{self._prefixes.get(name, f'{name} | ')}{before}{text}{after}\n")
            self._changed.notify()

    def close(self, *, timeout_s: float = 2.0) -> bool:
        """Write what is queued and return True, or False where the terminal did not take it in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write_all(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._write(batch)
            except (OSError, ValueError):  # nobody reads any more; what is supervised goes on
                with self._changed:
                    self._broken = True
                    self._queue.clear()
                return

    def _next_batch(self) -> str | None:
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            if self._dropped:
                # In their place: all that is queued is older, and only what is taken now makes room for newer lines.
                text = f"{self._dropped} lines dropped: the terminal took none"
                self._queue.append(f"{self._prefixes[OWN_NAME]}{text}\n")
                self._dropped = 0
            if not self._queue:
                return None
            return "".join(self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_LINES)))

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._file.write(text)
            self._file.flush()
            return
        data = memoryview(text.encode(self._file.encoding or "utf-8", "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # some other program has made the terminal non-blocking
                select.select([], [self._fd], [])


def _number(file: TextIO) -> int | None:
    try:
        file.flush()
        return file.fileno()
    except (OSError, ValueError, AttributeError):  # a file in memory
        return None


def _prefixes(file: TextIO, names: Sequence[str]) -> tuple[dict[str, str], tuple[str, str]]:
    console = Console(file=file, highlight=False, soft_wrap=True)
    width = max((len(name) for name in (*names, OWN_NAME)), default=0)
    styles = {OWN_NAME: "bold"} | {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    prefixes = {name: _rendered(console, f"{name:<{width}} | ", style) for name, style in styles.items()}
    before, _, after = _rendered(console, "X", "bold red").partition("X")
    return prefixes, (before, after)


def _rendered(console: Console, text: str, style: str) -> str:
    with console.capture() as capture:
        console.print(Text(text, style=style), end="")
    return capture.get()
