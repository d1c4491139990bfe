"""Layouts: what is written is read again, and nothing that is read leads outside of a slab."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import layout as layouts
from appliance.errors import PeerError
from appliance.layout import ITEM_BYTES, Key, Layout, Region, TensorEntry, TensorSpec, decode, shown

SLAB_BYTES = 1 << 16


def _spec(**changes: Any) -> TensorSpec:
    facts: dict[str, Any] = {
        "type_name": "torch.nn.parameter.Parameter",
        "dtype": "bfloat16",
        "shape": (2, 3),
        "stride": (3, 1),
        "requires_grad": False,
        "conjugated": False,
        "negated": False,
        "on_host": False,
    }
    return TensorSpec(**{**facts, **changes})


def _layout() -> Layout:
    regions = (
        Region(0, 0, 600, True),
        Region(0, 1024, 12, False),
        Region(1, 512, SLAB_BYTES - 512, True),
    )
    entries = (
        TensorEntry(("layers", "0", "weight"), "parameter", True, _spec(), 0, 0, None),
        TensorEntry(("layers", "1", "weight"), "parameter", True, _spec(), 0, 0, 0),
        TensorEntry(("scale",), "buffer", False, _spec(type_name="torch.Tensor", on_host=True), 1, 0, None),
        TensorEntry(("cache", Key("k"), 0, Key(-3)), "attribute", False, _spec(dtype="int8"), 2, 40, None),
        TensorEntry(("empty",), "buffer", True, _spec(shape=(0, 3), conjugated=True), None, 0, None),
        TensorEntry(("odd", Key("")), "attribute", False, _spec(shape=(), stride=(), requires_grad=True), 2, 2, None),
    )
    return Layout((SLAB_BYTES, SLAB_BYTES), regions, entries)


def _document() -> Any:
    return json.loads(_layout().encode())


def _refused(document: Any, match: str = "") -> None:
    with pytest.raises(PeerError, match=match):
        decode(json.dumps(document).encode())


def _columns(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def test_what_is_written_is_read_again() -> None:
    layout = _layout()
    assert decode(layout.encode()) == layout


def test_an_empty_shard_has_a_layout() -> None:
    assert decode(Layout((), (), ()).encode()) == Layout((), (), ())


def test_equal_layouts_are_the_same_bytes() -> None:
    assert _layout().encode() == _layout().encode()


def test_a_path_tells_names_indices_and_keys_apart() -> None:
    paths: list[layouts.Path] = [("a", "0"), ("a", 0), ("a", Key(0)), ("a", Key("0"))]
    entries = tuple(TensorEntry(path, "attribute", False, _spec(), 0, 0, None) for path in paths)
    layout = Layout((SLAB_BYTES,), (Region(0, 0, 600, True),), entries)
    assert [entry.path for entry in decode(layout.encode()).entries] == paths


def test_a_name_may_have_dots_and_be_empty_or_long() -> None:
    long = ["n" * 1024] * 64
    paths: list[layouts.Path] = [("a", "b"), ("a.b",), ("a", "", "b"), ("",), ("", ""), (".",), tuple(long)]
    entries = tuple(TensorEntry(path, "attribute", False, _spec(), 0, 0, None) for path in paths)
    layout = Layout((SLAB_BYTES,), (Region(0, 0, 600, True),), entries)
    assert [entry.path for entry in decode(layout.encode()).entries] == paths


def test_a_path_is_shown_as_python_writes_it() -> None:
    assert shown(("layers", "0", "scales", Key("k"), 1, Key(2), "weight")) == "layers.0.scales['k'][1][2].weight"


def test_an_entry_that_is_an_alias_says_what_the_first_says() -> None:
    entry = decode(_layout().encode()).entries[1]
    assert (entry.alias, entry.spec, entry.region, entry.offset_bytes) == (0, _spec(), 0, 0)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_a_tensor_may_fill_its_region_to_the_last_byte_and_no_further(dtype: str) -> None:
    item_bytes = ITEM_BYTES[dtype]
    document = _document()
    document["regions"] = [[0], [0], [7 * item_bytes], [True]]
    document["specs"] = [["torch.Tensor", dtype, [2, 3], [4, 1], 0]]  # reaches to the seventh element
    document["entries"] = [["t"], [2], [False], [0], [0], [0], [None]]
    decode(json.dumps(document).encode())
    for change in (
        {"specs": [["torch.Tensor", dtype, [2, 3], [5, 1], 0]]},
        {"entries": [["t"], [2], [False], [0], [0], [item_bytes], [None]]},
    ):
        _refused({**document, **change}, "outside of its region")


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("v", 1, "version"),
        ("v", None, "version"),
        ("extra", 1, "not an object with"),
        ("slabs", [0], "sizes"),
        ("slabs", [-1], "sizes"),
        ("slabs", [1.0], "sizes"),
        ("slabs", [True], "sizes"),
        ("slabs", [2**62 + 1], "sizes"),
        ("slabs", [4096] * 201, "sizes"),
        ("slabs", {}, "sizes"),
        ("specs", {}, "not a list"),
        ("specs", [[]] * 100_001, "not a list"),
        ("specs", [[]], "five fields"),
        ("specs", [[1, "int8", [], [], 0]], "type"),
        ("specs", [["\x00", "int8", [], [], 0]], "type"),
        ("specs", [["t", "int9", [], [], 0]], "unknown dtype"),
        ("specs", [["t", ["int8"], [], [], 0]], "unknown dtype"),
        ("specs", [["t", "qint8", [], [], 0]], "unknown dtype"),
        ("specs", [["t", "int8", [1], [], 0]], "one length"),
        ("specs", [["t", "int8", [1] * 65, [1] * 65, 0]], "one length"),
        ("specs", [["t", "int8", [-1], [1], 0]], "not a size"),
        ("specs", [["t", "int8", [1], [-1], 0]], "not a size"),
        ("specs", [["t", "int8", [1], [1.0], 0]], "not a size"),
        ("specs", [["t", "int8", [True], [1], 0]], "not a size"),
        ("specs", [["t", "int8", [2**40, 2**40], [0, 0], 0]], "larger than any memory"),
        ("specs", [["t", "int8", [0, 2**62, 2], [0, 0, 0], 0]], "larger than any memory"),
        ("specs", [["t", "int8", [2, 0], [2**62, 1], 0]], "larger than any memory"),
        ("specs", [["t", "int8", [], [], 16]], "flags"),
        ("specs", [["t", "int8", [], [], True]], "flags"),
    ],
)  # fmt: skip
def test_a_lie_is_refused(where: str, value: Any, match: str) -> None:
    _refused({**_document(), where: value}, match)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([(2, 0, 1, True)], "no such slab"),
        ([(0, 8, 1, True)], "unaligned"),
        ([(0, 0, 0, True)], "empty"),
        ([(0, 0, SLAB_BYTES + 1, True)], "outside of its slab"),
        ([(0, 512, SLAB_BYTES - 511, True)], "outside of its slab"),
        ([(0, 2**62 - 512, 1, True)], "outside of its slab"),
        ([(0, 0, 513, True), (0, 512, 1, True)], "region 1: overlaps"),
        ([(0, 0, 513, True), (1, 0, 1, True), (0, 1024, 1, True)], "region 2: .*out of order"),
    ],
)
def test_a_region_that_cannot_be_is_refused(rows: list[tuple[Any, ...]], match: str) -> None:
    _refused({**_document(), "regions": _columns(rows)}, match)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([([], 2, True, 0, 0, 0, None)], "one to 64 steps"),
        ([(["t"] * 65, 2, True, 0, 0, 0, None)], "one to 64 steps"),
        ([(".".join("t" * 65), 2, True, 0, 0, 0, None)], "one to 64 steps"),
        ([("a\nb", 2, True, 0, 0, 0, None)], "step is neither"),
        ([("\ud800", 2, True, 0, 0, 0, None)], "step is neither"),
        ([("a." + "b" * 1025, 2, True, 0, 0, 0, None)], "step is neither"),
        ([(["a", "b" * 1025], 2, True, 0, 0, 0, None)], "step is neither"),
        ([(["a\nb"], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([None], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([-1], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([1.5], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([True], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([[]], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([[1, 2]], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([[None]], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([[2**63]], 2, True, 0, 0, 0, None)], "step is neither"),
        ([([5], 0, True, 0, 0, 0, None)], "without a name"),
        ([(["m", ["t"]], 1, True, 0, 0, 0, None)], "without a name"),
        ([("t", 0, True, 0, None, 0, None)], "no region"),
        ([("t", 0, True, 0, None, 2, None)], "no region"),
        ([("t", 0, True, 3, None, 2, None)], "no region"),
        ([("t", 0, True, 3, 0, 0, None)], "nothing to find"),
        ([("t", 0, True, 0, 0, 1, None)], "multiple"),
        ([("t", 0, True, 0, 0, 590, None)], "outside of its region"),
        ([("t", 0, True, 0, 1, 2, None)], "outside of its region"),
        ([("t", 0, True, 0, 0, 2**62 - 2, None)], "outside of its region"),
        ([("t", 0, True, 0, 0, 0, 0)], "alias"),
        ([("t", 0, True, 0, 0, 0, 1), ("u", 0, True, 0, 0, 0, None)], "entry 0: its alias"),
        ([("t", 0, True, 0, 0, 0, None), ("u", 0, True, 0, 0, 0, 1)], "entry 1: its alias"),
        ([("t", 0, True, 0, 0, 0, None), ("u", 0, True, 0, 0, 0, 0), ("v", 0, True, 0, 0, 0, 1)], "entry 2: its alias"),
        ([("t", 0, True, 0, 0, 0, None), ("u", 0, True, 4, 0, 0, 0)], "entry 1: .* elsewhere"),
        ([("t", 0, True, 0, 0, 0, None), ("u", 0, True, 0, 2, 0, 0)], "entry 1: .* elsewhere"),
        ([("t", 0, True, 0, 0, 0, None), ("u", 0, True, 0, 0, 2, 0)], "entry 1: .* elsewhere"),
        ([("t", 0, True, 0, 0, 0, None), ("t", 2, False, 0, 0, 0, 0)], "same path twice"),
        ([("t", 0, True, 0, 0, 0, None), (["t"], 2, False, 0, 0, 0, 0)], "same path twice"),
    ],
)  # fmt: skip
def test_an_entry_that_cannot_be_is_refused(rows: list[tuple[Any, ...]], match: str) -> None:
    _refused({**_document(), "entries": _columns(rows)}, match)


_NO_INTEGERS: tuple[Any, ...] = ("0", 0.0, True, [], {}, [0])
_COLUMNS: dict[tuple[str, int], tuple[Any, ...]] = {
    ("regions", 0): (*_NO_INTEGERS, None, -1, 2, 2**64),
    ("regions", 1): (*_NO_INTEGERS, None, -512, 2**62 + 1),
    ("regions", 2): (*_NO_INTEGERS, None, -1, 0, 2**62 + 1),
    ("regions", 3): (0, 1, None, "", [], {}),
    ("entries", 0): (0, None, True, 1.5, {}, [], [[]], [None], "\x00"),
    ("entries", 1): (*_NO_INTEGERS, None, -1, 3, 2**64),
    ("entries", 2): (0, 1, None, "", [], {}),
    ("entries", 3): (*_NO_INTEGERS, None, -1, 5, 2**64),
    ("entries", 4): (*_NO_INTEGERS, -1, 3, 2**64),
    ("entries", 5): (*_NO_INTEGERS, None, -2, 2**62 + 2),
    ("entries", 6): (*_NO_INTEGERS, -1, 6, 2**64),
}
"""Of each list of a table, what is none of its values, wherever it stands."""


@pytest.mark.parametrize(("table", "column"), _COLUMNS)
def test_a_value_of_another_type_or_range_is_refused_naming_its_place(table: str, column: int) -> None:
    what = {"regions": "region", "entries": "entry"}[table]
    for index in range(len(_document()[table][column])):
        for value in _COLUMNS[table, column]:
            document = _document()
            document[table][column][index] = value
            _refused(document, f"layout: {what} {index}: ")


@pytest.mark.parametrize(("table", "column"), _COLUMNS)
def test_lists_of_another_number_or_length_are_refused(table: str, column: int) -> None:
    values = _document()[table][column]
    changes: list[Any] = [values[:-1], [*values, values[-1]], [], None, {}, "0" * len(values), 1]
    for change in changes:
        document = _document()
        document[table][column] = change
        _refused(document, f"layout: {table}: not . lists of one length")
    document = _document()
    del document[table][column]
    _refused(document, f"layout: {table}: not . lists of one length")
    document = _document()
    document[table].append(values)
    _refused(document, f"layout: {table}: not . lists of one length")


@pytest.mark.parametrize(("table", "width"), [("regions", 4), ("entries", 7)])
def test_a_table_that_is_none_or_too_long_is_refused(table: str, width: int) -> None:
    values: list[Any] = [{}, None, [], 4, "four", [[0] * 100_001] * width]
    for value in values:
        _refused({**_document(), table: value}, f"layout: {table}: not {width} lists of one length")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b"1", b"NaN", b'"v"', b"\xff\xfe", "{}".encode("utf-16"), b"[" * 100_000,
        b'{"v":' + b"9" * 5000 + b"}", b"\0" * 100, '{"v": "ä"}'.encode(),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_layout_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="layout"):
        decode(data)


def test_more_bytes_than_allowed_are_not_even_parsed() -> None:
    with pytest.raises(PeerError, match="more than"):
        decode(b"[" * (layouts.LIMIT_BYTES + 1))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
_numbers = st.sampled_from([-1, 0, 1, 2, 3, 511, 512, 513, SLAB_BYTES, 2**31, 2**62, 2**63, 2**64]) | st.integers()


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.lists(_numbers | _json, min_size=1, max_size=3))
def test_damage_is_refused_or_harmless(seed: int, values: list[Any]) -> None:
    chance = random.Random(seed)
    document = _document()
    for value in values:
        _damage(document, value, chance)
    _decode_safely(json.dumps(document).encode())


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32))
def test_flipped_bytes_are_refused_or_harmless(seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(_layout().encode())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] = chance.choice(b'0123456789-[],"{}:eE. \x00\xffab')
    _decode_safely(bytes(data[: chance.choice([len(data), chance.randrange(len(data))])]))


def _damage(node: Any, value: Any, chance: random.Random) -> None:
    """Put the value somewhere below the node, or take something away."""
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            return
        place = chance.choice(places)
        if isinstance(node[place], dict | list) and node[place] and chance.random() < 0.85:
            node = node[place]
        elif chance.random() < 0.15:
            del node[place]
            return
        else:
            node[place] = value
            return


def _decode_safely(data: bytes) -> None:
    """Decode; whatever comes out must lie in the slabs, found by looking at every corner of every tensor."""
    try:
        layout = decode(data)
    except PeerError:
        return
    for entry in layout.entries:
        if entry.region is None:
            assert 0 in entry.spec.shape
            continue
        region = layout.regions[entry.region]
        assert region.offset_bytes + region.size_bytes <= layout.slab_sizes[region.slab]
        item_bytes = ITEM_BYTES[entry.spec.dtype]
        last = sum((count - 1) * step for count, step in zip(entry.spec.shape, entry.spec.stride, strict=True))
        assert 0 <= entry.offset_bytes <= entry.offset_bytes + (last + 1) * item_bytes <= region.size_bytes
        assert (region.offset_bytes + entry.offset_bytes) % item_bytes == 0
        assert math.prod(entry.spec.shape) * item_bytes < 2**63
    assert decode(layout.encode()) == layout
