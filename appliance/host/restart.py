"""`appliance restart MODEL`: restarts the engine and proves that it came back attached, saying what it said before."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.canary import MAX_TOKENS, PROMPT, CanaryRecord
from appliance.client import KeeperClient
from appliance.errors import HostError, TrustError
from appliance.fingerprint import Fingerprint
from appliance.host.systemctl import systemctl
from appliance.host.unit_files import unit_name
from appliance.manifest.schema import Manifest

ANSWER_TIMEOUT_S = 120.0


@dataclass
class Timeline:
    """Seconds of each step, in order, and the engine's own phases."""

    steps_s: dict[str, float] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    canary: str = ""


def restart(manifest: Manifest, name: str, *, tell: Callable[[str], None]) -> Timeline:
    """Restart an engine and return how it went.

    HostError where it does not come back attached; TrustError where its greedy tokens are not the recorded ones.
    """
    settings = manifest.model(name).engine
    base = f"http://{settings.host}:{settings.port}"
    timeline = Timeline()
    record = CanaryRecord.of(manifest.directories.state, _resident_fingerprint(manifest, name))
    expected = record.load()
    began = time.monotonic()
    tell(f"draining and restarting {unit_name('engine', name)}")
    systemctl("restart", unit_name("engine", name), timeout_s=manifest.model(name).wait_s + 900)
    timeline.steps_s["drain, restart, ready"] = time.monotonic() - began
    health = _get(f"{base}/health")
    timeline.verdict, timeline.phases_s = str(health.get("verdict")), dict(health.get("phases_s", {}))
    if timeline.verdict != "hit":
        raise HostError(f"{name}: the engine came back, but its verdict is {timeline.verdict!r}, not 'hit'")
    began = time.monotonic()
    found = ask(base, name)
    timeline.steps_s["canary"] = time.monotonic() - began
    if expected is None:
        timeline.canary = "no tokens were recorded for these weights"
    elif found != expected:
        raise TrustError(
            f"{name}: the canary's tokens are {list(found)}, and {list(expected)} were recorded at the first load",
            hint=f"appliance scrub {name}; then restart {unit_name('weights', name)} to load from disk",
        )
    else:
        timeline.canary = f"{len(found)} tokens as recorded"
    return timeline


def ask(base: str, name: str) -> tuple[int, ...]:
    """Return the canary's greedy tokens from a running engine."""
    body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    answer = _get(f"{base}/v1/completions", body)
    try:
        return tuple(map(int, answer["choices"][0]["token_ids"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise HostError(f"{base}: the answer to the canary has no token ids") from error


def _resident_fingerprint(manifest: Manifest, name: str) -> Fingerprint:
    with KeeperClient.connect(manifest.socket_path(name)) as client:
        described = client.describe(role="target", rank=0, wait_s=0)
    described.configs.close()
    return described.record.fingerprint


def _get(url: str, body: dict[str, object] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:  # noqa: S310
            answer = json.loads(response.read())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise HostError(f"{url}: {error}", hint="is the engine running?") from error
    if not isinstance(answer, dict):
        raise HostError(f"{url}: not a JSON object")
    return answer
