import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import PeerError
from appliance.up.message import LIMIT_BYTES, Message, parse, valid_name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"READY=1", Message(ready=True)),
        (b"READY=1\nSTATUS=serving = all\n", Message(ready=True, status="serving = all")),
        (b"STOPPING=1\0", Message(stopping=True)),
        (b"RELOADING=1\nMONOTONIC_USEC=12", Message(reloading=True)),
        (b"EXTEND_TIMEOUT_USEC=1500000", Message(extend_timeout_s=1.5)),
        (b"WATCHDOG=1", Message(watchdog=True)),
        (b"WATCHDOG=trigger", Message(watchdog_trigger=True)),
        (b"WATCHDOG_USEC=20000000", Message(watchdog_s=20)),
        (b"FDSTORE=1\nFDNAME=slab-0\nFDPOLL=0", Message(store=True, name="slab-0", poll=False)),
        (b"FDSTORE=1", Message(store=True)),
        (b"FDSTOREREMOVE=1\nFDNAME=a", Message(remove=True, name="a")),
        (b"FDSTORE=1\nFDSTOREREMOVE=1\nFDNAME=a", Message(remove=True, name="a")),
        (b"BARRIER=1", Message(barrier=True)),
        (b"", Message()),
        (b"MAINPID=1\nERRNO=2\nEXIT_STATUS=3\nX_WHATEVER=4\nno assignment", Message()),
        (b"ready=1\nREADY=0\nREADY=11\n READY=1\nFDSTORE=2", Message()),
        (b"FDNAME=first\nFDNAME=second", Message(name="first")),
        (b"FDNAME=", Message(name="")),
        (b"STATUS=\x1b[2J\xc3\xa9\x07", Message(status="é\\x07")),
    ],
)
def test_a_datagram_means_what_the_manual_page_says(data: bytes, message: Message) -> None:
    assert parse(data) == message


@pytest.mark.parametrize(
    ("data", "ignored"),
    [
        (b"STATUS=\xff\nREADY=1", "STATUS="),
        (b"EXTEND_TIMEOUT_USEC=-1\nREADY=1", "EXTEND_TIMEOUT_USEC="),
        (b"EXTEND_TIMEOUT_USEC=1e9\nREADY=1", "EXTEND_TIMEOUT_USEC="),
        (b"EXTEND_TIMEOUT_USEC=\nREADY=1", "EXTEND_TIMEOUT_USEC="),
        (b"EXTEND_TIMEOUT_USEC=99999999999999999999\nREADY=1", "EXTEND_TIMEOUT_USEC="),
        (b"EXTEND_TIMEOUT_USEC=" + b"9" * 4000 + b"\nREADY=1", "EXTEND_TIMEOUT_USEC="),
        ("EXTEND_TIMEOUT_USEC=٣\nREADY=1".encode(), "EXTEND_TIMEOUT_USEC="),
        (b"WATCHDOG_USEC=x\nREADY=1", "WATCHDOG_USEC="),
        (b"FDNAME=a:b\nREADY=1", "FDNAME="),
        (b"FDNAME=\x7f\nREADY=1", "FDNAME="),
    ],
)
def test_an_assignment_that_makes_no_sense_does_not_spoil_the_others(data: bytes, ignored: str) -> None:
    message = parse(data)
    assert [text.partition("=")[0] + "=" for text in message.ignored] == [ignored]
    assert message == Message(ready=True, ignored=message.ignored)


@pytest.mark.parametrize(
    "data", [b"READY=1\0\0", b"READY=1\0STATUS=x", b"x" * (LIMIT_BYTES + 1), b"BARRIER=1\nREADY=1"]
)
def test_what_pid_1_would_drop_is_refused_whole(data: bytes) -> None:
    with pytest.raises(PeerError):
        parse(data)


@pytest.mark.parametrize(("name", "valid"), [(b"a" * 255, True), (b"a" * 256, False), (b"", True), (b" ~", True)])
def test_a_name_has_at_most_255_bytes(name: bytes, valid: bool) -> None:
    assert valid_name(name) is valid


def test_every_byte_that_is_not_printable_ascii_is_refused_in_a_name_and_so_is_the_separator() -> None:
    refused = {byte for byte in range(256) if not valid_name(bytes([byte]))}
    assert refused == {*range(0x20), ord(":"), *range(0x7F, 256)}


_KEYS = (b"READY", b"STATUS", b"FDSTORE", b"FDNAME", b"EXTEND_TIMEOUT_USEC", b"WATCHDOG_USEC", b"BARRIER", b"FDPOLL")


@given(
    st.binary(max_size=5000)
    | st.lists(st.tuples(st.sampled_from(_KEYS), st.binary(max_size=30)), max_size=8).map(
        lambda pairs: b"\n".join(key + b"=" + value for key, value in pairs)
    )
)
def test_any_bytes_are_a_message_or_one_refusal(data: bytes) -> None:
    try:
        message = parse(data)
    except PeerError:
        return
    assert message.status is None or "\x1b" not in message.status
    assert message.name is None or valid_name(message.name.encode())
    assert message.extend_timeout_s is None or 0 <= message.extend_timeout_s < 2**63
