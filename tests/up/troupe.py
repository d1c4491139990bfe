"""A keeper and an engine under a supervisor, and what they did."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from appliance.up.description import Checkpoint, Event, UnitDescription
from appliance.up.supervisor import Supervisor
from tests.up.stage import TIMEOUT_S, described


class Screen:
    """A printer that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, bool]] = []

    def line(self, name: str, text: str, *, serious: bool = False) -> None:
        self.lines.append((name, text, serious))


class Play:
    """A keeper `weights@chat` and an engine `engine@chat` that say when they end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.screen = Screen()
        self.events: list[Event] = []
        self.checkpoints: tuple[Checkpoint, ...] = ()

    def weights(self, *steps: str, **settings: Any) -> UnitDescription:
        first = steps or ("store-once slab bytes 3", "barrier")
        settings = {"store_limit": 10, **settings}
        return described(
            "weights@chat", *self.said_at_end("weights"), *first, self.report("weights"), "ready", "wait", **settings
        )

    def engine(self, *steps: str, **settings: Any) -> UnitDescription:
        return described(
            "engine@chat",
            *self.said_at_end("engine"),
            *steps,
            self.report("engine"),
            "ready",
            "wait",
            needs=("weights@chat",),
            **settings,
        )

    def said_at_end(self, name: str) -> tuple[str, ...]:
        return (f"count {self.folder}/starts-{name}", f"end-on-term {self.folder}/ended-{name}")

    def report(self, name: str) -> str:
        return f"report {self.folder}/report-{name}"

    def reported(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.folder / f"report-{name}").read_text())
        return body

    def starts(self, name: str) -> int:
        path = self.folder / f"starts-{name}"
        return len(path.read_text().split()) if path.exists() else 0

    def supervisor(self, *units: UnitDescription) -> Supervisor:
        return Supervisor(
            units, self.screen, runtime=self.folder, checkpoints=self.checkpoints, on_event=self.events.append
        )

    def run(self, scenario: Callable[[Supervisor], Awaitable[None]], *units: UnitDescription) -> Supervisor:
        supervisor = self.supervisor(*(units or (self.weights(), self.engine())))

        async def whole() -> None:
            async with asyncio.timeout(TIMEOUT_S), supervisor:
                await scenario(supervisor)

        asyncio.run(whole())
        return supervisor


def ended_at(path: Path) -> float:
    """Return when a process that left this file at its end did so."""
    return path.stat().st_mtime
