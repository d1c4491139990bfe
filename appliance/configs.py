"""A checkpoint's configs (every file that holds no tensors) in one sealed memfd, so that engines need not open them.

One line of JSON, the path and size of each file in order, then the files' bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from appliance import memfd
from appliance.descriptors import Descriptor
from appliance.errors import HostError, PeerError

MAX_BYTES = 512 << 20
MAX_INDEX_BYTES = 16 << 20
MAX_FILES = 10_000


def pack(configs: Mapping[str, bytes]) -> Descriptor:
    """Return the memfd; ResourceError where memory is short. The caller closes it."""
    index = json.dumps([[path, len(data)] for path, data in configs.items()], separators=(",", ":")).encode()
    return memfd.sealed("configs", [index, b"\n", *configs.values()])


def unpack(descriptor: Descriptor) -> dict[str, bytes]:
    """Return path and bytes of each config; PeerError unless it is exactly what `pack` makes. Does not close it."""
    data = memfd.read(descriptor, what="configs", limit_bytes=MAX_BYTES)
    line, newline, _ = data[:MAX_INDEX_BYTES].partition(b"\n")
    if not newline:
        raise PeerError(f"configs: no index within {MAX_INDEX_BYTES} bytes")
    try:
        # Decoded here: json would take UTF-16 and UTF-32 for JSON too.
        index = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise PeerError("configs: the index is not JSON") from error
    if not isinstance(index, list) or len(index) > MAX_FILES:
        raise PeerError(f"configs: the index is not a list of at most {MAX_FILES} files")
    configs: dict[str, bytes] = {}
    position = len(line) + 1
    for item in index:
        path, size_bytes = _checked(item)
        if path in configs or position + size_bytes > len(data):
            raise PeerError(f"configs: {path!r} is repeated or longer than what is there")
        configs[path] = data[position : position + size_bytes]
        position += size_bytes
    if position != len(data):
        raise PeerError("configs: bytes beyond the last file")
    return configs


def write(configs: Mapping[str, bytes], folder: Path) -> None:
    """Write the files, as `unpack` returned them, into an empty folder; HostError where they cannot be written."""
    try:
        for path, data in configs.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    except OSError as error:
        raise HostError(f"cannot write configs to {folder}: {error.strerror}") from error


def _checked(item: object) -> tuple[str, int]:
    if not isinstance(item, list) or len(item) != 2:
        raise PeerError("configs: an entry is not a path and a size")
    path, size_bytes = item
    if not isinstance(path, str) or type(size_bytes) is not int or size_bytes < 0:
        raise PeerError("configs: an entry is not a path and a size")
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != path or not path.isprintable():
        raise PeerError(f"configs: {path[:100]!r} is no path inside a checkpoint")
    return path, size_bytes
