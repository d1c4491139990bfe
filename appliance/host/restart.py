"""`appliance restart MODEL`: restarts the engine and proves that it came back attached, saying what it said before."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.canary import CanaryRecord, api_key, ask, get
from appliance.client import KeeperClient, resident_fingerprint
from appliance.errors import HostError, TrustError
from appliance.host.systemctl import systemctl
from appliance.host.unit_files import unit_name
from appliance.manifest.schema import Manifest


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
    engine = manifest.model(name).engine
    base = engine.base_url
    timeline = Timeline()
    record = CanaryRecord.of(manifest.directories.state, resident_fingerprint(manifest.socket_path(name)))
    expected = record.load()
    began = time.monotonic()
    tell(f"draining and restarting {unit_name('engine', name)}")
    systemctl("restart", unit_name("engine", name), timeout_s=manifest.model(name).wait_s + 900)
    timeline.steps_s["drain, restart, ready"] = time.monotonic() - began
    timeline.verdict, timeline.phases_s = _attachment(manifest, name, base)
    if timeline.verdict != "hit":
        raise HostError(f"{name}: the engine came back, but its verdict is {timeline.verdict!r}, not 'hit'")
    began = time.monotonic()
    found = ask(base, name, api_key=api_key(engine.args, engine.environment))
    timeline.steps_s["canary"] = time.monotonic() - began
    if expected is None:
        timeline.canary = "no tokens were recorded for these weights"
    elif found != expected:
        raise TrustError(
            f"{name}: the canary's tokens are {list(found)}, and {list(expected)} were recorded at the first load",
            hint=f"`appliance scrub {name}` says whether they changed; to load anew, stop {unit_name('engine', name)}, "
            f"`appliance evict {name}`, then restart {unit_name('weights', name)}",
        )
    else:
        timeline.canary = f"{len(found)} tokens as recorded"
    return timeline


def _attachment(manifest: Manifest, name: str, base: str) -> tuple[str, dict[str, float]]:
    """Return the engine's verdict and phases: its own word, or the keeper's about an engine that is not ours."""
    if manifest.model(name).engine.kind == "builtin":
        health = get(f"{base}/health")
        return str(health.get("verdict")), dict(health.get("phases_s", {}))
    with KeeperClient.connect(manifest.socket_path(name)) as client:
        leases = client.status()["leases"]
    for lease in leases:
        if lease["client"] == f"engine@{name}":
            return str(lease["verdict"]), dict(lease["phases_s"])
    raise HostError(f"{name}: the keeper knows of no engine that has its weights", hint=f"appliance status {name}")
