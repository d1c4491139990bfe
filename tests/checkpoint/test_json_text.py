"""Strict JSON: what is an object, and that everything else is one domain error."""

import contextlib
import json
import random

import pytest

from appliance.checkpoint.json_text import parse_object
from appliance.errors import ConfigError, TrustError

GOOD = b'{"a": [1, 2.5, {"b": null, "caf\\u00e9": "\\ud83d\\ude00"}], "c": true}'


def test_an_object_is_returned_as_json_reads_it() -> None:
    assert parse_object(GOOD, what="it", limit_bytes=1000) == json.loads(GOOD)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "a": 1}', "'a' appears twice"),
        (b'{"a": [{"b": 1, "c": 2, "b": 3}]}', "'b' appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1} x', "Extra data"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": "\xff"}', "codec can't decode"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b'{"\\udc00": 1}', "surrogates"),
        (b'{"a": "\x00"}', "control character"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        ("{}".encode("utf-16"), "not valid JSON"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_anything_else_is_one_error_that_says_what(text: bytes, reason: str) -> None:
    with pytest.raises(TrustError, match=f"it: .*{reason}"):
        parse_object(text, what="it", limit_bytes=10**7)
    with pytest.raises(ConfigError, match=reason):
        parse_object(text, what="it", limit_bytes=10**7, error=ConfigError)


def test_the_size_is_checked_before_the_text() -> None:
    with pytest.raises(TrustError, match="more than the 5 allowed"):
        parse_object(b"[[[[[[", what="it", limit_bytes=5)


def test_damaged_text_is_an_object_or_the_error_and_nothing_else() -> None:
    randomness = random.Random(1)
    for _ in range(3000):
        text = bytearray(GOOD)
        for _ in range(randomness.randint(1, 4)):
            text[randomness.randrange(len(text))] = randomness.randrange(256)
        with contextlib.suppress(TrustError):
            assert isinstance(parse_object(bytes(text), what="it", limit_bytes=1000), dict)
