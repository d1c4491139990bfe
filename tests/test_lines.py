import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lines import LineSplitter, last_line, printable


def test_a_line_is_whole_however_it_arrives() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"loa") == []
    assert splitter.feed(b"ding\nne") == ["loading"]
    assert splitter.feed(b"xt\n\n") == ["next", ""]


def test_a_character_cut_in_two_by_a_read_arrives_whole() -> None:
    splitter = LineSplitter()
    splitter.feed("é".encode()[:1])
    assert splitter.feed("é".encode()[1:] + b"\n") == ["é"]


def test_what_follows_the_last_newline_is_a_line_at_the_end_of_the_stream() -> None:
    splitter = LineSplitter()
    splitter.feed(b"one\ntwo")
    assert splitter.rest() == ["two"]
    assert splitter.rest() == []


def test_a_line_beyond_the_limit_is_cut_and_says_so() -> None:
    splitter = LineSplitter(limit_bytes=4)
    assert splitter.feed(b"abcdefg\nok\n") == ["abcd [3 bytes cut]", "ok"]


def test_a_stream_without_newlines_takes_no_more_memory_than_the_limit() -> None:
    splitter = LineSplitter(limit_bytes=1000)
    for _ in range(100):
        splitter.feed(b"x" * 1000)
    assert len(splitter._kept) == 1000
    assert splitter.feed(b"\n") == ["x" * 1000 + " [99000 bytes cut]"]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"10%\r20%\r30%\n"],
        [b"10%\r", b"20%\r", b"30%\n"],
        [b"10%", b"\r20%\r", b"30%\r\n"],
        [b"10%\r20", b"%\r30%\r\n"],
    ],
)
def test_of_a_progress_bar_only_what_stays_on_a_screen_is_shown(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    assert [line for piece in pieces for line in splitter.feed(piece)] == ["30%"]


def test_a_progress_bar_never_reaches_the_limit() -> None:
    splitter = LineSplitter(limit_bytes=10)
    for percent in range(100):
        splitter.feed(b"\r%3d%%" % percent)
    assert splitter.feed(b"\n") == [" 99%"]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("a\x1b", "a\\x1b"),
        ("a\x9b2Jb", "a\\x9b2Jb"),
        ("bell\x07", "bell\\x07"),
        ("left\u202eright", "left\\u202eright"),
        ("tab\tand\u3000space", "tab\tand\u3000space"),
        ("Ünïcode 漢字 🙂", "Ünïcode 漢字 🙂"),
        ("\x1b\x1b[0m[2J", "\\x1b[2J"),
    ],
)
def test_nothing_that_a_terminal_would_obey_is_left(raw: str, shown: str) -> None:
    assert printable(raw) == shown


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_become_bounded_lines_without_control_characters(data: bytes, limit_bytes: int) -> None:
    splitter = LineSplitter(limit_bytes=limit_bytes)
    lines = [*splitter.feed(data[:100]), *splitter.feed(data[100:]), *splitter.rest()]
    assert len(lines) <= data.count(b"\n") + 1
    for line in lines:
        assert "\n" not in line and "\x1b" not in line and "\r" not in line and "\0" not in line
        assert len(line) <= 4 * limit_bytes + len(f" [{len(data)} bytes cut]")
        line.encode()


@given(st.lists(st.text(alphabet="abc é", max_size=20), max_size=10), st.lists(st.integers(0, 120), max_size=5))
def test_how_a_stream_is_cut_into_reads_changes_nothing(lines: list[str], cuts: list[int]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    splitter, got, start = LineSplitter(), [], 0
    for cut in sorted(cuts):
        got += splitter.feed(data[start : max(start, cut)])
        start = max(start, cut)
    assert [*got, *splitter.feed(data[start:])] == lines


def test_the_last_line_is_the_last_that_says_anything() -> None:
    assert last_line(b"first\n  last \n\n \n") == "last"
    assert last_line(b"") == ""
    assert last_line(b"x" * 100_000 + b"\nend") == "end"
