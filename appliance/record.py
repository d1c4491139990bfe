"""What a shard says about itself: a small sealed memfd that travels and is stored beside its slabs.

One line of JSON (everything a keeper needs), then the layout (which only engines read).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import PeerError
from appliance.fingerprint import Fingerprint

VERSION = 5  # raised with the layout's too: who starts on another one loads anew
MAX_HEADER_BYTES = 4 << 20
MAX_RECORD_BYTES = 256 << 20
MAX_SLABS = 250
MAX_FILES = 10_000
MAX_FLAGS = 10_000
MAX_FLAG_ITEMS = 64
MAX_FLAGS_BYTES = MAX_HEADER_BYTES // 2

_SHARD_ID = re.compile(r"[0-9a-f]{16}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")

# device, inode, size in bytes, mtime and ctime in nanoseconds
FileFacts = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Reference:
    """The object at another place of the same module."""

    place: str


@dataclass(frozen=True)
class Absence:
    """Nothing: loading left no value of this name, where one that has not loaded has one."""


Plain = bool | int | float | str | None
FlagValue = Plain | tuple[Plain, ...] | Reference | Absence


@dataclass(frozen=True)
class Flag:
    """What loading set beside tensors: on a module, on an object that one holds, or on a tensor.

    `place` is the names of modules and attributes that lead there from the whole, joined by dots.
    """

    place: str
    name: str
    value: FlagValue


@dataclass(frozen=True)
class ShardRecord:
    """One rank's weights: whose they are, what they came from, and the sizes of their slabs in bytes.

    `checksums` are those that its donor took of its slabs, one each, as tensors/checksum.py defines them; or none.
    """

    shard_id: str
    role: str
    rank: int
    device: str
    fingerprint: Fingerprint
    target: Fingerprint
    signer: str
    slab_sizes: tuple[int, ...]
    checksums: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(self.slab_sizes)

    def encode(self, layout: bytes) -> bytes:
        """Return the bytes of the record's memfd: this header, a newline, the layout."""
        header = {
            "v": VERSION,
            "shard_id": self.shard_id,
            "role": self.role,
            "rank": self.rank,
            "device": self.device,
            "fingerprint": self.fingerprint.to_json(),
            "target": self.target.to_json(),
            "signer": self.signer,
            "slab_sizes": self.slab_sizes,
            "checksums": self.checksums,
            "flags": list(map(_fields, self.flags)),
            "files": self.files,
            "phases_s": self.phases_s,
        }
        return json.dumps(header, separators=(",", ":")).encode() + b"\n" + layout


def decode_header(data: bytes) -> ShardRecord:
    """Return the record in front of the layout; PeerError unless every field is there and of its kind."""
    line, newline, _ = data[:MAX_HEADER_BYTES].partition(b"\n")
    if not newline:
        raise PeerError(f"shard record: no header line within {MAX_HEADER_BYTES} bytes")
    try:
        # Decoded here: json would take UTF-16 and UTF-32 for JSON too.
        header = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise PeerError("shard record: the header is not JSON") from error
    try:
        return _from_json(header)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PeerError(f"shard record: missing or malformed field: {error}") from error


def flags_problem(flags: Sequence[Flag]) -> str | None:
    """Return why no record can hold these flags; None if one can."""
    if len(flags) > MAX_FLAGS:
        return f"{len(flags)} values, at most {MAX_FLAGS} can be kept"
    fields = list(map(_fields, flags))
    if len(json.dumps(fields)) > MAX_FLAGS_BYTES:
        return f"values of more than {MAX_FLAGS_BYTES} bytes"
    for flag, written in zip(flags, fields, strict=True):
        try:
            _flag(written)
        except ValueError as error:
            return f"{flag.name[:80]!r} on {flag.place[:200]!r}: {error}"
    return None


def layout_bytes(data: bytes) -> bytes:
    """Return what follows the header line."""
    return data.partition(b"\n")[2]


def _from_json(header: Any) -> ShardRecord:
    if not isinstance(header, dict) or type(header["v"]) is not int or header["v"] != VERSION:
        raise ValueError("version")
    known = {
        "v",
        "shard_id",
        "role",
        "rank",
        "device",
        "fingerprint",
        "target",
        "signer",
        "slab_sizes",
        "checksums",
        "flags",
        "files",
        "phases_s",
    }
    if unknown := header.keys() - known:
        raise ValueError(f"unknown field {min(unknown)[:64]!r}")
    slab_sizes = tuple(_count(size) for size in _list(header["slab_sizes"], MAX_SLABS))
    checksums = tuple(_matching(_CHECKSUM, value) for value in _list(header["checksums"], MAX_SLABS))
    if checksums and len(checksums) != len(slab_sizes):
        raise ValueError(f"{len(checksums)} checksums of {len(slab_sizes)} slabs")
    return ShardRecord(
        shard_id=_matching(_SHARD_ID, header["shard_id"]),
        role=_matching(_WORD, header["role"]),
        rank=_count(header["rank"]),
        device=_text(header["device"]),
        fingerprint=Fingerprint.from_json(header["fingerprint"]),
        target=Fingerprint.from_json(header["target"]),
        signer=_text(header["signer"]),
        slab_sizes=slab_sizes,
        checksums=checksums,
        flags=tuple(map(_flag, _list(header["flags"], MAX_FLAGS))),
        files={_text(path, 4096): _file(facts) for path, facts in _object(header["files"], MAX_FILES).items()},
        phases_s={_text(name): _seconds(value) for name, value in _object(header["phases_s"], 64).items()},
    )


def _fields(flag: Flag) -> list[Any]:
    value: object = flag.value
    if isinstance(value, Reference):
        value = {"place": value.place}
    elif isinstance(value, Absence):
        value = {"absent": True}
    elif isinstance(value, tuple):
        value = {"tuple": list(value)}
    return [flag.place, flag.name, value]


def _flag(fields: Any) -> Flag:
    place, name, value = _list(fields, 3)
    return Flag(_text(place, 1024), _text(name), _flag_value(value))


def _flag_value(value: Any) -> FlagValue:
    if not isinstance(value, dict):
        return _plain(value)
    if value.keys() == {"place"}:
        return Reference(_text(value["place"], 1024))
    if value.keys() == {"tuple"}:
        return tuple(map(_plain, _list(value["tuple"], MAX_FLAG_ITEMS)))
    if value.keys() == {"absent"} and value["absent"] is True:
        return Absence()
    raise ValueError("a flag that is no plain value")


def _plain(value: Any) -> Plain:
    if type(value) not in (bool, int, float, str, type(None)):
        raise ValueError("a flag that is no plain value")
    result: Plain = value
    return result


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"not of the form {pattern.pattern}")
    return value


def _text(value: Any, limit: int = 512) -> str:
    # Printable: it ends in logs, metrics and status, and half a surrogate pair would break each of them.
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise ValueError("not short printable text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("not a count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise ValueError("not seconds")
    return float(value)


def _list(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"not a list of at most {limit}")
    return value


def _object(value: Any, limit: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > limit:
        raise ValueError(f"not an object of at most {limit}")
    return value


def _file(facts: Any) -> FileFacts:
    device, inode, size, mtime, ctime = (_signed(fact) for fact in _list(facts, 5))
    return device, inode, size, mtime, ctime


def _signed(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 64:
        raise ValueError("not an integer")
    return value
