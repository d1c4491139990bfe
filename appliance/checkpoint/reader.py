"""The verified read: every file of a checkpoint once, the tensors straight into memory that the caller gives.

What is hashed are the bytes in that memory, after they arrived there, so what was verified is what is used. Nothing may
be used before `read_verified` returns: a file can turn out wrong with its last byte.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from appliance.checkpoint.contents import MAX_CONFIGS_BYTES, is_config, tensor_files
from appliance.checkpoint.digests import present, stat_files
from appliance.checkpoint.file_stream import FileStream, Piece
from appliance.checkpoint.files import CheckpointRoot, find_root
from appliance.checkpoint.manifest import CheckpointManifest
from appliance.checkpoint.safetensors import Header, TensorInfo, read_header
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.streams import (
    PIECE_BYTES,
    WAITING_THREADS,
    OnProgress,
    Progress,
    make_streams,
    run_streams,
)
from appliance.errors import ConfigError

Allocate = Callable[[TensorInfo], memoryview | bytearray]
OnConfigs = Callable[[Mapping[str, bytes]], None]


class Staging(Protocol):
    """Memory that the tensors of one file only pass through, on their way to a device.

    `pieces` yields memory for all bytes of all tensors, in order, and takes it back when it was `hashed`: that is
    called once for each piece, oldest first, from whichever thread did it. At most a piece that waits and one that is
    hashed are out at a time.
    """

    def pieces(self) -> Iterator[Piece]: ...

    def hashed(self) -> None: ...


# Given the tensors of one file in order, those that are to be skipped too, and the names of those that are not.
Stage = Callable[[Sequence[TensorInfo], frozenset[str]], Staging]


@dataclass(frozen=True)
class VerifiedRead:
    """What a checkpoint turned out to hold, every byte of it as the manifest says.

    `configs` are the bytes of each file without tensors; `files` the stat of every file of the manifest, taken before
    its bytes were read and the same after; `tensors` those that were allocated, by file, in the order of their bytes;
    `metadata` the `__metadata__` of each file that tensors came from.
    """

    configs: dict[str, bytes]
    files: dict[str, FileStat]
    tensors: dict[str, tuple[TensorInfo, ...]]
    metadata: dict[str, dict[str, str]]
    size_bytes: int
    read_s: float


def read_verified(
    checkpoint: Path | CheckpointRoot,
    manifest: CheckpointManifest,
    *,
    allocate: Allocate | None = None,
    stage: Stage | None = None,
    on_configs: OnConfigs | None = None,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> VerifiedRead:
    """Read everything and return what was read, only if all of this holds.

    1. each file of the manifest is there, inside the checkpoint, and has its digest (TrustError, naming it)
    2. no file changed between the moment it was opened and its last byte (TrustError)
    3. the index names files of the manifest, and each has the tensors it should (ConfigError)
    4. each header is a safetensors header of that file, and no tensor comes from two files (ConfigError)
    5. the configs are no more than MAX_CONFIGS_BYTES (ConfigError)

    `allocate` is called once a tensor, in this thread and before any tensor is read, file by file in the order of their
    bytes; it returns writable contiguous memory of exactly `size_bytes`. A tensor that the index places in another file
    is read past. The first failure stops everything; a file that is both damaged and untrue is a TrustError.

    `on_configs` is given the configs, as soon as they are verified and before any memory is asked for.

    With `stage` instead the tensors go through memory that is used again, in pieces: it is called once a file, and what
    it makes of the bytes may be used no sooner either.
    """
    if (allocate is None) == (stage is None):
        raise ValueError("the tensors need memory to go to, or to go through")
    begun = time.monotonic()
    root = find_root(checkpoint)
    stats = present(root, stat_files(root, manifest.digests))
    read = _Read(root, manifest, {path: stat.size_bytes for path, stat in stats.items()}, threads, on_progress)
    configs = read.configs()
    if on_configs is not None:
        on_configs(configs)
    opened = read.headers(tensor_files(manifest, configs, what=f"checkpoint {root}"))
    if allocate is not None:
        read.allocate(opened, allocate)
    if stage is not None:
        read.stage(opened, stage)
    read.tensors(opened)
    return VerifiedRead(
        configs=configs,
        files=read.files,
        tensors={path: tuple(file.loaded) for path, file in opened.items()},
        metadata={path: file.header.metadata for path, file in opened.items()},
        size_bytes=read.bytes_total,
        read_s=time.monotonic() - begun,
    )


@dataclass(frozen=True)
class _TensorFile:
    stream: FileStream
    header: Header
    loaded: list[TensorInfo]


class _Read:
    """One verified read, from stage to stage. Each stage leaves no descriptor open when it fails."""

    def __init__(
        self,
        root: CheckpointRoot,
        manifest: CheckpointManifest,
        sizes_bytes: Mapping[str, int],
        threads: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.sizes_bytes = sizes_bytes
        self.bytes_total = sum(sizes_bytes.values())
        self.files: dict[str, FileStat] = {}
        self._threads = threads
        self._on_progress = on_progress

    def configs(self) -> dict[str, bytes]:
        """Read the configs into memory."""
        paths = [path for path in self.sizes_bytes if is_config(path)]
        total_bytes = sum(self.sizes_bytes[path] for path in paths)
        if total_bytes > MAX_CONFIGS_BYTES:
            largest = max(paths, key=lambda path: self.sizes_bytes[path])
            raise ConfigError(
                f"checkpoint {self.root}: files without tensors are {total_bytes} bytes, more than the "
                f"{MAX_CONFIGS_BYTES} allowed; the largest is {largest}"
            )
        memory = {path: bytearray(self.sizes_bytes[path]) for path in paths}
        streams = self._streams(paths)
        for stream in streams:
            stream.destination = iter([[memoryview(memory[stream.path])]])
        self._run(streams)
        return {path: bytes(memory[path]) for path in paths}

    def headers(self, wanted: Mapping[str, frozenset[str]]) -> dict[str, _TensorFile]:
        """Open the tensor files, read their headers, and settle which tensor comes from which file."""
        streams = {stream.path: stream for stream in self._streams(wanted)}
        try:
            with ThreadPoolExecutor(WAITING_THREADS) as pool:
                found = dict(zip(streams, pool.map(_read_header, streams.values()), strict=True))
            faults = {path: header for path, header in found.items() if isinstance(header, ConfigError)}
            headers = {path: header for path, header in found.items() if isinstance(header, Header)}
            if not faults:
                loaded, faults = _settle(self.root, headers, wanted)
            if faults:
                self._blame(faults)
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
        return {path: _TensorFile(streams[path], headers[path], loaded[path]) for path in streams}

    def allocate(self, opened: Mapping[str, _TensorFile], allocate: Allocate) -> None:
        """Get memory for every tensor, for the streams to fill."""
        with _closed_on_error(opened):
            for path, file in opened.items():
                loaded = set(file.loaded)
                file.stream.destination = _pieces(
                    [_memory(allocate, tensor, path) if tensor in loaded else tensor for tensor in file.header.tensors]
                )

    def stage(self, opened: Mapping[str, _TensorFile], stage: Stage) -> None:
        """Get what the tensors of each file go through."""
        with _closed_on_error(opened):
            for file in opened.values():
                staging = stage(file.header.tensors, frozenset(tensor.name for tensor in file.loaded))
                file.stream.destination, file.stream.on_hashed = staging.pieces(), staging.hashed

    def tensors(self, opened: Mapping[str, _TensorFile]) -> None:
        """Read the tensors to where they are to go, and past everything else."""
        others = [path for path in self.sizes_bytes if path not in self.files and path not in opened]
        self._run([*(file.stream for file in opened.values()), *self._streams(others)])

    def _blame(self, faults: Mapping[str, ConfigError]) -> None:
        """Raise the first fault, unless the file is not the one that was signed: then that is what is wrong with it."""
        run_streams(self._streams(faults), threads=self._threads)
        raise next(iter(faults.values()))

    def _streams(self, paths: Iterable[str]) -> list[FileStream]:
        sizes_bytes = {path: self.sizes_bytes[path] for path in paths}
        return make_streams(
            self.root,
            sizes_bytes,
            algorithm=self.manifest.algorithm,
            expected=self.manifest.digests,
            threads=self._threads,
        )

    def _run(self, streams: list[FileStream]) -> None:
        files_before = len(self.files)
        bytes_before = sum(self.sizes_bytes[path] for path in self.files)

        def report(progress: Progress) -> None:
            if self._on_progress:
                files_done, bytes_done = files_before + progress.files_done, bytes_before + progress.bytes_done
                self._on_progress(Progress(files_done, len(self.sizes_bytes), bytes_done, self.bytes_total))

        run_streams(streams, threads=self._threads, on_progress=report)
        self.files.update((stream.path, stream.outcome.stat) for stream in streams if stream.outcome)


@contextmanager
def _closed_on_error(opened: Mapping[str, _TensorFile]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for file in opened.values():
            file.stream.close()
        raise


def _read_header(stream: FileStream) -> Header | ConfigError:
    """Read a file's header and take it into the digest. A fault is returned: whose fault it is shows the digest."""
    stream.open()
    try:
        header, data = read_header(stream.fileno(), what=f"checkpoint {stream.root}: {stream.path}")
    except ConfigError as fault:
        return fault
    stream.skip(data)
    return header


def _settle(
    root: CheckpointRoot, headers: Mapping[str, Header], wanted: Mapping[str, frozenset[str]]
) -> tuple[dict[str, list[TensorInfo]], dict[str, ConfigError]]:
    """Return the tensors to load from each file, and what is wrong with which file."""
    placed = {name: path for path, names in wanted.items() for name in names}
    owner: dict[str, str] = {}
    loaded: dict[str, list[TensorInfo]] = {}
    faults: dict[str, ConfigError] = {}
    for path, header in headers.items():
        loaded[path] = [tensor for tensor in header.tensors if placed.get(tensor.name, path) == path]
        names = {tensor.name for tensor in loaded[path]}
        if lacking := sorted(wanted[path] - names):
            faults[path] = ConfigError(
                f"checkpoint {root}: {path} lacks tensor {lacking[0][:200]!r}, which the index places in it"
            )
        for name in names:
            if name in owner:
                faults[path] = faults[owner[name]] = ConfigError(
                    f"checkpoint {root}: tensor {name[:200]!r} is in {owner[name]} and {path}, and no index says which"
                )
            owner[name] = path
    return loaded, faults


def _memory(allocate: Allocate, tensor: TensorInfo, path: str) -> memoryview:
    view = memoryview(allocate(tensor))
    if view.nbytes != tensor.size_bytes or view.readonly or not view.c_contiguous:
        raise ValueError(f"{path}: {tensor.name}: the memory is not {tensor.size_bytes} writable contiguous bytes")
    # A view with a zero in its shape cannot be cast, and has no bytes to give.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _pieces(parts: Iterable[memoryview | TensorInfo]) -> Iterator[Piece]:
    """Yield memory for the file's bytes in order, about PIECE_BYTES at a time; scratch for what is only read past."""
    piece: Piece = []
    room = PIECE_BYTES
    for part in parts:
        size_bytes = part.size_bytes if isinstance(part, TensorInfo) else part.nbytes
        begin = 0
        while begin < size_bytes:
            end = min(size_bytes, begin + room)
            piece.append(memoryview(bytearray(end - begin)) if isinstance(part, TensorInfo) else part[begin:end])
            room -= end - begin
            begin = end
            if room == 0:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece
