"""Fingerprints: equal ones, and only those, may attach, and every difference is named with both values."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import PeerError
from appliance.fingerprint import ABSENT, MAX_FACTS, MAX_NAME_CHARS, MAX_VALUE_CHARS, Difference, Fingerprint

_FACTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), st.text("xyz", max_size=2), max_size=5)


@given(_FACTS)
def test_a_fingerprint_comes_back_from_json_as_it_was(facts: dict[str, str]) -> None:
    assert Fingerprint.from_json(Fingerprint.of(facts).to_json()) == Fingerprint.of(facts)


@given(_FACTS, _FACTS)
def test_no_difference_means_equal_and_only_that(one: dict[str, str], other: dict[str, str]) -> None:
    differences = Fingerprint.of(one).differences(Fingerprint.of(other))
    assert (not differences) == (one == other)
    assert {difference.name for difference in differences} == {
        name for name in one.keys() | other.keys() if one.get(name) != other.get(name)
    }


@given(_FACTS, _FACTS)
def test_differences_seen_from_the_other_side_are_the_same_facts(one: dict[str, str], other: dict[str, str]) -> None:
    there = Fingerprint.of(one).differences(Fingerprint.of(other))
    back = Fingerprint.of(other).differences(Fingerprint.of(one))
    assert [(item.name, item.held, item.wanted) for item in there] == [
        (item.name, item.wanted, item.held) for item in back
    ]


@given(_FACTS, _FACTS)
def test_a_fingerprint_that_holds_all_of_a_target_does_not_violate_it(
    target: dict[str, str], more: dict[str, str]
) -> None:
    assert Fingerprint.of(target).violations(Fingerprint.of(more | target)) == ()


@given(_FACTS, _FACTS)
def test_every_fact_of_a_target_that_is_missing_or_different_violates_it(
    target: dict[str, str], facts: dict[str, str]
) -> None:
    violated = {item.name for item in Fingerprint.of(target).violations(Fingerprint.of(facts))}
    assert violated == {name for name, value in target.items() if facts.get(name) != value}


def test_a_difference_names_the_fact_and_both_values() -> None:
    wanted, held = Fingerprint.of({"dtype": "bfloat16", "rank": 1}), Fingerprint.of({"dtype": "float16"})
    assert wanted.differences(held) == (
        Difference("dtype", "bfloat16", "float16"),
        Difference("rank", "1", ABSENT),
    )
    assert str(wanted.differences(held)[0]) == "dtype: wanted bfloat16, held float16"


def test_the_order_in_which_facts_come_is_no_difference() -> None:
    assert Fingerprint.of({"a": 1, "b": 2}) == Fingerprint.of({"b": 2, "a": 1})


def test_the_root_digest_is_a_fact_like_any_other() -> None:
    assert Fingerprint.of({"root_digest": "ab"}).root_digest == "ab"
    assert Fingerprint.of({}).root_digest == ABSENT


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.text(max_size=3000) | st.integers(), max_size=4))
def test_facts_of_any_text_can_be_sent_to_a_keeper(facts: dict[str, object]) -> None:
    fingerprint = Fingerprint.of(facts)
    assert Fingerprint.from_json(fingerprint.to_json()) == fingerprint


@pytest.mark.parametrize(("one", "other"), [("a\nb", "a b"), ("x" * 3000, "x" * 2999 + "y"), ("\ud800", "\ud801")])
def test_values_that_cannot_be_shown_still_differ_where_they_differed(one: str, other: str) -> None:
    assert Fingerprint.of({"a": one}).differences(Fingerprint.of({"a": other}))


REFUSED: dict[str, Any] = {
    "a list": [],
    "nothing": None,
    "text": "a",
    "a number as value": {"a": 1},
    "a nested value": {"a": {"b": "c"}},
    "no value": {"a": None},
    "an empty name": {"": "a"},
    "an endless name": {"a" * (MAX_NAME_CHARS + 1): "b"},
    "an endless value": {"a": "b" * (MAX_VALUE_CHARS + 1)},
    "two lines": {"a": "b\nc"},
    "a name of two lines": {"a\nb": "c"},
    "a terminal sequence": {"a": "\x1b[2J"},
    "NUL": {"a": "\0"},
    "half a surrogate pair": {"a": "\ud800"},
    "a name that is half a surrogate pair": {"\ud800": "a"},
    "too many facts": {str(number): "" for number in range(MAX_FACTS + 1)},
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_printed_is_refused(data: Any) -> None:
    with pytest.raises(PeerError, match="fingerprint") as caught:
        Fingerprint.from_json(data)
    assert str(caught.value).isprintable()
