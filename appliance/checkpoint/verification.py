"""Every byte of a checkpoint, hashed once: what was found right is remembered by the stat of each file.

A new checkpoint is looked at by whoever notices it, by the keeper before it lets the old weights go, and by the loader.
The loader hashes what it loads, always; of the others the second one need not read it all again.
"""

import json
import re
from pathlib import Path

from appliance.checkpoint.digests import stat_files
from appliance.checkpoint.durable_file import write_durably
from appliance.checkpoint.findings import check_all, check_listing
from appliance.checkpoint.identity import Identity, check_stats
from appliance.checkpoint.stat_record import FileStat
from appliance.checkpoint.streams import OnProgress
from appliance.errors import ApplianceError, TrustError
from appliance.turns import turn

MAX_RECORD_BYTES = 16 << 20

_DIGEST = re.compile(r"[0-9a-f]{64}")


def verify_all(identity: Identity, state_dir: Path, *, on_progress: OnProgress | None = None) -> bool:
    """Return once every file is as the manifest says and no other is there; TrustError with three lists if not.

    True where the files were hashed now, False where they were before and their stats, recorded below `state_dir`,
    have not changed since.
    """
    if _remembered(identity, state_dir) is not None:
        return False
    verified_stats(identity, state_dir, on_progress=on_progress)
    return True


def verified_stats(
    identity: Identity, state_dir: Path, *, on_progress: OnProgress | None = None
) -> dict[str, FileStat]:
    """Return the stat that each file had when it was verified, now or before; TrustError as `verify_all`.

    Of several processes that ask at once, one hashes and the others wait for what it found.
    """
    with turn(state_dir, f"verify-{identity.root_digest}"):
        if (known := _remembered(identity, state_dir)) is not None:
            return known
        before = stat_files(identity.root, identity.manifest.digests)
        check_all(identity, on_progress=on_progress).require_none(identity)
        after = stat_files(identity.root, identity.manifest.digests)
        stats = {path: stat for path, stat in after.items() if stat is not None}
        if changed := sorted(path for path in before if before[path] != stats.get(path)):
            raise TrustError(f"checkpoint {identity.root}: {changed[0]} changed while it was hashed")
        _save(_path(identity, state_dir), stats)
        return stats


def _remembered(identity: Identity, state_dir: Path) -> dict[str, FileStat] | None:
    known = _load(_path(identity, state_dir))
    if known is None or check_stats(identity, known):
        return None
    check_listing(identity).require_none(identity)
    return known


def _path(identity: Identity, state_dir: Path) -> Path:
    if not _DIGEST.fullmatch(identity.root_digest):
        raise ValueError("a root digest is 64 hexadecimal digits")
    return state_dir / "verified" / f"{identity.root_digest}.json"


def _load(record: Path) -> dict[str, FileStat] | None:
    """Return the stats of an earlier verification; None where there is no record, or none that can be read."""
    try:
        with record.open("rb") as file:
            data = json.loads(file.read(MAX_RECORD_BYTES))
        return {str(path): FileStat.from_json(stat) for path, stat in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, ApplianceError):
        return None


def _save(record: Path, stats: dict[str, FileStat]) -> None:
    """Remember it where that is possible: without a record the next one hashes again, and that is all."""
    data = json.dumps({path: stat.to_json() for path, stat in stats.items()}).encode()
    try:
        record.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        write_durably(record, data + b"\n", mode=0o640, replace=True)
    except (OSError, ApplianceError):
        return
