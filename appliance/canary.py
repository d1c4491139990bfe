"""The canary: a prompt whose greedy tokens are recorded once for each fingerprint, and must never change after that."""

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from appliance.checkpoint.durable_file import write_durably
from appliance.errors import HostError
from appliance.fingerprint import Fingerprint
from appliance.manifest.arguments import option_name

PROMPT = "The capital of France is"
MAX_TOKENS = 16
MAX_RECORD_BYTES = 64 << 10
ANSWER_TIMEOUT_S = 120.0


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


def api_key(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the key that an engine started so asks its clients for, in vLLM's words; empty where it asks for none."""
    key = environ.get("VLLM_API_KEY", "")
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if option_name(argument) == "--api-key":
            _, equals, value = argument.partition("=")
            key = value if equals else following
    return key


def ask(base: str, model: str, *, api_key: str = "") -> tuple[int, ...]:
    """Return the canary's greedy tokens from a running engine; HostError where it does not answer with tokens."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    answer = get(f"{base}/v1/completions", body, api_key=api_key)
    try:
        return tuple(map(int, answer["choices"][0]["token_ids"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise HostError(f"{base}: the answer to the canary has no token ids") from error


def get(url: str, body: Mapping[str, object] | None = None, *, api_key: str = "") -> dict[str, Any]:
    """Return the JSON object that an engine answers with, to a GET or, with a body, to a POST; HostError for others."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:  # noqa: S310
            answer = json.loads(response.read())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise HostError(f"{url}: {error}", hint="is the engine running?") from error
    if not isinstance(answer, dict):
        raise HostError(f"{url}: not a JSON object")
    return answer
