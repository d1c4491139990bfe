"""Pins: digests of an unsigned checkpoint that this host computed itself when it first saw it.

Policy `local` has no signer to ask. It notices every change since the first look and says nothing about before it. One
JSON file a checkpoint below STATE/pins/, named after the real path of the checkpoint. What root pins belongs to the
owner of STATE: it is for processes that are not root.
"""

import errno
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoint.digests import digest_checkpoint
from appliance.checkpoint.durable_file import write_durably
from appliance.checkpoint.files import IGNORED, CheckpointRoot, find_root
from appliance.checkpoint.json_text import parse_object
from appliance.checkpoint.manifest import Algorithm, CheckpointManifest, make_manifest
from appliance.checkpoint.os_refusal import os_refusal
from appliance.checkpoint.small_file import read_small_file
from appliance.checkpoint.streams import OnProgress
from appliance.errors import ConfigError, TrustError

VERSION = 1
MAX_PIN_BYTES = 16 << 20

_FIELDS = frozenset({"v", "checkpoint", "algorithm", "allow_symlinks", "files", "root_digest"})


@dataclass(frozen=True)
class Pins:
    """The pins of one host, in a directory that only the appliance may write."""

    directory: Path

    @classmethod
    def below(cls, state_dir: Path) -> "Pins":
        """Return the pins in a state directory."""
        return cls(state_dir / "pins")

    def path(self, checkpoint: Path | CheckpointRoot) -> Path:
        """Return where the checkpoint's pin is or would be."""
        root = find_root(checkpoint)
        key = hashlib.sha256(os.fsencode(root.path)).hexdigest()[:32]
        return self.directory / f"{key}.json"

    def load(self, checkpoint: Path | CheckpointRoot) -> CheckpointManifest | None:
        """Return what was pinned, None where nothing was. Opens no file of the checkpoint.

        TrustError for a pin that is damaged, of another checkpoint, not a regular file, or writable by everybody.
        """
        root = find_root(checkpoint)
        data = _read(self.path(root))
        return None if data is None else _decode(data, root, what=f"pin {self.path(root)}")

    def pin(
        self,
        checkpoint: Path | CheckpointRoot,
        *,
        algorithm: Algorithm = "sha256",
        threads: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> CheckpointManifest:
        """Return what is pinned, computing and writing the pin where there is none yet. Never changes one."""
        root = find_root(checkpoint)
        pinned = self.load(root)
        if pinned is not None:
            return pinned
        manifest = digest_checkpoint(root, algorithm=algorithm, threads=threads, on_progress=on_progress)
        try:
            self._write(root, manifest, replace=False)
        except ConfigError:
            # Somebody else may have pinned it meanwhile; the first pin counts.
            pinned = self.load(root)
            if pinned is None:
                raise
            return pinned
        return manifest

    def repin(
        self,
        checkpoint: Path | CheckpointRoot,
        *,
        algorithm: Algorithm = "sha256",
        threads: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> CheckpointManifest:
        """Pin the checkpoint as it is now, whatever was pinned before: the operator says that a change is wanted."""
        root = find_root(checkpoint)
        manifest = digest_checkpoint(root, algorithm=algorithm, threads=threads, on_progress=on_progress)
        self._write(root, manifest, replace=True)
        return manifest

    def _write(self, root: CheckpointRoot, manifest: CheckpointManifest, *, replace: bool) -> None:
        try:
            self.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            owner = _give_to_owner(self.directory) if os.geteuid() == 0 else None
        except OSError as error:
            raise os_refusal(error, f"make {self.directory}") from error
        write_durably(self.path(root), _encode(root, manifest), mode=0o640, replace=replace, owner=owner)


def _give_to_owner(directory: Path) -> tuple[int, int]:
    """Give a directory to whoever owns the one that it lies in; return that user and group."""
    above = directory.parent.stat()
    # That owner could put a link here, to a directory that is none of theirs.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(fd, above.st_uid, above.st_gid)
    finally:
        os.close(fd)
    return above.st_uid, above.st_gid


def _read(path: Path) -> bytes | None:
    try:
        file = read_small_file(path, limit_bytes=MAX_PIN_BYTES, follow_link=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TrustError(f"pin {path} is a link") from error
        raise os_refusal(error, f"read pin {path}") from error
    if file is None or file.mode & stat.S_IWOTH:
        raise TrustError(
            f"pin {path} is not a regular file, or everybody may write it", hint=f"look at it, then chmod 640 {path}"
        )
    return file.data


def _encode(root: CheckpointRoot, manifest: CheckpointManifest) -> bytes:
    pin = {
        "v": VERSION,
        "checkpoint": str(root.path),
        "algorithm": manifest.algorithm,
        "allow_symlinks": manifest.allow_symlinks,
        "files": dict(manifest.digests),
        "root_digest": manifest.root_digest,
    }
    return json.dumps(pin, indent=1, ensure_ascii=False).encode() + b"\n"


def _decode(data: bytes, root: CheckpointRoot, *, what: str) -> CheckpointManifest:
    pin = parse_object(data, what=what, limit_bytes=MAX_PIN_BYTES)
    files = pin.get("files")
    well_formed = (
        set(pin) == _FIELDS
        and pin["v"] == VERSION
        and isinstance(files, dict)
        and all(isinstance(digest, str) for digest in files.values())
        and isinstance(pin["algorithm"], str)
        and isinstance(pin["allow_symlinks"], bool)
    )
    if not well_formed or not isinstance(files, dict):
        raise TrustError(f"{what}: damaged, or not a pin of version {VERSION}", hint="pin the checkpoint again")
    if pin["checkpoint"] != str(root.path):
        raise TrustError(
            f"{what}: is a pin of {str(pin['checkpoint'])[:200]!r}, not of {root}", hint="pin the checkpoint again"
        )
    manifest = make_manifest(
        root.path.name,
        pin["algorithm"],
        files.items(),
        allow_symlinks=pin["allow_symlinks"],
        ignored=IGNORED,
        what=what,
    )
    if pin["root_digest"] != manifest.root_digest:
        raise TrustError(
            f"{what}: its root digest is not that of its files: it was changed since", hint="pin the checkpoint again"
        )
    return manifest
