"""Content digests of a checkpoint's files, SHA-256 or BLAKE3, and the checkpoint manifest made of them."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from appliance.checkpoint.file_stream import Hashed
from appliance.checkpoint.files import IGNORED, CheckpointRoot, find_root, list_files
from appliance.checkpoint.manifest import Algorithm, CheckpointManifest, make_manifest
from appliance.checkpoint.os_refusal import os_refusal
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.streams import OnProgress, make_streams, run_streams
from appliance.errors import ConfigError, TrustError

_STAT_THREADS = 16


def digest_checkpoint(
    checkpoint: Path | CheckpointRoot,
    *,
    algorithm: Algorithm = "sha256",
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> CheckpointManifest:
    """Return the manifest of the files as they are now. Hashing is parallel over files (BLAKE3: within one too).

    ConfigError where there is no file, TrustError where one is not fit for a checkpoint (see `list_files`) or changes
    while it is hashed.
    """
    root = find_root(checkpoint)
    files = list_files(root)
    if not files:
        raise ConfigError(f"checkpoint {root} has no files")
    sizes_bytes = {file.path: file.size_bytes for file in files}
    hashed = _hash(root, sizes_bytes, algorithm=algorithm, expected=None, threads=threads, on_progress=on_progress)
    return make_manifest(
        root.path.name,
        algorithm,
        [(path, result.digest) for path, result in hashed.items()],
        allow_symlinks=any(file.is_link for file in files),
        ignored=IGNORED,
        what=f"checkpoint {root}",
    )


def digest_files(
    root: CheckpointRoot,
    paths: Iterable[str],
    *,
    algorithm: Algorithm,
    expected: Mapping[str, str] | None = None,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Hashed]:
    """Return digest and stat of each path, in order.

    TrustError, naming it, for one that is missing, changes meanwhile or, with `expected`, has another digest.
    """
    stats = stat_files(root, paths)
    sizes_bytes = {path: found.size_bytes for path, found in present(root, stats).items()}
    return _hash(root, sizes_bytes, algorithm=algorithm, expected=expected, threads=threads, on_progress=on_progress)


def stat_files(root: CheckpointRoot, paths: Iterable[str]) -> dict[str, FileStat | None]:
    """Return the stat of each path, links followed, without opening one; None where there is no regular file."""
    paths = list(paths)
    with ThreadPoolExecutor(max_workers=min(_STAT_THREADS, max(1, len(paths) // 4))) as pool:
        # In parallel, because a remote file system can take its time over each.
        return dict(zip(paths, pool.map(lambda path: _stat(root, path), paths), strict=True))


def present(root: CheckpointRoot, stats: dict[str, FileStat | None]) -> dict[str, FileStat]:
    """Return the stats if no file is missing; TrustError naming the first that is."""
    for path, found in stats.items():
        if found is None:
            raise TrustError(f"checkpoint {root}: {path} is missing or is not a regular file")
    return {path: found for path, found in stats.items() if found is not None}


def _hash(
    root: CheckpointRoot,
    sizes_bytes: Mapping[str, int],
    *,
    algorithm: Algorithm,
    expected: Mapping[str, str] | None,
    threads: int | None,
    on_progress: OnProgress | None,
) -> dict[str, Hashed]:
    streams = make_streams(root, sizes_bytes, algorithm=algorithm, expected=expected, threads=threads)
    run_streams(streams, threads=threads, on_progress=on_progress)
    return {stream.path: stream.outcome for stream in streams if stream.outcome}


def _stat(root: CheckpointRoot, path: str) -> FileStat | None:
    full = os.path.join(root.path, path)  # noqa: PTH118  a Path is slower to make than a file is to stat
    try:
        return FileStat.take(full)
    except OSError as error:
        raise os_refusal(error, f"look at {full}") from error
