"""Durations and sizes: what is read, what is refused, and that what is shown reads back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.quantities import (
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    format_duration,
    format_phases,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        (" 2d ", 172800),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("1m250ms", 60.25),
        ("90", 90),
        ("0", 0),
        ("0.5", 0.5),
        (90, 90),
        (2.5, 2.5),
        (0, 0),
        ("366d", MAX_DURATION_S),
    ],
)
def test_a_duration_is_read_as_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "s",
        "5 5",
        "5 minutes",
        "5min",
        "5M",
        "5S",
        "1m1h",
        "5m5m",
        "1h30",
        "-5s",
        "+5s",
        "1e3s",
        "1,5s",
        "5s,",
        "\u0665s",
        "1" * 30,
        "1" * 30 + "s",
        "0x10",
        "1:30",
        "5mss",
        "ms",
        "1.s",
        ".5s",
        "nan",
        "inf",
    ],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no duration") as caught:
        parse_duration(text)
    assert caught.value.hint is not None and "90s" in caught.value.hint


@pytest.mark.parametrize("value", [-1, -0.5, MAX_DURATION_S + 1, "367d", math.nan, math.inf, -math.inf, 10**400])
def test_a_duration_below_zero_or_over_a_year_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 366 days"):
        parse_duration(value)


@pytest.mark.parametrize("value", [True, None, b"5s", [5]])
def test_a_duration_is_text_or_a_number(value: object) -> None:
    with pytest.raises(ConfigError, match="no duration"):
        parse_duration(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.00825, "8.25ms"),
        (0.0000012, "0.0012ms"),
        (0.25, "250ms"),
        (0.9994, "999ms"),
        (0.9996, "1s"),
        (1, "1s"),
        (4.2, "4.2s"),
        (4.256, "4.26s"),
        (59.94, "59.9s"),
        (59.96, "1m"),
        (60, "1m"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (3600.4, "1h"),
        (90061, "1d1h1m1s"),
    ],
)
def test_a_duration_is_shown_with_three_digits_or_whole_seconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=1e-6, max_value=MAX_DURATION_S))
def test_a_shown_duration_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.01, abs=1e-8)


@given(st.integers(min_value=60, max_value=MAX_DURATION_S))
def test_whole_seconds_above_a_minute_read_back_exactly(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_what_is_no_duration_is_not_shown_as_one(seconds: float) -> None:
    with pytest.raises(ValueError, match="no duration"):
        format_duration(seconds)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4 GiB", 4 << 30),
        ("4GiB", 4 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5 KiB", 1536),
        ("10GB", 10**10),
        ("10 kB", 10_000),
        ("3 TB", 3 * 10**12),
        ("1 PiB", 1 << 50),
        ("100 B", 100),
        ("100", 100),
        ("0", 0),
        (4096, 4096),
        (MAX_SIZE_BYTES, MAX_SIZE_BYTES),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read_as_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4G", "write 4 GiB (1024) or 4 GB (1000)"),
        ("4 k", "write 4 KiB (1024) or 4 kB (1000)"),
        ("4 m", "write 4 MiB (1024) or 4 MB (1000)"),
        ("4 gib", "write 4 GiB (1024) or 4 GB (1000)"),
        ("4 bananas", None),
    ],
)
def test_an_ambiguous_or_unknown_unit_is_refused(text: str, hint: str | None) -> None:
    with pytest.raises(ConfigError, match="unknown unit") as caught:
        parse_size(text)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "value", ["", "GiB", "-4 GiB", "4 GiB GiB", "1e3", "0x10", "\u0664 GiB", True, None, 4.0, "1" * 40]
)
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1.5", "1.5 B", -1, MAX_SIZE_BYTES + 1, "9999999 PiB"])
def test_a_size_is_a_whole_number_of_bytes_that_a_file_can_have(value: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_size(value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1025, "1.0 KiB"),
        (1048575, "1.0 MiB"),
        (4 << 30, "4 GiB"),
        (13_207_024_435, "12.3 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_it_fills(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=MAX_SIZE_BYTES // 2))
def test_a_shown_size_never_reads_1024_of_a_unit_that_has_a_next(size_bytes: int) -> None:
    number, unit = format_size(size_bytes).split(" ")
    assert float(number) < 1024 or unit == "PiB"
    assert parse_size(f"{number} {unit.replace('bytes', 'B')}") == pytest.approx(size_bytes, rel=0.06)


@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_whatever_is_read_is_a_quantity_or_a_config_error(value: str | float) -> None:
    for parse in (parse_duration, parse_size):
        try:
            assert parse(value) >= 0  # type: ignore[arg-type]
        except ConfigError as error:
            assert "\n" not in error.message and len(error.message) < 200


def test_phases_are_shown_in_their_order_to_the_millisecond() -> None:
    assert format_phases({"wait": 0.0, "check": 0.0126, "bind": 12.5}) == "wait 0.000 s, check 0.013 s, bind 12.500 s"
    assert format_phases({}) == ""
