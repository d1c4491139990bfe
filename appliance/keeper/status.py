"""What a keeper says of itself, to its clients and on /health: bounded, so that it fits a message whatever happened."""

import json
import os
from typing import Any

from appliance.fingerprint import Fingerprint
from appliance.keeper.holdings import Holdings

MAX_BYTES = 48 << 10  # as JSON; the message around it may have 64 KiB
SHOWN_VERDICTS = 5
EVICTED = "evicted by the operator"
# How many leases and verdicts are shown, and how many characters of what others chose.
_BUDGETS = ((512, SHOWN_VERDICTS, 500), (64, 3, 100), (8, 1, 20), (0, 0, 20))


def status(holdings: Holdings, *, model: str, target: Fingerprint | None, signer: str) -> dict[str, Any]:
    """Return the status as JSON data of at most `MAX_BYTES`; `omitted` counts leases left out to fit."""
    for leases, verdicts, chars in _BUDGETS:
        body = _status(holdings, model, target, signer, leases=leases, verdicts=verdicts, chars=chars)
        if len(json.dumps(body, separators=(",", ":"))) <= MAX_BYTES:
            break
    return body


def root_digest(holdings: Holdings) -> str:
    """Return the digest of what is held, empty where nothing is."""
    return next((shard.record.fingerprint.root_digest for shard in holdings.shards()), "")


def _status(
    holdings: Holdings,
    model: str,
    target: Fingerprint | None,
    signer: str,
    *,
    leases: int,
    verdicts: int,
    chars: int,
) -> dict[str, Any]:
    sorted_leases = sorted(holdings.leases, key=lambda lease: lease.since)
    return {
        "model": model,
        "state": str(holdings.state),
        "pid": os.getpid(),
        "progress": holdings.progress[:chars],
        "trouble": _trouble(holdings)[: 4 * chars],
        "refused": bool(holdings.refusal),
        "root_digest": root_digest(holdings),
        "target_root_digest": "" if target is None else target.root_digest,
        "signer": next((shard.record.signer for shard in holdings.shards()), signer),
        "size_bytes": holdings.size_bytes,
        "shards": [
            {
                "role": shard.record.role,
                "rank": shard.record.rank,
                "device": shard.record.device,
                "shard_id": shard.record.shard_id,
                "size_bytes": shard.record.size_bytes,
                "slabs": len(shard.slabs),
                "phases_s": _some(shard.record.phases_s, chars),
                "scrub": None if (scrub := holdings.scrub(shard)) is None else scrub.to_json(),
            }
            for shard in holdings.shards()
        ],
        "leases": [
            lease.to_json() | {"client": lease.client[:chars], "phases_s": _some(lease.phases_s, chars)}
            for lease in sorted_leases[:leases]
        ],
        "loaders": [
            {"client": client[:chars], "pid": pid} for pid, client in sorted(holdings.loaders().items())[:leases]
        ],
        "omitted": max(len(sorted_leases) - leases, 0),
        "verdicts": [_short(verdict, chars) for verdict in list(holdings.verdicts)[-verdicts:]] if verdicts else [],
    }


def _trouble(holdings: Holdings) -> str:
    return holdings.refusal or (EVICTED if holdings.evicted else holdings.trouble)


def _short(verdict: dict[str, Any], chars: int) -> dict[str, Any]:
    fields = [[text[:chars] for text in field] for field in verdict["fields"][: chars // 25]]
    return verdict | {"client": verdict["client"][:chars], "detail": verdict["detail"][:chars], "fields": fields}


def _some(phases_s: Any, chars: int) -> dict[str, float]:
    return {name[:40]: seconds for name, seconds in list(phases_s.items())[: chars // 25]}
