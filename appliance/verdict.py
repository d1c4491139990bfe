"""How an attempt to get weights ended: one word, a reason code, and the facts that differ."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from appliance.fingerprint import Difference


class Outcome(StrEnum):
    """`hit`: mapped from the keeper. `donated`: loaded from disk, then given to it. `refused`: neither."""

    HIT = "hit"
    DONATED = "donated"
    REFUSED = "refused"


class Reason(StrEnum):
    """Why a request was refused. A code for machines; the detail beside it is for people."""

    FINGERPRINT_DIFFERS = "fingerprint_differs"
    TARGET_DIFFERS = "target_differs"
    FILE_DIFFERS = "file_differs"
    NOT_RESIDENT = "not_resident"
    LOADING = "loading"
    LOADER_FAILED = "loader_failed"
    CHECKPOINT_REFUSED = "checkpoint_refused"
    OCCUPIED = "occupied"
    LEASED = "leased"
    UNKNOWN_SHARD = "unknown_shard"
    BAD_DONATION = "bad_donation"
    NOT_PERMITTED = "not_permitted"
    PROTOCOL = "protocol"
    BUSY = "busy"
    STALE_MEMORY = "stale_memory"
    NO_ROOM = "no_room"


@dataclass(frozen=True)
class Verdict:
    """One outcome, with its reason and the differing facts where there are any."""

    outcome: Outcome
    reason: Reason | None = None
    detail: str = ""
    fields: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        parts = [str(self.outcome)]
        if self.reason is not None:
            parts.append(f"({self.reason})")
        if self.detail:
            parts.append(self.detail)
        if self.fields:
            parts.append("; ".join(map(str, self.fields)))
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": str(self.outcome),
            "reason": None if self.reason is None else str(self.reason),
            "detail": self.detail,
            "fields": [[field.name, field.wanted, field.held] for field in self.fields],
        }


def refused(reason: Reason, detail: str = "", *, fields: tuple[Difference, ...] = ()) -> Verdict:
    return Verdict(Outcome.REFUSED, reason, detail, fields)
