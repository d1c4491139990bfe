"""Files f000, f001, ... of given sizes, the streams that read them, and what those found."""

from pathlib import Path

from appliance.checkpoint.file_stream import FileStream
from appliance.checkpoint.files import find_root
from appliance.checkpoint.streams import make_streams
from tests.checkpoint.checkpoints import noise

PIECE_BYTES = 1000


def make_files(folder: Path, sizes_bytes: list[int]) -> dict[str, bytes]:
    """Write a file of each size; return the contents by name."""
    contents = {f"f{number:03}": noise(f"f{number}", size) for number, size in enumerate(sizes_bytes)}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return contents


def streams_of(
    folder: Path, contents: dict[str, bytes], *, algorithm: str = "sha256", threads: int | None = None
) -> list[FileStream]:
    """Return a stream of each file, none of them read yet."""
    sizes = {name: len(data) for name, data in contents.items()}
    return make_streams(find_root(folder), sizes, algorithm=algorithm, threads=threads)


def digests_of(done: list[FileStream]) -> dict[str, str]:
    """Return the digests of those that were read to the end, by name."""
    return {stream.path: stream.outcome.digest for stream in done if stream.outcome}
