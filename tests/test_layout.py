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


def test_a_path_is_shown_as_python_writes_it() -> None:
    assert shown(("layers", "0", "scales", Key("k"), 1, Key(2), "weight")) == "layers.0.scales['k'][1][2].weight"


def test_an_entry_that_is_an_alias_says_what_the_first_says() -> None:
    entry = decode(_layout().encode()).entries[1]
    assert (entry.alias, entry.spec, entry.region, entry.offset_bytes) == (0, _spec(), 0, 0)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_a_tensor_may_fill_its_region_to_the_last_byte_and_no_further(dtype: str) -> None:
    item_bytes = ITEM_BYTES[dtype]
    document = _document()
    document["regions"] = [[0, 0, 7 * item_bytes, 1]]
    document["specs"] = [["torch.Tensor", dtype, [2, 3], [4, 1], 0]]  # reaches to the seventh element
    document["entries"] = [[0, "t", 2, 0, 0, 0, 0]]
    decode(json.dumps(document).encode())
    for change in (
        {"specs": [["torch.Tensor", dtype, [2, 3], [5, 1], 0]]},
        {"entries": [[0, "t", 2, 0, 0, 0, item_bytes]]},
    ):
        _refused({**document, **change}, "outside of its region")


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("v", 2, "version"),
        ("v", None, "version"),
        ("extra", 1, "not an object with"),
        ("slabs", [0], "sizes"),
        ("slabs", [-1], "sizes"),
        ("slabs", [1.0], "sizes"),
        ("slabs", [True], "sizes"),
        ("slabs", [2**62 + 1], "sizes"),
        ("slabs", [4096] * 201, "sizes"),
        ("slabs", {}, "sizes"),
        ("regions", {}, "not a list"),
        ("regions", [[0, 0, 1]], "four integers"),
        ("regions", [[0, 0, 1, True]], "four integers"),
        ("regions", [[0, 0, 1.5, 1]], "four integers"),
        ("regions", [[2, 0, 1, 1]], "no such slab"),
        ("regions", [[-1, 0, 1, 1]], "no such slab"),
        ("regions", [[0, 0, 1, 2]], "no such slab"),
        ("regions", [[0, 8, 1, 1]], "unaligned"),
        ("regions", [[0, -512, 1, 1]], "unaligned"),
        ("regions", [[0, 0, 0, 1]], "empty"),
        ("regions", [[0, 0, -1, 1]], "empty"),
        ("regions", [[0, 0, SLAB_BYTES + 1, 1]], "outside of its slab"),
        ("regions", [[0, 512, SLAB_BYTES - 511, 1]], "outside of its slab"),
        ("regions", [[0, 2**80, 1, 1]], "outside of its slab"),
        ("regions", [[0, 0, 513, 1], [0, 512, 1, 1]], "overlaps"),
        ("regions", [[1, 0, 1, 1], [0, 0, 1, 1]], "out of order"),
        ("holders", [[0, "a"]] * 100_001, "not a list"),
        ("holders", [[1, "a"]], "no earlier holder"),
        ("holders", [[-1, "a"]], "no earlier holder"),
        ("holders", [[index, "a"] for index in range(70)], "too deep"),
        ("holders", [["a", 0]], "not a holder and a step"),
        ("holders", [[0, None]], "step is neither"),
        ("holders", [[0, -1]], "step is neither"),
        ("holders", [[0, 1.5]], "step is neither"),
        ("holders", [[0, [1, 2]]], "step is neither"),
        ("holders", [[0, [None]]], "step is neither"),
        ("holders", [[0, "a\nb"]], "step is neither"),
        ("holders", [[0, "\ud800"]], "step is neither"),
        ("holders", [[0, "a" * 1025]], "step is neither"),
        ("holders", [[0, [2**63]]], "step is neither"),
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
        ("entries", [[0, "t", 0, 1, 0, 0]], "fields"),
        ("entries", [[99, "t", 0, 1, 0, 0, 0]], "no such holder"),
        ("entries", [[-1, "t", 0, 1, 0, 0, 0]], "no such holder"),
        ("entries", [[0, "t", 3, 1, 0, 0, 0]], "unknown kind"),
        ("entries", [[0, "t", "0", 1, 0, 0, 0]], "unknown kind"),
        ("entries", [[0, 5, 0, 1, 0, 0, 0]], "without a name"),
        ("entries", [[0, ["t"], 1, 1, 0, 0, 0]], "without a name"),
        ("entries", [[0, "t", 0, 2, 0, 0, 0]], "persistent"),
        ("entries", [[0, "t", 0, 1, 99, 0, 0]], "no such spec"),
        ("entries", [[0, "t", 0, 1, -1, 0, 0]], "no such spec"),
        ("entries", [[0, "t", 0, 1, 0, 99, 0]], "no such region"),
        ("entries", [[0, "t", 0, 1, 0, -1, 0]], "no such region"),
        ("entries", [[0, "t", 0, 1, 0, True, 0]], "no such region"),
        ("entries", [[0, "t", 0, 1, 0, None, 0]], "no region"),
        ("entries", [[0, "t", 0, 1, 0, 0, 1]], "multiple"),
        ("entries", [[0, "t", 0, 1, 0, 0, -2]], "multiple"),
        ("entries", [[0, "t", 0, 1, 0, 0, 590]], "outside of its region"),
        ("entries", [[0, "t", 0, 1, 0, 0, 2**70]], "outside of its region"),
        ("entries", [[0, "t", 0, 1, 0]], "alias"),
        ("entries", [[0, "t", 0, 1, 0, 0, 0], [0, "u", 0, 1, -1]], "alias"),
        ("entries", [[0, "t", 0, 1, 0, 0, 0], [0, "u", 0, 1, 1]], "alias"),
        ("entries", [[0, "t", 0, 1, 0, 0, 0], [0, "u", 0, 1, 0], [0, "v", 0, 1, 1]], "alias"),
        ("entries", [[0, "t", 0, 1, 0, 0, 0], [0, "t", 2, 0, 0]], "same path twice"),
    ],
)  # fmt: skip
def test_a_lie_is_refused(where: str, value: Any, match: str) -> None:
    _refused({**_document(), where: value}, match)


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
