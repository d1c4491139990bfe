"""YAML as plain data with places; and whatever the bytes are, a document or a ManifestError."""

import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import ConfigError, Place
from appliance.manifest.document import MAX_BYTES, MAX_DEPTH, Document, parse_document
from appliance.manifest.load import read_manifest
from appliance.manifest.problem import MAX_SHOWN, ManifestError
from appliance.manifest.validation import validated

CASES = [path.read_bytes() for path in sorted((Path(__file__).parents[1] / "cases" / "manifest").glob("*.yaml"))]
LOADERS = [yaml.CSafeLoader, yaml.SafeLoader]
# What the grammar is made of, and what has a meaning of its own in one version of YAML or another.
WORDS = r"""{ } [ ] , : ? - & * ! | > ' " % @ ` # ~ << = \ & &a *a !!str !!int !!python/name:os.system !x --- ...
    010 0o10 0x1F 1:30 1_000 .inf .nan -.inf 1e5 1.5 +1 -0 0 yes no on off true null 2026-01-31 \0 \ud800 \UFFFFFFFF
    \x8 %YAML %TAG models: chat: checkpoint: engine: port: gpus: trust: wait: environment: args: {} [] 8001 /srv/chat
    vllm GPU-0a1b2c3d-0000-1111-2222-333344445555"""
BLANKS = ["\n", "\n  ", "\n    ", " ", "\t", "\0", "\r", "\x85", "\ufeff", "\u2028", "x"]
# Each of the many right models is looked at with each of the many wrong ones in mind.
HALF_RIGHT = "models:\n" + "".join(
    f" r{n}: {{checkpoint: /x, engine: {{port: {n + 1}}}}}\n w{n}: {{checkpont: /x}}\n" for n in range(12_000)
)
PIECES = [*re.split(r"\s+", WORDS), *BLANKS]


@pytest.mark.parametrize("loader", LOADERS)
def test_a_setting_stands_where_its_key_and_its_value_begin(loader: type) -> None:
    document = parse_document(
        b"models:\n  chat: {port: 8001}\nkeys:\n  - one\n  - two\nnone:\n", file="F", loader=loader
    )
    assert document.data == {"models": {"chat": {"port": 8001}}, "keys": ["one", "two"], "none": None}
    places = {path: (_short(at.key), _short(at.value), at.text) for path, at in document.settings.items()}
    assert places == {
        (): ((1, 1), (1, 1), None),
        ("models",): ((1, 1), (1, 1), None),
        ("models", "chat"): ((2, 3), (2, 9), None),
        ("models", "chat", "port"): ((2, 10), (2, 16), "8001"),
        ("keys",): ((3, 1), (3, 1), None),
        ("keys", 0): ((4, 5), (4, 5), "one"),
        ("keys", 1): ((5, 5), (5, 5), "two"),
        ("none",): ((6, 1), (6, 1), ""),
    }


def test_a_column_counts_characters_not_bytes() -> None:
    document = parse_document("a: {'ü😀': 1, b: 2}\n".encode(), file="F")
    assert _short(document.settings["a", "b"].value) == (1, 17)


def test_a_setting_left_out_stands_at_the_group_around_it() -> None:
    document = parse_document(b"models:\n  chat:\n    mode: copy\n", file="F")
    missing = ("models", "chat", "engine", "port")
    assert document.key_place(missing) == document.value_place(missing) == Place("F", 2, 3)
    assert document.value_place(("nothing",)) == Place("F", 1, 1)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_scalar_is_what_it_looks_like(loader: type) -> None:
    words = {
        "null": None, "~": None, "true": True, "No": False, "0": 0, "-7": -7, "1.5": 1.5, "text": "text", "=": "=",
        "2026-01-31": "2026-01-31", "12:30": None, '"010"': "010", "'yes'": "yes", "1.2.3": "1.2.3", "0-3": "0-3",
        "y": "y", "+5": 5, ".5": 0.5, "1.0e+3": 1000.0, "127.0.0.1": "127.0.0.1", "1.0e+999": "1.0e+999", "a:b": "a:b",
        "1:5": None,
    }  # fmt: skip
    text = "".join(f"k{index}: {word}\n" for index, word in enumerate(words))
    document = parse_document(text.encode(), file="F", loader=loader)
    del words["1.0e+999"]
    data = document.data
    assert isinstance(data, dict)
    assert [problem.path for problem in document.problems] == [("k10",), ("k20",), ("k22",)]
    assert data.pop("k20") is None
    assert list(data.values()) == list(words.values())
    assert [type(value) for value in data.values()] == [type(value) for value in words.values()]


def test_the_largest_file_is_read_and_a_larger_one_is_not() -> None:
    line = b"# " + b"x" * 61 + b"\n"
    largest = line * (MAX_BYTES // len(line))
    assert parse_document(largest, file="F").data is None
    with pytest.raises(ManifestError, match="larger than 1 MiB"):
        parse_document(largest + b"#" * 64, file="F")


@pytest.mark.parametrize("loader", LOADERS)
def test_the_deepest_nesting_is_read_and_a_deeper_one_is_not(loader: type) -> None:
    assert parse_document(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, file="F", loader=loader).data
    for text in (b"[" * (MAX_DEPTH + 2), b"- " * 200_000, b"{a: " * 200_000, b"? " * 200_000, b"[" * MAX_BYTES):
        with pytest.raises(ManifestError, match="nest"):
            parse_document(text, file="F", loader=loader)


@pytest.mark.parametrize("loader", LOADERS)
def test_an_expansion_bomb_is_not_expanded(loader: type) -> None:
    lines = ["l0: &l0 [x, x]", *(f"l{n}: &l{n} [*l{n - 1}, *l{n - 1}, *l{n - 1}]" for n in range(1, 20))]
    document = parse_document("\n".join(lines).encode(), file="F", loader=loader)
    assert isinstance(document.data, dict)
    assert document.data["l19"] == [None] * 3
    assert len(document.problems) == 20 + 3 * 19


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("line", ["*a,", "&a b,", "!!x y,", "? [x], ", "010,", "1: 2,", "<<: 3,"])
def test_problems_without_end_end_early(line: str, loader: type) -> None:
    # It would be a document: closed, and with its problems in a list.
    first, last = "{}" if ":" in line or "?" in line else "[]"
    with pytest.raises(ManifestError) as caught:
        parse_document((first + line * (MAX_BYTES // 16) + last).encode(), file="F", loader=loader)
    assert len(caught.value.problems) == MAX_SHOWN
    assert str(caught.value).endswith(f"and more; these are the first {MAX_SHOWN}")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "text",
    [
        b'a: "\\UFFFFFFFF"', b'a: "\\xZZ"', b"%YAML 9" + b"9" * 5000 + b".0\n---\na: 1", b"%YAML 2.0\n---\na: 1",
        b"%", b"&", b"*", b"!", b"a: |9999\n x", b"a: !<", b"---\n--- !", b"? ", b"- - - ? :", b'"', b"'", b"{,}",
        b"a: >0\n x", b"\xff\xfe", b"!<tag:\xc3\xbc%zz> x", b"%TAG ! tag:%ff%ff,2000:\n--- !a b",
        b"a: " + b"9" * 5000, b"a: ." + b"9" * 9000,
    ],
)  # fmt: skip
def test_a_known_trap_is_a_manifest_error_or_a_problem(text: bytes, loader: type) -> None:
    try:
        document = parse_document(text, file="F", loader=loader)
    except ManifestError as error:
        assert error.problems
    else:
        assert document.problems or document.data is None or loader is yaml.SafeLoader


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_random_bytes_are_a_document_or_a_manifest_error(source: bytes) -> None:
    _both(source)


@settings(max_examples=700, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_random_grammar_is_a_manifest_or_a_config_error(text: str) -> None:
    _both(text.encode("utf-8", "replace"))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_a_damaged_manifest_is_a_manifest_or_a_config_error(source: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(source)))
    end = data.draw(st.integers(start, min(len(source), start + 20)))
    piece = data.draw(st.one_of(st.binary(max_size=8), st.sampled_from(PIECES).map(str.encode)))
    _both(source[:start] + piece + source[end:])


@pytest.mark.parametrize(
    "text",
    [
        "{a: " * 20, "- " * 20, "x" * MAX_BYTES, "a: " + "9" * (MAX_BYTES - 4), "'" + "''" * (MAX_BYTES // 4),
        "- x\n" * 60_000, "".join(f"k{n}: 1\n" for n in range(60_000)), "# x\n" * 200_000,
        "[" + "x," * 100_000 + "]", "a: >\n" + " x\n" * 200_000, "{" + "a: {}, " * 60_000 + "}",
        '"' + "\\x41" * 200_000 + '"', HALF_RIGHT, "models: {" + ", ".join(f"m{n}: " for n in range(60_000)) + "}",
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_the_worst_megabyte_takes_no_more_than_seconds(text: str, tmp_path: Path) -> None:
    path = tmp_path / "appliance.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read_manifest(path)
    assert time.process_time() - began < 5
    assert len(str(caught.value)) < 100_000


def _both(source: bytes) -> None:
    """Read with both parsers: neither raises anything but ManifestError, and what both read is the same."""
    outcomes = [_outcome(source, loader) for loader in LOADERS]
    read = [outcome for outcome in outcomes if isinstance(outcome, Document)]
    if len(read) == 2:
        assert read[0].data == read[1].data
        assert read[0].settings == read[1].settings
        assert read[0].problems == read[1].problems


def _outcome(source: bytes, loader: type) -> Document | None:
    lines = source.decode("utf-8", "replace").removeprefix("\ufeff").split("\n")
    try:
        document = parse_document(source, file="F", loader=loader)
    except ConfigError as error:
        assert isinstance(error, ManifestError)
        _assert_inside(error, lines)
        return None
    try:
        validated(document, folder=Path("/etc/appliance"))
    except ConfigError as error:
        assert isinstance(error, ManifestError)
        _assert_inside(error, lines)
    return document


def _assert_inside(error: ManifestError, lines: list[str]) -> None:
    assert error.problems
    for problem in error.problems:
        assert 1 <= problem.place.line <= len(lines), problem
        assert 1 <= problem.place.column <= len(lines[problem.place.line - 1]) + 1, problem
        assert len(str(problem).split("\n")) == (1 if problem.hint is None else 2)
        assert str(problem).isprintable() or "\n" in str(problem)
        assert len(str(problem)) < 2000


def _short(place: Place) -> tuple[int, int]:
    return place.line, place.column
