"""Which checkpoint this is, and who says so. Answers from one small file, however many shards there are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.checkpoint.digests import digest_files, stat_files
from appliance.checkpoint.files import CheckpointRoot, find_root
from appliance.checkpoint.manifest import Algorithm, CheckpointManifest
from appliance.checkpoint.pins import Pins
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.streams import OnProgress
from appliance.errors import TrustError

if TYPE_CHECKING:
    from appliance.checkpoint.keyring import Keyring

UNSIGNED = "unsigned"


@dataclass(frozen=True)
class Trust:
    """Whom this host believes: the keys of a keyring (policy `signed`), or only its own eyes (policy `local`)."""

    keyring: "Keyring | None" = None
    pins: Pins | None = None

    @classmethod
    def signed(cls, keyring: "Keyring") -> "Trust":
        """A checkpoint needs a signature by one of these keys."""
        return cls(keyring=keyring)

    @classmethod
    def local(cls, state_dir: Path) -> "Trust":
        """A checkpoint is pinned as it is when first seen; pins are kept below STATE/pins."""
        return cls(pins=Pins.below(state_dir))


@dataclass(frozen=True)
class Identity:
    """A checkpoint that is known. `signer` is a key's name or "unsigned"; `fingerprint` that key's, or empty."""

    root: CheckpointRoot
    manifest: CheckpointManifest
    signer: str
    fingerprint: str = ""

    @property
    def root_digest(self) -> str:
        return self.manifest.root_digest

    @property
    def is_signed(self) -> bool:
        return bool(self.fingerprint)


def identify(
    checkpoint: Path | CheckpointRoot,
    trust: Trust,
    *,
    algorithm: Algorithm = "sha256",
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Identity:
    """Return the checkpoint's identity. Says nothing yet about the files being as the manifest lists them.

    Policy `signed` opens one file of the checkpoint, `model.sig`, and refuses (TrustError) what `verify` refuses.
    Policy `local` opens none, unless it sees this checkpoint for the first time: then it hashes all of it, with
    `algorithm`, and pins that. `threads` and `on_progress` are for that hashing.
    """
    root = find_root(checkpoint)
    if trust.keyring is not None:
        # Only signatures need cryptography, and a host that pins does without.
        from appliance.checkpoint.signature import verify_checkpoint_signature

        verified = verify_checkpoint_signature(root, trust.keyring)
        return Identity(root, verified.manifest, verified.signer.name, verified.signer.fingerprint)
    if trust.pins is None:
        raise ValueError("a trust needs a keyring or pins")
    pinned = trust.pins.pin(root, algorithm=algorithm, threads=threads, on_progress=on_progress)
    return Identity(root, pinned, UNSIGNED)


def check_stats(identity: Identity, recorded: Mapping[str, FileStat]) -> tuple[str, ...]:
    """Return the files whose stat is not the recorded one, sorted: changed, gone, or never recorded. Opens nothing."""
    now = stat_files(identity.root, identity.manifest.digests)
    return tuple(sorted(path for path, found in now.items() if found is None or found != recorded.get(path)))


def check_files(
    identity: Identity,
    paths: Iterable[str],
    *,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, FileStat]:
    """Hash these files and return their stats; TrustError, naming it, on the first that is missing or differs."""
    manifest = identity.manifest
    expected = {}
    for path in paths:
        if path not in manifest.digests:
            raise TrustError(f"checkpoint {identity.root}: {path[:200]!r} is not in its manifest")
        expected[path] = manifest.digests[path]
    hashed = digest_files(
        identity.root,
        expected,
        algorithm=manifest.algorithm,
        expected=expected,
        threads=threads,
        on_progress=on_progress,
    )
    return {path: result.stat for path, result in hashed.items()}
