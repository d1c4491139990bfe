"""The header of a safetensors file: where each tensor lies in it. Reads no tensor data and needs no torch.

Format: https://github.com/huggingface/safetensors#format. Eight bytes little-endian N, N bytes of JSON, then the bytes
of the tensors without gaps. What the safetensors library (0.7, 0.8) reads is read here with the same result, except
that these are refused, because two readers could take them for different things or no tensor library could hold them:

- a tensor, a key of one, or a metadata key that is there twice; a key of a tensor other than its three
- a tensor described by an array, a dtype by an object, or a key with escapes where plain text is the rule
- white space before the header, `"__metadata__": null`
- a name that is not text (half a surrogate pair), more than 64 dimensions, a dimension of 2**63 or more
"""

import math
import os
from dataclasses import dataclass

from appliance.checkpoint.header_text import scan_header
from appliance.checkpoint.os_refusal import os_refusal
from appliance.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `begin` and `end` are byte offsets in the file; the bytes are little-endian, row after row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A file's tensors in the order of their bytes, its metadata, and where the first tensor begins."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    size_bytes: int


def read_header(fd: int, *, what: str) -> tuple[Header, bytes]:
    """Return the header of an open file and the bytes it was read from, from the file's first byte on.

    ConfigError, naming `what`, for anything that is not exactly a safetensors file of this size.
    """
    file_bytes = os.fstat(fd).st_size
    prefix = _pread(fd, 8, 0, what)
    if len(prefix) < 8:
        raise ConfigError(f"{what}: {file_bytes} bytes are too few for a safetensors file")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ConfigError(f"{what}: announces a header of {header_bytes} bytes; {MAX_HEADER_BYTES} are allowed")
    if 8 + header_bytes > file_bytes:
        raise ConfigError(f"{what}: announces a header of {header_bytes} bytes and is only {file_bytes} long")
    text = _pread(fd, header_bytes, 8, what)
    if len(text) < header_bytes:
        raise ConfigError(f"{what}: ends inside its header")
    return parse_header(text, file_bytes=file_bytes, what=what), prefix + text


def parse_header(text: bytes, *, file_bytes: int, what: str) -> Header:
    """Return what the header says only if all of this holds; ConfigError, naming `what`, if not.

    1. it is a JSON object, and after it there is only white space
    2. each tensor has a known dtype, a shape, and two offsets, and each name is there once
    3. shape times dtype is the number of bytes between the offsets, to the bit
    4. sorted by offset, the tensors follow each other without gap or overlap, from the header to the file's end
    """
    tensors, metadata = scan_header(text, what=what)
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BITS:
            raise ConfigError(f"{what}: tensor {_short(tensor.name)}: unknown dtype {tensor.dtype}")
    data_begin = 8 + len(text)
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    position = 0
    for tensor in tensors:
        bits = math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype]
        if bits != 8 * (tensor.end - tensor.begin):
            raise ConfigError(
                f"{what}: tensor {_short(tensor.name)}: {tensor.dtype} of shape {_short(tensor.shape)} does not fill "
                f"the {tensor.end - tensor.begin} bytes it is given"
            )
        if tensor.begin != position:
            raise ConfigError(f"{what}: tensor {_short(tensor.name)}: there is a gap or an overlap before it")
        position = tensor.end
    if data_begin + position != file_bytes:
        raise ConfigError(
            f"{what}: should be {data_begin + position} bytes long according to its header, and is {file_bytes}",
            hint="a download that was cut short looks like this",
        )
    placed = (
        TensorInfo(tensor.name, tensor.dtype, tensor.shape, tensor.begin + data_begin, tensor.end + data_begin)
        for tensor in tensors
    )
    return Header(tuple(placed), metadata, data_begin)


def _pread(fd: int, size_bytes: int, offset: int, what: str) -> bytes:
    data = b""
    try:
        while len(data) < size_bytes and (part := os.pread(fd, size_bytes - len(data), offset + len(data))):
            data = data + part if data else part
    except OSError as error:
        raise os_refusal(error, f"read {what}") from error
    return data


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
