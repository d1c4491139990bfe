"""Where units play: what they said and did, and means to wait for it."""

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from appliance.up.description import Event, Kind, State, UnitDescription
from appliance.up.unit import Unit

TIMEOUT_S = 30.0
PUPPET = Path(__file__).with_name("puppet.py")

T = TypeVar("T")


def puppet(*steps: str) -> tuple[str, ...]:
    """Return the command line of a program that takes these steps."""
    return sys.executable, "-I", "-S", str(PUPPET), *steps


def described(name: str, *steps: str, **settings: Any) -> UnitDescription:
    """Return a unit that takes these steps and is restarted quickly."""
    settings = {"first_restart_s": 0.01, "slowest_restart_s": 0.05, "start_timeout_s": TIMEOUT_S, **settings}
    return UnitDescription(name, puppet(*steps), **settings)


class Stage:
    """Records events and lines; `play` runs a scenario and fails it if it takes too long."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self.lines: list[str] = []
        self.bugs: list[BaseException | None] = []
        self._changed = asyncio.Event()

    def play(self, scenario: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))

    def unit(self, description: UnitDescription, awaited: Callable[[], str | None] = lambda: None) -> Unit:
        return Unit(
            description,
            directory=self.directory,
            awaited=awaited,
            on_event=self.hear,
            on_line=self.line,
            on_bug=self.bugs.append,
        )

    def hear(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    def line(self, text: str) -> None:
        self.lines.append(text)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once it is true; looks again at each event and line."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def until_state(self, unit: Unit, state: State, *, starts: int = 0) -> None:
        await self.until(lambda: unit.state is state and unit.status().starts >= starts)

    def states(self) -> list[State]:
        return [event.state for event in self.events if event.state is not None]

    def texts(self, kind: Kind) -> list[str]:
        return [event.text for event in self.events if event.kind is kind]


async def until(condition: Callable[[], object]) -> None:
    """Return once it is true: what other processes do is no event here."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def until_file(path: Path) -> str:
    """Return what is in a file once it is there."""
    await until(path.exists)
    return await asyncio.to_thread(path.read_text)


async def running(unit: Unit, scenario: Callable[[Unit], Awaitable[T]]) -> T:
    """Start a unit, play, and stop it whatever comes of it."""
    await unit.start()
    try:
        return await scenario(unit)
    finally:
        await unit.stop()


def play(stage: Stage, unit_steps: tuple[str, ...], scenario: Any, **settings: Any) -> Unit:
    """Run one unit through a scenario; return it, stopped."""

    async def whole() -> Unit:
        unit = stage.unit(described("weights@chat", *unit_steps, **settings))
        await running(unit, scenario)
        return unit

    unit = stage.play(whole())
    assert not any(stage.bugs)
    return unit


def report(path: Path) -> dict[str, Any]:
    """Return what a unit reported to a file."""
    body: dict[str, Any] = json.loads(path.read_text())
    return body


def ends(pid: int) -> bool:
    """Wait for a process that was killed; False, after killing it, if it lives on."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = bool(select.select([pidfd], [], [], TIMEOUT_S / 3)[0])
        if not ended:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return ended
    finally:
        os.close(pidfd)
