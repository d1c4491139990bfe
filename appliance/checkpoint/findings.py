"""What is wrong with a checkpoint's files: changed, missing, and extra ones, each by name."""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.checkpoint.digests import digest_files, stat_files
from appliance.checkpoint.files import IGNORED, list_files
from appliance.checkpoint.identity import Identity
from appliance.checkpoint.streams import OnProgress
from appliance.errors import TrustError

NAMED_AT_MOST = 20


@dataclass(frozen=True)
class Findings:
    """Three lists of paths, sorted: another digest than in the manifest; not there; there and not in the manifest."""

    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.extra)

    def __str__(self) -> str:
        """One line that names at most NAMED_AT_MOST files of each list and counts the rest."""
        lists = (("changed", self.changed), ("missing", self.missing), ("extra", self.extra))
        return "; ".join(f"{label}: {_named(paths)}" for label, paths in lists if paths) or "nothing found"

    def require_none(self, identity: Identity) -> None:
        """Return if there is nothing; else TrustError that names the files."""
        if self:
            again = "have it signed again" if identity.is_signed else "pin it again"
            raise TrustError(
                f"checkpoint {identity.root} is not what was {'signed' if identity.is_signed else 'pinned'}: {self}",
                hint=f"put the right files back or, if the change is wanted, {again}",
            )


def check_listing(identity: Identity) -> Findings:
    """Return missing and extra files, found by walking the directory: no file is opened, so none can be `changed`.

    Extra is what lies there without being in the manifest and without being ignored, by us or by the signer.
    """
    manifest = identity.manifest
    there = {file.path for file in list_files(identity.root, ignored=(*IGNORED, *manifest.ignored))}
    stats = stat_files(identity.root, manifest.digests)
    missing = [path for path, found in stats.items() if found is None]
    return Findings(missing=_sorted(missing), extra=_sorted(there - set(manifest.digests)))


def check_all(identity: Identity, *, threads: int | None = None, on_progress: OnProgress | None = None) -> Findings:
    """Hash every file and return all three lists. TrustError for a file that changes meanwhile or leads out."""
    manifest = identity.manifest
    found = check_listing(identity)
    hashed = digest_files(
        identity.root,
        [path for path in manifest.digests if path not in found.missing],
        algorithm=manifest.algorithm,
        threads=threads,
        on_progress=on_progress,
    )
    changed = [path for path, result in hashed.items() if result.digest != manifest.digests[path]]
    return Findings(changed=_sorted(changed), missing=found.missing, extra=found.extra)


def _sorted(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(paths))


def _named(paths: tuple[str, ...]) -> str:
    rest = len(paths) - NAMED_AT_MOST
    return ", ".join(path[:200] for path in paths[:NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")
