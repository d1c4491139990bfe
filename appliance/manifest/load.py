"""From the path of a manifest to a Manifest, or to every error that is in it."""

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigError
from appliance.manifest.document import MAX_BYTES, Document, parse_document
from appliance.manifest.problem import ManifestError, Problem, SettingPath
from appliance.manifest.schema import Manifest
from appliance.manifest.validation import validated

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManifestFile:
    """A manifest that holds, with what is odd about it and where everything stands."""

    path: Path
    manifest: Manifest
    warnings: tuple[Problem, ...]
    document: Document

    def error(self, setting: SettingPath, message: str, *, hint: str | None = None) -> ManifestError:
        """Return the error for what only the host can tell, such as a GPU that is not there; the caller raises it."""
        return ManifestError([Problem(self.document.value_place(setting), setting, message, hint)])


def load_manifest(path: Path) -> Manifest:
    """Return the manifest and log its warnings. ConfigError with every error in it, each with its place."""
    return load_manifest_file(path).manifest


def load_manifest_file(path: Path) -> ManifestFile:
    """Return what `read_manifest` returns, and log its warnings."""
    file = read_manifest(path)
    for warning in file.warnings:
        log.warning("%s", warning)
    return file


def read_manifest(path: Path) -> ManifestFile:
    """Return the manifest with its warnings and places. ConfigError with every error in it, each with its place."""
    document = parse_document(_source(path), file=str(path))
    manifest, warnings = validated(document, folder=path.absolute().parent)
    return ManifestFile(path, manifest, warnings, document)


def _source(path: Path) -> bytes:
    try:
        # A FIFO would keep us waiting for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the manifest {path}: {reason}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"cannot read the manifest {path}: not a regular file")
        return _read_all(fd)
    except OSError as error:
        raise ConfigError(f"cannot read the manifest {path}: {error.strerror}") from None
    finally:
        os.close(fd)


def _read_all(fd: int) -> bytes:
    """Return what is in a file, but of a file that is too large not much more than is needed to tell."""
    chunks = []
    missing = MAX_BYTES + 1
    while missing > 0 and (chunk := os.read(fd, missing)):
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)
