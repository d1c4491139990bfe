"""The wire: every message comes back as it was, everything else is refused with its descriptors closed."""

import dataclasses
import json
import os
import socket
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import memfd, wire
from appliance.descriptors import Descriptor, close_all
from appliance.errors import PeerError
from tests.descriptors import count_descriptors, room_for
from tests.messages import EVERY_MESSAGE, messages

WRONG: list[Any] = [None, [], {}, [["a"], 1], {"a": None}, "text", 7, True, 0.5, [[{}]]]
VALID = {"v": 1, "op": "describe", "role": "target", "rank": 0, "wait_s": 1.5}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        yield ours, theirs


@pytest.mark.parametrize("kind", EVERY_MESSAGE, ids=lambda kind: kind.op)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type[wire.Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert wire.decode(wire.encode(message)) == message


def test_every_message_has_a_name_of_its_own() -> None:
    names = [kind.op for kind in EVERY_MESSAGE]
    assert len(set(names)) == len(names)
    assert all(names)


@pytest.mark.parametrize("kind", EVERY_MESSAGE, ids=lambda kind: kind.op)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_message_without_one_of_its_fields_is_refused(kind: type[wire.Message], data: st.DataObject) -> None:
    body = json.loads(wire.encode(data.draw(messages(kind))))
    for name in body:
        with pytest.raises(PeerError):
            wire.decode(json.dumps({key: value for key, value in body.items() if key != name}).encode())


@pytest.mark.parametrize("kind", EVERY_MESSAGE, ids=lambda kind: kind.op)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_field_of_another_type_is_refused(kind: type[wire.Message], data: st.DataObject) -> None:
    body = json.loads(wire.encode(data.draw(messages(kind))))
    for name in body:
        for wrong in WRONG:
            types = typing.get_type_hints(kind)
            if name in types and wire._fits(wrong, types[name]):
                continue
            with pytest.raises(PeerError):
                wire.decode(json.dumps({**body, name: wrong}).encode())


REFUSED = {
    "nothing": b"",
    "not JSON": b"{",
    "not an object": b"[]",
    "a number": b"1",
    "null": b"null",
    "an unknown field": json.dumps({**VALID, "more": 1}).encode(),
    "an unknown message": json.dumps({**VALID, "op": "format"}).encode(),
    "a message without a name": b'{"v":1}',
    "the empty name": b'{"v":1,"op":""}',
    "a name that is a list": b'{"v":1,"op":[]}',
    "a name that is an object": b'{"v":1,"op":{}}',
    "no version": b'{"op":"status"}',
    "a later version": b'{"v":2,"op":"status"}',
    "a version that is true": b'{"v":true,"op":"status"}',
    "a version that is a fraction": b'{"v":1.0,"op":"status"}',
    "a version that is nested": b'{"v":' + b"[" * 500 + b"]" * 500 + b',"op":"status"}',
    "NaN": b'{"v":1,"op":"describe","role":"target","rank":0,"wait_s":NaN}',
    "infinity": b'{"v":1,"op":"describe","role":"target","rank":0,"wait_s":Infinity}',
    "a float beyond all floats": b'{"v":1,"op":"describe","role":"target","rank":0,"wait_s":1e999}',
    "a huge integer": b'{"v":1,"op":"describe","role":"target","rank":1' + b"0" * 40 + b',"wait_s":0}',
    "an integer of 5000 digits": b'{"v":1,"op":"describe","role":"target","rank":1' + b"0" * 5000 + b',"wait_s":0}',
    "a rank that is true": b'{"v":1,"op":"describe","role":"target","rank":true,"wait_s":0}',
    "deep nesting": b"[" * 60_000,
    "deep nesting of objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deep nesting in a field": b'{"v":1,"op":"report","phases_s":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "NUL bytes": b'{"v":1,"op":"status"}\0',
    "a NUL message": b"\0" * 100,
    "UTF-16": json.dumps({"v": 1, "op": "status"}).encode("utf-16"),
    "UTF-32": json.dumps({"v": 1, "op": "status"}).encode("utf-32"),
    "a byte order mark": b"\xef\xbb\xbf" + b'{"v":1,"op":"status"}',
    "bytes that are not UTF-8": b'{"v":1,"op":"\xff"}',
    "half a surrogate pair": b'{"v":1,"op":"renew","shard_id":"\\ud800","client":"a"}',
    "half a surrogate pair as a name": b'{"v":1,"op":"report","verdict":"hit","reason":"","detail":"",'
    b'"phases_s":{"\\udfff":1}}',
    "a field twice": b'{"v":1,"op":"evict","force":false,"force":true}',
    "a version twice": b'{"v":2,"v":1,"op":"status"}',
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_not_exactly_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        wire.decode(data)
    assert len(str(caught.value)) < 200


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(PeerError):
        wire.decode(data)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EVERY_MESSAGE), st.data())
def test_messages_with_random_fields_are_messages_or_refused(kind: type[wire.Message], data: st.DataObject) -> None:
    names = [item.name for item in dataclasses.fields(kind)]
    body = {"v": 1, "op": kind.op} | {name: data.draw(_JSON) for name in names}
    try:
        message = wire.decode(json.dumps(body).encode())
    except PeerError:
        return
    assert isinstance(message, kind)
    assert wire.decode(wire.encode(message)) == message


def test_a_message_is_not_sent_larger_than_it_may_be_received() -> None:
    least = len(wire.encode(wire.Progress(text="")))
    assert len(wire.encode(wire.Progress(text="a" * (wire.MAX_MESSAGE_BYTES - least)))) == wire.MAX_MESSAGE_BYTES
    with pytest.raises(PeerError, match="more than"):
        wire.encode(wire.Progress(text="a" * (wire.MAX_MESSAGE_BYTES - least + 1)))


def test_nan_is_not_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        wire.encode(wire.Describe(role="target", rank=0, wait_s=float("nan")))


def test_descriptors_arrive_with_the_message_that_announces_them(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with memfd.sealed("record", [b"one"]) as held, memfd.sealed("configs", [b"two"]) as packed:
        wire.send(ours, wire.Described(shard_id="ab"), [held, packed])
    packet = wire.receive(theirs)
    assert packet is not None
    assert [memfd.read(one, what="it", limit_bytes=9) for one in packet.descriptors] == [b"one", b"two"]
    packet.close()


def test_received_descriptors_do_not_outlive_an_exec(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with memfd.sealed("record", [b"one"]) as held:
        wire.send(ours, wire.Described(shard_id="ab"), [held, held])
    packet = wire.receive(theirs)
    assert packet is not None
    assert not any(os.get_inheritable(one.fileno()) for one in packet.descriptors)
    packet.close()


def test_as_many_descriptors_as_the_kernel_passes_arrive(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with Descriptor(os.open("/dev/null", os.O_RDONLY)) as null:
        wire.send(ours, wire.Attached(shard_id="ab"), [null] * wire.MAX_DESCRIPTORS)
        with pytest.raises(OSError, match="Invalid argument"):
            wire.send(ours, wire.Attached(shard_id="ab"), [null] * (wire.MAX_DESCRIPTORS + 1))
    packet = wire.receive(theirs)
    assert packet is not None
    assert len(packet.descriptors) == wire.MAX_DESCRIPTORS
    packet.close()


def test_the_end_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    assert wire.receive(theirs) is None


def test_an_empty_non_blocking_socket_is_no_end(pair: tuple[socket.socket, socket.socket]) -> None:
    _, theirs = pair
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        wire.receive(theirs)


WITH_DESCRIPTORS = {
    "nobody asked for": (wire.encode(wire.Status()), 1),
    "nobody asked for, very many": (wire.encode(wire.Status()), wire.MAX_DESCRIPTORS),
    "too few": (wire.encode(wire.Donate()), 1),
    "none": (wire.encode(wire.Donate()), 0),
    "one too many": (wire.encode(wire.Described(shard_id="ab")), 3),
    "on what is not a message": (b"{", 5),
    "on nothing": (b"", 2),
    "on a message that is too large": (b" " * (wire.MAX_MESSAGE_BYTES + 1), 3),
    "on a message that is much too large": (b" " * 150_000, 3),
}


@pytest.mark.parametrize(("data", "count"), WITH_DESCRIPTORS.values(), ids=WITH_DESCRIPTORS)
def test_a_descriptor_on_a_refused_message_is_closed(
    pair: tuple[socket.socket, socket.socket], data: bytes, count: int
) -> None:
    ours, theirs = pair
    with Descriptor(os.open("/dev/null", os.O_RDONLY)) as null:
        socket.send_fds(ours, [data], [null.fileno()] * count)
    before = count_descriptors()
    with pytest.raises(PeerError) as caught:
        wire.receive(theirs)
    assert count_descriptors() == before
    assert len(str(caught.value)) < 200


def test_a_message_that_fits_no_packet_is_refused_by_its_size(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.send(b'{"v":1,"op":"status"}' + b" " * wire.MAX_MESSAGE_BYTES)
    with pytest.raises(PeerError, match="more than 65536 bytes"):
        wire.receive(theirs)


def test_a_process_without_room_for_descriptors_says_so_and_keeps_none(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    with Descriptor(os.open("/dev/null", os.O_RDONLY)) as null:
        wire.send(ours, wire.Attached(shard_id="ab"), [null] * 9)
    before = count_descriptors()
    with room_for(2), pytest.raises(PeerError, match="no room"):
        wire.receive(theirs)
    assert count_descriptors() == before


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 5))
def test_whatever_arrives_no_descriptor_is_left_behind(data: bytes, count: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        null = [Descriptor(os.open("/dev/null", os.O_RDONLY)) for _ in range(count)]
        socket.send_fds(ours, [data], [one.fileno() for one in null])
        close_all(null)
        before = count_descriptors()
        if data or count:
            with pytest.raises(PeerError):
                wire.receive(theirs)
        else:
            assert wire.receive(theirs) is None
        assert count_descriptors() == before
