"""The JSON text of a safetensors header, scanned where it lies.

JSON of one known form needs no general parser, which would build whatever 100 MB of hostile brackets ask for. Here
memory grows with the tensors that are really described, and time with the text.
"""

import json
import re
from dataclasses import dataclass
from typing import NoReturn

from appliance.errors import ConfigError

MAX_DIMENSIONS = 64
METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """What the text says of a tensor; `begin` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def scan_header(text: bytes, *, what: str) -> tuple[list[DescribedTensor], dict[str, str]]:
    """Return the tensors in the order of the text, and the metadata; ConfigError for text of any other form."""
    return _Scanner(text, what).scan()


# The possessive quantifiers (*+) keep the matcher from remembering ways back: time and memory stay linear.
_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'
_NUMBER = rb"(?:0|[1-9][0-9]{0,19})"


def _pattern(source: bytes) -> re.Pattern[bytes]:
    return re.compile(source.replace(b"~", _SPACE).replace(b"STRING", _STRING).replace(b"NUMBER", _NUMBER))


_OPEN = _pattern(rb"\{~(\}?)")
_KEY = _pattern(rb"(STRING)~:~")
_METADATA = _pattern(rb"(STRING)~:~(STRING)~([,}])~")
_FIELD = _pattern(
    rb'"(?:(dtype)"~:~"([A-Z0-9_]{1,16})"'
    rb'|(shape)"~:~\[~((?:NUMBER(?:~,~NUMBER)*+)?+)~\]'
    rb'|(data_offsets)"~:~\[~(NUMBER)~,~(NUMBER)~\])'
    rb"~([,}])~"
)
_NEXT = _pattern(rb"~([,}])~")
_FIELDS = ("dtype", "shape", "data_offsets")


class _Scanner:
    def __init__(self, text: bytes, what: str) -> None:
        self._text = text
        self._what = what
        self._position = 0

    def scan(self) -> tuple[list[DescribedTensor], dict[str, str]]:
        tensors: dict[str, DescribedTensor] = {}
        metadata: dict[str, str] | None = None
        more = not self._match(_OPEN, "an object")[1]
        while more:
            name = self._string(self._match(_KEY, "a name and a colon")[1])
            if name in tensors or (name == METADATA_KEY and metadata is not None):
                self._fail(f"{name[:200]!r} is there twice")
            if name == METADATA_KEY:
                metadata = self._metadata()
            else:
                tensors[name] = self._tensor(name)
            more = self._match(_NEXT, "a comma or the end")[1] == b","
        if self._text[self._position :].strip(b" \t\n\r"):
            self._fail("something follows the object")
        return list(tensors.values()), metadata or {}

    def _tensor(self, name: str) -> DescribedTensor:
        self._match(_OPEN, "an object")
        fields: dict[str, tuple[bytes, ...]] = {}
        after = b","
        while after == b",":
            dtype, dtype_value, shape, shape_value, offsets, begin, end, after = self._match(
                _FIELD, "dtype, shape or data_offsets"
            ).groups()
            field = (dtype or shape or offsets).decode()
            if field in fields:
                self._fail(f"tensor {name[:200]!r} has {field} twice")
            fields[field] = (begin, end) if offsets else (dtype_value or shape_value,)
        if len(fields) < len(_FIELDS):
            self._fail(f"tensor {name[:200]!r} lacks one of {', '.join(_FIELDS)}")
        begin, end = map(int, fields["data_offsets"])
        return DescribedTensor(name, fields["dtype"][0].decode(), self._shape(fields["shape"][0]), begin, end)

    def _shape(self, text: bytes) -> tuple[int, ...]:
        if not text:
            return ()
        if text.count(b",") >= MAX_DIMENSIONS:
            self._fail(f"a shape has more than {MAX_DIMENSIONS} dimensions")
        shape = tuple(map(int, text.split(b",")))
        if max(shape) >= 1 << 63:
            self._fail("a dimension is 2**63 or more")
        return shape

    def _metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = {}
        more = not self._match(_OPEN, "an object")[1]
        while more:
            key, value, after = self._match(_METADATA, "a text for a name").groups()
            name = self._string(key)
            if name in metadata:
                self._fail(f"metadata {name[:200]!r} is there twice")
            metadata[name] = self._string(value)
            more = after == b","
        return metadata

    def _string(self, quoted: bytes) -> str:
        try:
            text = str(json.loads(quoted)) if b"\\" in quoted else quoted[1:-1].decode()
            text.encode()  # half a surrogate pair can be written with escapes
        except ValueError:
            self._fail("a name or text is not valid UTF-8 or has an invalid escape")
        return text

    def _match(self, pattern: re.Pattern[bytes], expected: str) -> re.Match[bytes]:
        found = pattern.match(self._text, self._position)
        if found is None:
            self._fail(f"{expected} expected")
        self._position = found.end()
        return found

    def _fail(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self._what}: not a safetensors header, near byte {8 + self._position}: {reason}")
