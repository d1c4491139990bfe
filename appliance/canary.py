"""The canary: a prompt whose greedy tokens are recorded once for each fingerprint, and must never change after that."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoint.durable_file import write_durably
from appliance.errors import HostError
from appliance.fingerprint import Fingerprint

PROMPT = "The capital of France is"
MAX_TOKENS = 16
MAX_RECORD_BYTES = 64 << 10


@dataclass(frozen=True)
class CanaryRecord:
    """Where the tokens of one fingerprint are kept, below the state directory."""

    path: Path

    @classmethod
    def of(cls, state: Path, fingerprint: Fingerprint) -> "CanaryRecord":
        facts = json.dumps(fingerprint.to_json(), sort_keys=True).encode()
        return cls(state / "canary" / f"{hashlib.sha256(facts).hexdigest()}.json")

    def load(self) -> tuple[int, ...] | None:
        """Return the recorded tokens; None where there are none yet. HostError for a record that cannot be read."""
        try:
            with self.path.open("rb") as file:
                return tuple(map(int, json.loads(file.read(MAX_RECORD_BYTES))["token_ids"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HostError(f"canary record {self.path} cannot be read", hint="delete it, and look at why") from error

    def save(self, token_ids: Sequence[int]) -> None:
        """Record the tokens of the first verified load."""
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        record = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "token_ids": list(token_ids)}
        write_durably(self.path, json.dumps(record).encode() + b"\n", mode=0o640, replace=True)
