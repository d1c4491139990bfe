"""Shard records: what is encoded comes back, and nothing else is taken for one."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import record
from appliance.errors import PeerError
from appliance.fingerprint import Fingerprint
from appliance.record import Absence, Flag, Reference, ShardRecord, decode_header, layout_bytes
from tests.keeper.shards import LAYOUT, record_of

_PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
_FINGERPRINTS = st.dictionaries(_PRINTABLE, _PRINTABLE, max_size=4).map(Fingerprint.of)
_PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-1, 1), _PRINTABLE)
_VALUES = st.one_of(
    *(_PLAIN, st.lists(_PLAIN, max_size=3).map(tuple)),
    *(st.builds(Reference, _PRINTABLE), st.builds(Absence)),
)
_RECORDS = st.builds(
    ShardRecord,
    shard_id=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    role=st.sampled_from(["target", "draft", "t2_x"]),
    rank=st.integers(0, 1 << 20),
    device=st.sampled_from(["cpu", "GPU-11111111-2222-3333-4444-555555555555"]),
    fingerprint=_FINGERPRINTS,
    target=_FINGERPRINTS,
    signer=_PRINTABLE,
    slab_sizes=st.lists(st.integers(0, 1 << 40), max_size=record.MAX_SLABS).map(tuple),
    flags=st.lists(st.builds(Flag, _PRINTABLE, _PRINTABLE, _VALUES), max_size=3).map(tuple),
    files=st.dictionaries(_PRINTABLE, st.tuples(*[st.integers(0, 1 << 63)] * 5), max_size=4),
    phases_s=st.dictionaries(_PRINTABLE, st.floats(0, 1e8), max_size=4),
)


@settings(max_examples=100, deadline=None)
@given(_RECORDS, st.binary(max_size=100))
def test_a_record_and_its_layout_come_back_as_they_were(shard_record: ShardRecord, layout: bytes) -> None:
    data = shard_record.encode(layout)
    assert decode_header(data) == shard_record
    assert layout_bytes(data) == layout


def test_the_size_is_that_of_all_slabs() -> None:
    assert record_of(slabs=3).size_bytes == 3 * 4096


def changed(**fields: Any) -> bytes:
    header = json.loads(record_of().encode(b"").partition(b"\n")[0])
    return json.dumps(header | fields).encode() + b"\n" + LAYOUT


def without(name: str) -> bytes:
    header = json.loads(record_of().encode(b"").partition(b"\n")[0])
    del header[name]
    return json.dumps(header).encode() + b"\n" + LAYOUT


REFUSED = {
    "nothing": b"",
    "no newline": b"{}",
    "not JSON": b"{\n",
    "not an object": b"[]\n",
    "UTF-16": json.dumps({"v": 1}).encode("utf-16-le") + b"\n",
    "bytes that are not UTF-8": b'{"v":"\xff"}\n',
    "deep nesting": b"[" * 100_000 + b"\n",
    "a version of tomorrow": changed(v=record.VERSION + 1),
    "a version that is true": changed(v=True),
    "a version that is a fraction": changed(v=1.0),
    "an unknown field": changed(more=1),
    "a short id": changed(shard_id="ab"),
    "an id in capitals": changed(shard_id="A" * 16),
    "an id with a newline": changed(shard_id="a" * 16 + "\n"),
    "an id that is a list": changed(shard_id=["a" * 16]),
    "a role with a slash": changed(role="a/b"),
    "an empty role": changed(role=""),
    "a negative rank": changed(rank=-1),
    "a rank that is true": changed(rank=True),
    "a huge rank": changed(rank=1 << 62),
    "a flag of two fields": changed(flags=[["a", "b"]]),
    "a flag whose value is a list": changed(flags=[["a", "b", []]]),
    "a reference to nothing": changed(flags=[["a", "b", {}]]),
    "a reference with more": changed(flags=[["a", "b", {"place": "c", "more": 1}]]),
    "a tuple that is none": changed(flags=[["a", "b", {"tuple": 1}]]),
    "a tuple in a tuple": changed(flags=[["a", "b", {"tuple": [[1]]}]]),
    "a tuple with more": changed(flags=[["a", "b", {"tuple": [1], "more": 1}]]),
    "a tuple without end": changed(flags=[["a", "b", {"tuple": [1] * (record.MAX_FLAG_ITEMS + 1)}]]),
    "an absence that is none": changed(flags=[["a", "b", {"absent": False}]]),
    "an absence of one": changed(flags=[["a", "b", {"absent": 1}]]),
    "an absence with more": changed(flags=[["a", "b", {"absent": True, "place": "c"}]]),
    "a reference to a number": changed(flags=[["a", "b", {"place": 1}]]),
    "a flag on a number": changed(flags=[[1, "b", True]]),
    "flags without end": changed(flags=[["a", "b", 1]] * (record.MAX_FLAGS + 1)),
    "a device that is a number": changed(device=0),
    "a device with a newline": changed(device="cpu\n"),
    "a device with NUL": changed(device="cpu\0"),
    "a signer that is half a surrogate pair": changed(signer="\ud800"),
    "an endless signer": changed(signer="a" * 513),
    "a fingerprint that is a list": changed(fingerprint=[]),
    "a fingerprint that is nested": changed(fingerprint={"a": {"b": "c"}}),
    "a fingerprint of too many facts": changed(fingerprint={str(number): "" for number in range(257)}),
    "a target that cannot be printed": changed(target={"a": "\x1b[2J"}),
    "slabs that are no list": changed(slab_sizes={"0": 1}),
    "a slab of negative size": changed(slab_sizes=[-1]),
    "a slab of a fraction": changed(slab_sizes=[1.5]),
    "too many slabs": changed(slab_sizes=[1] * (record.MAX_SLABS + 1)),
    "checksums that are no list": changed(checksums={"0": "0" * 16}),
    "a checksum that is a number": changed(checksums=[1]),
    "a checksum that is short": changed(checksums=["0" * 15]),
    "a checksum in capitals": changed(checksums=["A" * 16]),
    "more checksums than slabs": changed(checksums=["0" * 16] * 9),
    "files that are a list": changed(files=[]),
    "a file of four facts": changed(files={"a": [1, 2, 3, 4]}),
    "a file of six facts": changed(files={"a": [1, 2, 3, 4, 5, 6]}),
    "a file of words": changed(files={"a": ["1"] * 5}),
    "a file whose facts are huge": changed(files={"a": [1 << 64] * 5}),
    "a file with a name of two lines": changed(files={"a\nb": [1] * 5}),
    "too many files": changed(files={str(number): [1] * 5 for number in range(record.MAX_FILES + 1)}),
    "a negative time": changed(phases_s={"load": -1}),
    "a time that is NaN": changed(phases_s={"load": float("nan")}),
    "a time that is infinite": changed(phases_s={"load": float("inf")}),
    "a time that is text": changed(phases_s={"load": "1"}),
    "too many times": changed(phases_s={str(number): 1 for number in range(65)}),
    **{f"no {name}": without(name) for name in json.loads(record_of().encode(b"").partition(b"\n")[0])},
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_not_exactly_a_record_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match=r"shard record|fingerprint") as caught:
        decode_header(data)
    assert len(str(caught.value)) < 300


def test_a_header_larger_than_allowed_is_refused_without_being_parsed() -> None:
    with pytest.raises(PeerError, match="no header line within"):
        decode_header(b" " * record.MAX_HEADER_BYTES + changed())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_header(data + b"\n")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_one_damaged_byte_gives_a_record_or_a_refusal(data: st.DataObject) -> None:
    damaged = bytearray(record_of().encode(LAYOUT))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_header(bytes(damaged))
    except PeerError:
        return
    assert decode_header(decoded.encode(LAYOUT)) == decoded
