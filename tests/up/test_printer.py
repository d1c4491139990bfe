import io
import os
import pty
import re
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from appliance.up.printer import Printer
from tests.up.stage import TIMEOUT_S

NAMES = ("weights@chat", "engine@chat")


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """A terminal: what it shows, and the file that a program writes to."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as file:
        yield ours, file
    os.close(ours)


def shown(*lines: tuple[str, str], file: TextIO | None = None) -> str:
    screen = file or io.StringIO()
    printer = Printer(screen, names=NAMES)
    for name, text in lines:
        printer.line(name, text)
    assert printer.close()
    return screen.getvalue() if isinstance(screen, io.StringIO) else ""


def test_each_line_has_its_units_name_and_all_begin_in_one_column() -> None:
    lines = ("weights@chat", "loading"), ("engine@chat", "serving"), ("up", "stopping"), ("verify@chat", "no")
    assert shown(*lines) == (
        "weights@chat | loading\nengine@chat  | serving\nup           | stopping\nverify@chat | no\n"
    )


def test_a_file_gets_no_colours() -> None:
    assert "\x1b" not in shown(("weights@chat", "x"), ("up", "y"))


def on_terminal(terminal: tuple[int, TextIO], *lines: tuple[str, str, bool]) -> list[str]:
    ours, file = terminal
    printer = Printer(file, names=NAMES)
    for name, text, serious in lines:
        printer.line(name, text, serious=serious)
    assert printer.close()
    return os.read(ours, 10_000).decode().splitlines()


def test_a_terminal_gets_one_colour_for_each_unit_always_the_same(
    terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    got = on_terminal(terminal, ("weights@chat", "a", False), ("engine@chat", "b", False), ("weights@chat", "c", False))
    colours = [re.findall(r"\x1b\[[0-9;]+m", line)[0] for line in got]
    assert colours[0] == colours[2] != colours[1]
    assert re.sub(r"\x1b\[[0-9;]*m", "", got[0]) == "weights@chat | a"


def test_bad_news_stands_out(terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    good, bad = on_terminal(terminal, ("up", "fine", False), ("up", "refused", True))
    assert good.endswith("fine")
    assert re.search(r"\x1b\[[0-9;]*31mrefused\x1b\[0m$", bad)


def test_no_color_is_respected(terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    (line,) = on_terminal(terminal, ("weights@chat", "a", False))
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", line)


def test_lines_of_many_threads_never_mix() -> None:
    screen = io.StringIO()
    printer = Printer(screen, names=NAMES)

    def talk(number: int) -> None:
        for _ in range(200):
            printer.line("weights@chat", str(number) * 50)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert printer.close()
    lines = screen.getvalue().splitlines()
    assert len(lines) == 1000
    assert all(re.fullmatch(r"weights@chat \| (.)\1{49}", line) for line in lines)


def test_a_reader_that_stops_reading_holds_nobody_up_and_learns_what_it_missed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        printer = Printer(file, names=NAMES, queue_lines=1000)
        started = time.monotonic()
        for number in range(20_000):
            printer.line("weights@chat", f"{number:0100}")
        assert time.monotonic() - started < TIMEOUT_S / 2
        assert not printer.close(timeout_s=0.1)
        got = b""
        with os.fdopen(reading, "rb") as reader:
            deadline = time.monotonic() + TIMEOUT_S
            while b"lines dropped" not in got and time.monotonic() < deadline:
                got += reader.read1(1 << 16)
            assert printer.close(timeout_s=TIMEOUT_S)
            file.close()
            got += reader.read()
    lines = got.decode().splitlines()
    dropped = [int(found[1]) for line in lines if (found := re.search(r"(\d+) lines dropped", line))]
    kept = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("weights@chat")]
    assert kept == sorted(kept)
    assert len(kept) + sum(dropped) == 20_000


def test_what_was_dropped_is_told_in_its_place() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file, os.fdopen(reading, "rb") as reader:
        printer = Printer(file, names=NAMES, queue_lines=1000)
        for number in range(20_000):
            printer.line("weights@chat", f"{number:0100}")
        got = reader.read1(1 << 16)
        while b"after" not in got:  # as soon as there is room again
            printer.line("weights@chat", "after")
            got += reader.read1(1 << 16)
        assert printer.close(timeout_s=TIMEOUT_S)
    lines = got.decode().splitlines()
    assert "lines dropped" in lines[lines.index("weights@chat | after") - 1]


def test_where_nobody_reads_any_more_lines_go_nowhere_and_nothing_fails() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        printer = Printer(file, names=NAMES)
        for _ in range(1000):
            printer.line("weights@chat", "x")
        assert printer.close(timeout_s=TIMEOUT_S)


def test_what_the_terminals_encoding_lacks_is_spelled_out() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="ascii") as file:
        shown(("weights@chat", "é🙂"), file=file)
    with os.fdopen(reading, "rb") as reader:
        assert reader.read() == b"weights@chat | \\xe9\\U0001f642\n"


def test_a_terminal_that_others_made_non_blocking_gets_everything() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(writing, "w") as file, os.fdopen(reading, "rb") as reader:
        printer = Printer(file, names=NAMES)
        for number in range(3000):
            printer.line("weights@chat", f"{number:0100}")
        got = b""
        while got.count(b"\n") < 3000:
            got += reader.read1(1 << 16)
        assert printer.close(timeout_s=TIMEOUT_S)
    assert [int(line.rpartition(b" ")[2]) for line in got.splitlines()] == list(range(3000))
