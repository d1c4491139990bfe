"""The built-in engine's restart on the real model: attached to the keeper against loaded from disk, phase by phase.

    python -m bench.restart [--rounds N] [--json FILE]

Both starts are the product's: the one from disk is an engine with `on_miss: load` whose keeper was emptied first, so it
reads, verifies, packs and donates. Rounds alternate. Files are in the page cache after the first.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp

from appliance.client import KeeperClient
from appliance.demo.cache import default_cache
from appliance.demo.model import obtain
from appliance.demo.workplace import MODEL, Workplace
from appliance.manifest.load import load_manifest
from appliance.up.foreground import supervisor
from appliance.up.supervisor import Supervisor

WEIGHTS, ENGINE = f"weights@{MODEL}", f"engine@{MODEL}"
READY_TIMEOUT_S = 600.0
PHASES = (
    ("interpreter", ("interpreter",)),
    ("imports", ("imports",)),
    ("identity and stat check", ("identity", "wait", "check")),
    ("config", ("config",)),
    ("skeleton", ("skeleton",)),
    ("weights: read, verify, build, pack", ("verify", "build", "pack")),
    ("weights: attach", ("attach",)),
    ("tokenizer", ("tokenizer",)),
    ("first token", ("first_token",)),
    ("start to first token", ("total",)),
)


class Silent:
    """Prints nothing of what the processes say."""

    def line(self, name: str, text: str, *, serious: bool = False) -> None:
        pass


async def measure(workplace: Workplace, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the phases of every start, in seconds, by how the engine came to its weights."""
    found: dict[str, list[dict[str, float]]] = {"donated": [], "hit": []}
    workplace.sign()
    manifest = load_manifest(workplace.manifest)
    async with (
        supervisor(manifest, workplace.manifest, Silent()) as units,
        aiohttp.ClientSession(f"http://127.0.0.1:{workplace.port}") as http,
    ):
        await units.wait_ready(ENGINE, READY_TIMEOUT_S)
        for _ in range(rounds):
            for outcome, phases in found.items():
                phases.append(await _start(units, http, outcome, manifest.socket_path(MODEL)))
    return found


async def _start(units: Supervisor, http: aiohttp.ClientSession, outcome: str, socket: Path) -> dict[str, float]:
    await units.stop(ENGINE)
    if outcome == "donated":
        with KeeperClient.connect(socket) as client:
            client.evict(force=False)
    began = time.monotonic()
    await units.start(ENGINE)
    await units.wait_ready(ENGINE, READY_TIMEOUT_S)
    ready = time.monotonic() - began
    async with http.get("/health") as response:
        health: dict[str, Any] = await response.json()
    if health["verdict"] != outcome:
        raise SystemExit(f"the engine's verdict is {health['verdict']}, not {outcome}")
    return {**health["phases_s"], "ready": ready}


def table(found: dict[str, list[dict[str, float]]]) -> list[tuple[str, float, float]]:
    """Return each phase's median seconds, from disk and attached."""
    rows = [*PHASES, ("start to READY=1", ("ready",))]
    return [(name, _median(found["donated"], keys), _median(found["hit"], keys)) for name, keys in rows]


def _median(starts: list[dict[str, float]], keys: tuple[str, ...]) -> float:
    return statistics.median(sum(start.get(key, 0.0) for key in keys) for start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with Workplace(obtain(default_cache(), on_progress=print), on_miss="load") as workplace:
        found = asyncio.run(measure(workplace, arguments.rounds))
    rows = table(found)
    print(f"{'phase, median seconds':40} {'from disk':>10} {'attached':>10}")
    for name, cold, warm in rows:
        print(f"{name:40} {cold:10.4f} {warm:10.4f}")
    name, cold, warm = rows[-1]
    print(f"{name}: attached takes {warm / cold:.2f} of the start from disk")
    if arguments.json:
        arguments.json.write_text(json.dumps({"starts": found, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
