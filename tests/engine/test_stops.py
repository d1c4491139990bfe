"""Stop strings in text that arrives in pieces: found wherever the pieces break, and never shown in part."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.stops import StopScanner

few_letters = st.text(alphabet="abé🙂", max_size=12)
stop_strings = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(few_letters, max_size=12), stops=stop_strings)
def test_what_is_shown_is_the_text_up_to_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    shown, found = scan(pieces, stops)
    text = "".join(pieces)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    # Pieces may complete a late stop string before an earlier, longer one: what counts is what was there by then.
    if not ends:
        assert (shown, found) == (text, False)
    else:
        assert found
        assert text.startswith(shown)
        assert len(shown) >= min(ends)
        assert not any(stop in shown for stop in stops)


@given(pieces=st.lists(few_letters, max_size=12), stop=st.text(alphabet="abé🙂", min_size=1, max_size=5))
def test_with_one_stop_string_it_does_not_matter_where_the_pieces_break(pieces: list[str], stop: str) -> None:
    assert scan(pieces, [stop]) == scan(list("".join(pieces)), [stop])
    assert scan(pieces, [stop])[0] == "".join(pieces).split(stop, maxsplit=1)[0]


@pytest.mark.parametrize("pieces", [["END"], ["E", "N", "D"], ["xE", "ND"], ["EN", "EN", "D"]])
def test_no_part_of_a_stop_string_is_shown_before_it_is_complete(pieces: list[str]) -> None:
    scanner = StopScanner(["END"])
    shown = ""
    for piece in pieces:
        shown += scanner.push(piece)
        assert "".join(pieces).split("END")[0].startswith(shown)
    assert scanner.found
    assert scanner.push("more") == scanner.finish() == ""


def test_what_only_looked_like_a_stop_string_is_shown_once_it_is_none() -> None:
    scanner = StopScanner(["</done>", "STOP"])
    assert [scanner.push("a</do"), scanner.push("g>"), scanner.push("ST")] == ["a", "</dog>", ""]
    assert scanner.finish() == "ST"
    assert not scanner.found


def test_without_stop_strings_text_passes_at_once() -> None:
    scanner = StopScanner(())
    assert scanner.push("anything") == "anything"
    assert scanner.finish() == ""


def scan(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    shown = "".join([scanner.push(piece) for piece in pieces])
    return shown + scanner.finish(), scanner.found
