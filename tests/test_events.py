"""One line for each thing that happens, whatever other processes put into it and whoever reads it."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import events
from appliance.events import WARNING, event


def test_a_line_has_the_text_and_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    event("lease ended: engine", model="chat", pid=7, reason=None, detail="")
    assert capsys.readouterr().err == "lease ended: engine model=chat pid=7\n"


def test_a_value_with_spaces_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    event("it", why="two words")
    assert capsys.readouterr().err == 'it why="two words"\n'


def test_many_lines_become_one(capsys: pytest.CaptureFixture[str]) -> None:
    event("one\n  hint: two\r\nthree", field="a\nb")
    assert capsys.readouterr().err == 'one hint: two three field="a b"\n'


@given(st.text(), st.text())
def test_nothing_that_a_terminal_obeys_is_shown(text: str, value: str) -> None:
    line = events._one_line(text) + events._shown(value)
    assert all(c.isprintable() or c == " " for c in line)


def test_a_log_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stderr", broken)
    event("nobody hears this")
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        broken.close()


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Give a socket in journald's place, and a standard error that is known to be journald's."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        path = str(Path(folder) / "socket")
        listening.bind(path)
        listening.settimeout(10)
        status = os.fstat(2)
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        monkeypatch.setattr(events, "JOURNAL_SOCKET", path)
        yield listening


def test_the_journal_gets_fields(journal: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    event("attach by engine: refused", priority=WARNING, verdict="refused", reason="file_differs", detail=None)
    assert journal.recv(10_000).decode().splitlines() == [
        "MESSAGE=attach by engine: refused",
        "PRIORITY=4",
        "SYSLOG_IDENTIFIER=appliance",
        "VERDICT=refused",
        "REASON=file_differs",
    ]
    assert capsys.readouterr().err == ""


def test_no_value_makes_a_field_of_its_own(journal: socket.socket) -> None:
    event("it\nPRIORITY=0", client="a\nVERDICT=hit", other="\ud800")
    assert journal.recv(10_000).decode().splitlines() == [
        "MESSAGE=it PRIORITY=0",
        "PRIORITY=6",
        "SYSLOG_IDENTIFIER=appliance",
        "CLIENT=a VERDICT=hit",
        "OTHER=\\ud800",
    ]


def test_what_the_journal_cannot_take_goes_to_standard_error(
    journal: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    event("x" * 1_000_000)
    assert len(capsys.readouterr().err) == 1_000_001
    journal.close()
    event("the journal restarts")
    assert capsys.readouterr().err == "the journal restarts\n"


def test_a_standard_error_that_is_not_the_journal_is_written_to(
    journal: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:1")
    event("here")
    assert capsys.readouterr().err == "here\n"
