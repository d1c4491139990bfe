"""The files of a checkpoint directory, found without opening one, and opened without being led astray.

A link is followed as long as it stays inside the checkpoint or, in a Hugging Face cache
(`models--ORG--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH`), inside that `models--` directory. What OpenSSF's
`model_signing` leaves out of a signature is left out here too, and so are the notes that a Hugging Face download leaves
in `.cache/huggingface`.
"""

import errno
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from appliance.checkpoint.os_refusal import os_refusal
from appliance.descriptors import Descriptor
from appliance.errors import ConfigError, TrustError

SIGNATURE_NAME = "model.sig"
IGNORED = (".cache/huggingface", ".git", ".gitattributes", ".github", ".gitignore", SIGNATURE_NAME)
MAX_FILES = 10_000
MAX_DEPTH = 32
MAX_PATH_LENGTH = 1024
MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class CheckpointRoot:
    """A checkpoint's directory with every link of its own path resolved, and the directory that links must stay in."""

    path: Path
    boundary: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class CheckpointFile:
    """One file: its path below the root with `/` between names, its size, and whether it is a symbolic link."""

    path: str
    size_bytes: int
    is_link: bool


def find_root(checkpoint: Path | CheckpointRoot) -> CheckpointRoot:
    """Return where the checkpoint really is; ConfigError unless it is a directory."""
    if isinstance(checkpoint, CheckpointRoot):
        return checkpoint
    try:
        path = checkpoint.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise ConfigError(f"checkpoint {checkpoint}: {getattr(error, 'strerror', None) or error}") from error
    if not path.is_dir():
        raise ConfigError(f"checkpoint {checkpoint} is not a directory")
    if not str(path).isprintable():  # which half a surrogate, for what is not UTF-8, is not either
        raise ConfigError(f"checkpoint {str(path)!r}: the path has unprintable characters")
    for parent in path.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return CheckpointRoot(path, parent.parent)
    return CheckpointRoot(path, path)


def list_files(root: CheckpointRoot, *, ignored: Collection[str] = IGNORED) -> tuple[CheckpointFile, ...]:
    """Return every file of the checkpoint, sorted by path. Walks directories and opens no file.

    TrustError, naming the path: a link that leads out, nowhere, in a circle or to a directory (`model_signing` looks
    past those, so what is behind one could not be signed); a socket, pipe or device; a name that is not printable
    UTF-8; a path too long or too deep; too many files.
    """
    found: list[CheckpointFile] = []
    pending = [""]
    while pending:
        folder = pending.pop()
        for entry, is_folder in _entries(root.path / folder):
            path = f"{folder}/{entry.name}" if folder else entry.name
            if is_ignored(path, ignored=ignored):
                continue
            if reason := path_fault(path):
                raise TrustError(f"checkpoint {root}: file name {path!r} {reason}")
            if is_folder:
                pending.append(path)
            else:
                found.append(_file(root, path, entry))
            if len(found) + len(pending) > MAX_FILES:
                raise TrustError(f"checkpoint {root}: more than {MAX_FILES} files")
    return tuple(sorted(found, key=lambda file: file.path))


def is_ignored(path: str, *, ignored: Collection[str] = IGNORED) -> bool:
    """Tell whether the path is one of these or below one of these."""
    return any(path == name or path.startswith(name + "/") for name in ignored)


def path_fault(path: str) -> str | None:
    """Say what is wrong with a path as a name for a file inside a checkpoint; None when nothing is."""
    try:
        names = path.encode().split(b"/")
    except UnicodeEncodeError:
        return "is not UTF-8"
    if not path.isprintable():
        return "has unprintable characters"
    if len(path) > MAX_PATH_LENGTH or len(names) > MAX_DEPTH or max(map(len, names)) > MAX_NAME_BYTES:
        return f"is longer than {MAX_PATH_LENGTH} characters, {MAX_NAME_BYTES} bytes a name or {MAX_DEPTH} names"
    if not path or path.startswith("/") or b".." in names:
        return "does not stay inside the checkpoint"
    if str(PurePosixPath(path)) != path or path == ".":
        return "is not written in its shortest form"
    return None


def locate(root: CheckpointRoot, path: str) -> Path:
    """Return the real path of one of the checkpoint's files; TrustError where it leads out of bounds or nowhere."""
    if reason := path_fault(path):
        raise TrustError(f"checkpoint {root}: file name {path!r} {reason}")
    try:
        real = (root.path / path).resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        lost = "is a link that leads nowhere" if (root.path / path).is_symlink() else "is missing"
        raise TrustError(f"checkpoint {root}: {path} {lost}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        if isinstance(error, RuntimeError) or error.errno == errno.ELOOP:
            raise TrustError(f"checkpoint {root}: {path} is a link that leads in a circle") from error
        raise os_refusal(error, f"look up {root.path / path}") from error
    if not real.is_relative_to(root.boundary):
        raise TrustError(
            f"checkpoint {root}: {path} is a link that leads out of {root.boundary}",
            hint="put the file itself there; links may only stay inside the checkpoint or its Hugging Face cache",
        )
    return real


def open_file(root: CheckpointRoot, path: str) -> Descriptor:
    """Open one of the checkpoint's regular files for reading; TrustError for anything else. The caller closes it."""
    descriptor = None
    if "/" not in path and path_fault(path) is None:
        # Most files are not links: one system call then says all that `locate` would find out.
        descriptor = _open(root.path / path)
    if descriptor is None:
        descriptor = _open(locate(root, path))
    if descriptor is None:
        raise TrustError(f"checkpoint {root}: {path} is not a regular file, or changed while it was looked up")
    try:
        mode = os.fstat(descriptor.fileno()).st_mode
    except OSError as error:
        descriptor.close()
        raise os_refusal(error, f"look at {root.path / path}") from error
    if not stat.S_ISREG(mode):
        descriptor.close()
        raise TrustError(f"checkpoint {root}: {path} is not a regular file")
    return descriptor


def _open(path: Path) -> Descriptor | None:
    """Open it; None for a link, a socket, or nothing there."""
    try:
        # O_NONBLOCK: a pipe put there since would otherwise hold us for ever before we see that it is one.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        return Descriptor(os.open(path, flags))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.ENXIO):
            return None
        raise os_refusal(error, f"open {path}") from error


def _entries(folder: Path) -> "list[tuple[os.DirEntry[str], bool]]":
    """Return what is in a directory, and whether it is a directory itself (a link to one is not)."""
    try:
        with os.scandir(folder) as entries:
            return [(entry, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError as error:
        raise os_refusal(error, f"list {folder}") from error


def _file(root: CheckpointRoot, path: str, entry: "os.DirEntry[str]") -> CheckpointFile:
    try:
        is_link = entry.is_symlink()
        result = locate(root, path).lstat() if is_link else entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        raise TrustError(f"checkpoint {root}: {path} went away while the directory was listed") from None
    except OSError as error:
        raise os_refusal(error, f"look at {root.path / path}") from error
    if stat.S_ISDIR(result.st_mode):
        raise TrustError(f"checkpoint {root}: {path} is a link to a directory, and only links to files are followed")
    if not stat.S_ISREG(result.st_mode):
        raise TrustError(f"checkpoint {root}: {path} is not a regular file")
    return CheckpointFile(path, result.st_size, is_link)
