"""How each rank came to its weights, told to the process that started vLLM: a small file for each rank."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from appliance.client import RefusedError
from appliance.errors import ApplianceError, HostError, error_of_status
from appliance.record import ShardRecord
from appliance.verdict import Outcome as VerdictOutcome
from appliance.verdict import Reason, Verdict, refused

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """One rank's verdict and phases in seconds; or why it has no weights, and the exit status that this calls for."""

    role: str
    rank: int
    verdict: str = ""
    reason: str = ""
    root_digest: str = ""
    stage: str = ""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    exit_status: int = 0

    def ended(self, verdict: Verdict, phases_s: Mapping[str, float], record: ShardRecord) -> "Outcome":
        return dataclasses.replace(
            self,
            verdict=str(verdict.outcome),
            root_digest=record.fingerprint.root_digest,
            stage=record.fingerprint.get("stage"),
            phases_s=dict(phases_s),
        )

    def failed(self, error: ApplianceError) -> "Outcome":
        cause = error.__cause__
        reason = str(cause.verdict.reason) if isinstance(cause, RefusedError) else ""
        verdict = str(VerdictOutcome.REFUSED)
        return dataclasses.replace(
            self, verdict=verdict, reason=reason, error=str(error), exit_status=error.exit_status
        )


def write(folder: str | None, outcome: Outcome) -> None:
    """Leave an outcome in the folder that the starting process named, if it named one."""
    if folder is None:
        return
    path = Path(folder) / f"{outcome.role or 'none'}-{outcome.rank}.json"
    try:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(outcome)))
        partial.rename(path)
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}") from error


def read_all(folder: Path) -> list[Outcome]:
    """Return the outcomes so far, by rank; HostError for a file that is none."""
    found = []
    for path in folder.glob("*.json"):
        try:
            with path.open("rb") as file:
                found.append(Outcome(**json.loads(file.read(MAX_BYTES))))
        except (OSError, ValueError, TypeError) as error:
            raise HostError(f"{path}: not an outcome") from error
    return sorted(found, key=lambda outcome: (outcome.role, outcome.rank))


def failure(folder: Path) -> ApplianceError | None:
    """Return the error of the first rank that could not get its weights; None where all could, or none said so.

    Its cause is the keeper's refusal, as it was in that rank, where there was one.
    """
    outcome = next((outcome for outcome in read_all(folder) if outcome.exit_status), None)
    if outcome is None:
        return None
    error = error_of_status(outcome.exit_status, outcome.error)
    if outcome.reason in set(Reason):
        error.__cause__ = RefusedError(refused(Reason(outcome.reason)))
    return error
