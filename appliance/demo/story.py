"""What the demo does to a real model: restarts, kills, tampering. It ends at the first broken promise."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from appliance.client import KeeperClient
from appliance.demo.workplace import MODEL, Workplace
from appliance.errors import HostError, TrustError
from appliance.manifest.load import load_manifest
from appliance.up.foreground import supervisor
from appliance.up.printer import LinePrinter
from appliance.up.supervisor import Supervisor

QUESTION = "What is the capital of France?"
WEIGHTS, ENGINE = f"weights@{MODEL}", f"engine@{MODEL}"
READY_TIMEOUT_S = 300.0

Tell = Callable[[str], None]


@dataclass
class Findings:
    """What was seen: answers in order, the refusal, both root digests, and seconds."""

    answers: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    root_digests: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    phases_s: dict[str, dict[str, float]] = field(default_factory=dict)
    size_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


async def play(workplace: Workplace, *, printer: LinePrinter, tell: Tell) -> Findings:
    """Run the whole story and return what was seen; an ApplianceError where a promise does not hold."""
    found = Findings()
    workplace.sign()
    tell("The checkpoint is signed. Starting keeper and engine: everything comes from disk.")
    began = time.monotonic()
    async with supervisor(load_manifest(workplace.manifest), workplace.manifest, printer) as units:
        await units.wait_ready(ENGINE, READY_TIMEOUT_S)
        found.seconds["cold start"] = time.monotonic() - began
        async with aiohttp.ClientSession(f"http://127.0.0.1:{workplace.port}") as http:
            await _tell_story(workplace, units, http, found, tell)
    return found


async def _tell_story(
    workplace: Workplace, units: Supervisor, http: aiohttp.ClientSession, found: Findings, tell: Tell
) -> None:
    await _ask(http, "from disk", found, tell)
    status = await _keeper(workplace)
    found.size_bytes = status["size_bytes"]
    found.root_digests.append(status["root_digest"])
    found.phases_s["load"] = status["shards"][0]["phases_s"]

    tell("Restarting the engine. The keeper has the weights.")
    await _restart_engine(units, http, "warm restart", found)
    await _ask(http, "attached", found, tell)
    _require_same(found, "from disk", "attached")

    tell("SIGKILL to the keeper, while the engine serves.")
    await units.kill(WEIGHTS)
    await _ask(http, "keeper killed", found, tell)
    await units.wait_ready(WEIGHTS, READY_TIMEOUT_S)
    tell("The keeper is back and got its descriptors again. Restarting the engine once more.")
    await _restart_engine(units, http, "warm restart after the kill", found)
    await _ask(http, "after the kill", found, tell)
    _require_same(found, "from disk", "keeper killed", "after the kill")
    if (await _keeper(workplace))["shards"][0]["shard_id"] != status["shards"][0]["shard_id"]:
        raise HostError("the killed keeper did not come back with the weights it had")

    damage = workplace.zero_a_tensor()
    tell(f"{damage.tensor} is now {damage.size_bytes} zero bytes in {damage.file.name}; every header is as it was.")
    await units.restart(ENGINE)
    try:
        await units.wait_ready(ENGINE, READY_TIMEOUT_S)
    except TrustError as error:
        found.refusal = error.message
    if damage.file.name not in found.refusal:
        raise HostError(f"the tampered checkpoint was not refused by name: {found.refusal or 'it was served'}")
    tell(f"Refused: {found.refusal}")

    tell("Signing the checkpoint as it is now. Nobody is told: a changed signature is noticed.")
    began = time.monotonic()
    workplace.sign()
    while units.renewals(MODEL)[0] == 0:
        if time.monotonic() > began + READY_TIMEOUT_S:
            raise HostError("the keeper did not take the newly signed checkpoint")
        await asyncio.sleep(0.1)
    await units.wait_ready(ENGINE, READY_TIMEOUT_S)
    found.seconds["new weights"] = time.monotonic() - began
    found.root_digests.append((await _keeper(workplace))["root_digest"])
    if found.root_digests[0] == found.root_digests[1]:
        raise HostError("the keeper still holds the weights of the old checkpoint")
    await _ask(http, "new checkpoint", found, tell)
    if found.answers["new checkpoint"] == found.answers["from disk"]:
        raise HostError("the new checkpoint answers as the old one did: its weights were not loaded")


async def _restart_engine(units: Supervisor, http: aiohttp.ClientSession, name: str, found: Findings) -> None:
    began = time.monotonic()
    await units.restart(ENGINE)
    await units.wait_ready(ENGINE, READY_TIMEOUT_S)
    found.seconds[name] = time.monotonic() - began
    async with http.get("/health") as response:
        health = await response.json()
    if health["verdict"] != "hit":
        raise HostError(f"the restarted engine did not attach: {health['verdict']}")
    found.phases_s[name] = health["phases_s"]


async def _ask(http: aiohttp.ClientSession, when: str, found: Findings, tell: Tell) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 16,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        raise HostError(f"the engine answered with {response.status}: {answer}")
    found.answers[when] = answer["choices"][0]["message"]["content"]
    tell(f"  {QUESTION} -> {found.answers[when]!r}")


def _require_same(found: Findings, first: str, *others: str) -> None:
    for other in others:
        if found.answers[other] != found.answers[first]:
            raise HostError(f"answers differ: {first}: {found.answers[first]!r}, {other}: {found.answers[other]!r}")


async def _keeper(workplace: Workplace) -> dict[str, Any]:
    path = load_manifest(workplace.manifest).socket_path(MODEL)

    def ask() -> dict[str, Any]:
        with KeeperClient.connect(path, timeout_s=READY_TIMEOUT_S) as client:
            return client.status()

    return await asyncio.to_thread(ask)
