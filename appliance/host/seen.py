"""What was looked at last: without it, a refused checkpoint of 100 GB would be hashed again every minute."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import HostError
from appliance.manifest.schema import Manifest


@dataclass(frozen=True)
class Seen:
    """Owns the file that remembers it; systemd keeps its folder until the next boot."""

    path: Path

    def look(self, manifest: Manifest, name: str) -> str:
        """Return a digest of the stat of every file of a model's checkpoints and of every key. Opens none of them."""
        digest = hashlib.sha256()
        for root in (*manifest.model(name).checkpoints, *manifest.trust.keys):
            for line in _stats(root):
                digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def last(self) -> str:
        """Return what was saved; empty where nothing was."""
        with contextlib.suppress(OSError, ValueError):
            return self.path.read_text()
        return ""

    def save(self, look: str) -> None:
        try:
            self.path.write_text(look)
        except OSError as error:
            raise HostError(f"cannot write {self.path}: {error.strerror}") from error


def _stats(root: Path) -> Iterator[str]:
    yield _stat(root)
    for folder, folders, files in os.walk(root):
        folders.sort()
        for file in sorted(files):
            yield _stat(Path(folder, file))


def _stat(path: Path) -> str:
    try:
        found = path.stat()
    except OSError as error:
        return f"{path} {error.errno}\n"
    return f"{path} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}\n"
