"""The one model that the hosts of the tests serve, and what is asked of it."""

import json
import urllib.request
from typing import Any

from tests.host.checkpoints import Checkpoints
from tests.host.installed import HEALTH_PORT, MODEL, PORT, Host
from tests.host.stream import Stream, ask

WEIGHTS, ENGINE = f"weights@{MODEL}.service", f"engine@{MODEL}.service"
OTHER = "other"
BASE: dict[str, Any] = {
    MODEL: {
        "checkpoint": f"/srv/models/{MODEL}",
        "engine": {"port": PORT, "threads": 1},
        "health": {"port": HEALTH_PORT},
    }
}


def serves(host: Host, checkpoints: Checkpoints) -> bool:
    try:
        right = ask(PORT, MODEL) == checkpoints.answers[checkpoints.first]
        return (
            right and host.state(WEIGHTS) == "active" and not host.appliance("plan", "--check", check=False).returncode
        )
    except (OSError, AssertionError):
        return False


def answers(host: Host, stream: Stream, answer: str) -> None:
    """Return once a request that begins after this call has been answered so."""
    asked = len(stream.answers)
    host.machine.wait_for(lambda: len(stream.answers) > asked + 1 and stream.last == answer, what="it answers")


def is_back(host: Host, unit: str, before: int) -> None:
    def back() -> bool:
        return host.state(unit) == "active" and host.pid(unit) not in (0, before)

    host.machine.wait_for(back, what=f"{unit} is back", timeout_s=120)


def health() -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=30) as response:
        body: dict[str, Any] = json.loads(response.read())
    return body
