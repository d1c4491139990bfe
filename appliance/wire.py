"""Messages between a keeper and its clients: one JSON object a packet, descriptors beside it, over SOCK_SEQPACKET.

Every message is a frozen dataclass here; a field that is missing, unknown or of another type is refused, and so is
a descriptor that the message does not announce. No reader allocates more than one packet.
"""

import dataclasses
import functools
import json
import socket
import typing
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from appliance.descriptors import Descriptor, close_all
from appliance.errors import PeerError

VERSION = 1
MAX_MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 253  # what Linux passes in one message (SCM_MAX_FD)

_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)

_MESSAGES: dict[str, "type[Message]"] = {}


@dataclass(frozen=True)
class Message:
    """Any packet; `op` names its kind on the wire."""

    op: ClassVar[str] = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _MESSAGES[cls.op] = cls


@dataclass(frozen=True)
class Status(Message):
    """Ask what the keeper holds and who has it mapped."""

    op: ClassVar[str] = "status"


@dataclass(frozen=True)
class StatusReply(Message):
    op: ClassVar[str] = "status_reply"
    status: dict[str, Any]


@dataclass(frozen=True)
class Describe(Message):
    """Ask for a shard's record and configs, waiting until it is resident."""

    op: ClassVar[str] = "describe"
    role: str
    rank: int
    wait_s: float


@dataclass(frozen=True)
class Described(Message):
    """Carries two descriptors: record, configs."""

    op: ClassVar[str] = "described"
    shard_id: str


@dataclass(frozen=True)
class Attach(Message):
    """Ask for a shard's slabs under a full fingerprint; `client` names the process in logs and status."""

    op: ClassVar[str] = "attach"
    role: str
    rank: int
    client: str
    fingerprint: dict[str, str]


@dataclass(frozen=True)
class Attached(Message):
    """Carries the slabs, in the order of the record's sizes."""

    op: ClassVar[str] = "attached"
    shard_id: str


@dataclass(frozen=True)
class Renew(Message):
    """Tell a keeper that came back that this connection is the lease of a shard mapped earlier."""

    op: ClassVar[str] = "renew"
    shard_id: str
    client: str


@dataclass(frozen=True)
class Renewed(Message):
    op: ClassVar[str] = "renewed"


@dataclass(frozen=True)
class Leave(Message):
    """From a keeper to whoever leases a shard: end, there is no room for what replaces it beside it. No reply."""

    op: ClassVar[str] = "leave"
    detail: str


@dataclass(frozen=True)
class Offer(Message):
    """Ask to be the one that fills a slot. `replace` drops an unleased shard of another fingerprint first."""

    op: ClassVar[str] = "offer"
    role: str
    rank: int
    client: str
    target: dict[str, str]
    replace: bool


@dataclass(frozen=True)
class Granted(Message):
    op: ClassVar[str] = "granted"


@dataclass(frozen=True)
class Progress(Message):
    """How far a load is, both from the one who loads and to those who wait. No reply."""

    op: ClassVar[str] = "progress"
    text: str


@dataclass(frozen=True)
class Donate(Message):
    """Carries record, configs, then the slabs."""

    op: ClassVar[str] = "donate"


@dataclass(frozen=True)
class Donated(Message):
    op: ClassVar[str] = "donated"
    shard_id: str


@dataclass(frozen=True)
class Report(Message):
    """What an engine found and how long its phases took, in seconds. No reply."""

    op: ClassVar[str] = "report"
    verdict: str
    reason: str
    detail: str
    phases_s: dict[str, float]


@dataclass(frozen=True)
class Scrubbed(Message):
    """What a scrub found in a shard that this connection leases: the numbers of the slabs whose bytes changed."""

    op: ClassVar[str] = "scrubbed"
    shard_id: str
    damaged: list[int]


@dataclass(frozen=True)
class CheckpointSeen(Message):
    """What a look at the checkpoint on disk found: why it is refused, or nothing where it is the resident one."""

    op: ClassVar[str] = "checkpoint_seen"
    refusal: str


@dataclass(frozen=True)
class Noted(Message):
    op: ClassVar[str] = "noted"


@dataclass(frozen=True)
class Evict(Message):
    """Free every shard of this keeper; refused while one is leased, unless forced."""

    op: ClassVar[str] = "evict"
    force: bool


@dataclass(frozen=True)
class Evicted(Message):
    op: ClassVar[str] = "evicted"
    size_bytes: int


@dataclass(frozen=True)
class Refused(Message):
    """Why a request was not met: a code of verdict.Reason, one line for people, facts that differ, exit status."""

    op: ClassVar[str] = "refused"
    reason: str
    detail: str
    fields: list[list[str]] = field(default_factory=list)


# How many descriptors each kind may carry; every other kind carries none.
_DESCRIPTORS: dict[type[Message], tuple[int, int]] = {
    Described: (2, 2),
    Attached: (0, MAX_DESCRIPTORS),
    Donate: (2, MAX_DESCRIPTORS),
}


@dataclass(frozen=True)
class Packet:
    """A message and the descriptors it carried; the caller closes them."""

    message: Message
    descriptors: tuple[Descriptor, ...] = ()

    def close(self) -> None:
        close_all(self.descriptors)


def send(channel: socket.socket, message: Message, descriptors: Iterable[Descriptor] = ()) -> None:
    """Send one packet. The descriptors stay with the caller. OSError as the kernel gives it."""
    fds = array("i", [descriptor.fileno() for descriptor in descriptors])
    channel.sendmsg([encode(message)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])


def receive(channel: socket.socket) -> Packet | None:
    """Return the next packet, None at the end; PeerError, with every descriptor closed, for anything not of the form.

    BlockingIOError where the socket is non-blocking and empty.
    """
    # Not socket.recv_fds: it forgets the flags, and the descriptors would outlive an exec.
    data, ancillary, flags, _ = channel.recvmsg(MAX_MESSAGE_BYTES + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors = _descriptors(ancillary)
    try:
        if flags & socket.MSG_TRUNC or len(data) > MAX_MESSAGE_BYTES:
            raise PeerError(f"message of more than {MAX_MESSAGE_BYTES} bytes")
        if flags & socket.MSG_CTRUNC:
            raise PeerError("descriptors were lost on the way: this process has no room for them")
        if not data and not descriptors:
            return None
        message = decode(data)
        least, most = _DESCRIPTORS.get(type(message), (0, 0))
        if not least <= len(descriptors) <= most:
            raise PeerError(f"{message.op}: carries {len(descriptors)} descriptors, not {least} to {most}")
    except PeerError:
        close_all(descriptors)
        raise
    return Packet(message, descriptors)


def encode(message: Message) -> bytes:
    """Return the packet's bytes; PeerError where the message is larger than a packet may be, ValueError for NaN."""
    fields = {item.name: getattr(message, item.name) for item in dataclasses.fields(message)}
    data = json.dumps({"v": VERSION, "op": message.op, **fields}, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise PeerError(f"{message.op}: message of {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Return the message in a packet; PeerError for whatever is not exactly one of this version."""
    try:
        # Decoded here: json would take UTF-16 and UTF-32 for JSON too.
        body = json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated)
    except (ValueError, RecursionError) as error:
        raise PeerError("message is not JSON") from error
    if not isinstance(body, dict):
        raise PeerError("message is not an object")
    version, op = body.pop("v", None), body.pop("op", None)
    if type(version) is not int or version != VERSION:
        shown = str(version)[:20] if type(version) in (int, str) else "unknown"
        raise PeerError(f"message of version {shown}; this side speaks {VERSION}")
    kind = _MESSAGES.get(op) if isinstance(op, str) and op else None
    if kind is None:
        raise PeerError(f"unknown message {op[:40]!r}" if isinstance(op, str) else "message without a name")
    types = _field_types(kind.op)
    if unknown := body.keys() - types.keys():
        raise PeerError(f"{op}: unknown field {min(unknown)[:40]!r}")
    for name, wanted in types.items():
        if name not in body:
            raise PeerError(f"{op}: field {name!r} is missing")
        if not _fits(body[name], wanted):
            raise PeerError(f"{op}: field {name!r} is not of type {wanted}")
        if wanted is float:
            body[name] = float(body[name])
    return kind(**body)


@functools.cache
def _field_types(op: str) -> dict[str, Any]:
    kind = _MESSAGES[op]
    types = typing.get_type_hints(kind)
    return {item.name: types[item.name] for item in dataclasses.fields(kind)}


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> tuple[Descriptor, ...]:
    fds = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(map(Descriptor, fds))


def _fits(value: Any, kind: Any) -> bool:
    """Tell whether a JSON value is of a field's annotated type; numbers are bounded, text is Unicode."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict and isinstance(value, dict):
        return all(_is_unicode(name) and _fits(item, arguments[1]) for name, item in value.items())
    if origin is list and isinstance(value, list):
        return all(_fits(item, arguments[0]) for item in value)
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e15
    if type(value) is not kind:
        return kind is Any
    return _is_unicode(value) if kind is str else kind is not int or abs(value) < 1 << 62


def _is_unicode(text: str) -> bool:
    # JSON can spell half a surrogate pair, which no log, file name or metric can take.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a name twice in one object")
    return body
