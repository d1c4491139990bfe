"""How a supervisor ends: asked by a signal, with nothing left to run, by a bug, killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.up.description import Event, State, UnitDescription
from appliance.up.group import MARK
from appliance.up.supervisor import Supervisor
from tests.up.stage import TIMEOUT_S, described, ends, puppet, until, until_file
from tests.up.troupe import Play, ended_at


def ran(play: Play, *units: UnitDescription, then: Callable[[Supervisor], Awaitable[object]] | None = None) -> int:
    """Return what `run` returns, while something is done beside it."""

    async def whole() -> int:
        supervisor = play.supervisor(*units)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            running = group.create_task(supervisor.run())
            if then is not None:
                await until(supervisor.statuses)
                await then(supervisor)
            return await running

    return asyncio.run(whole())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order_and_all_was_well(play: Play, number: signal.Signals) -> None:
    async def interrupt(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        os.kill(os.getpid(), number)

    assert ran(play, play.weights(), play.engine(), then=interrupt) == 0
    assert ended_at(play.folder / "ended-engine") <= ended_at(play.folder / "ended-weights")


def test_a_second_signal_kills_what_does_not_stop(play: Play) -> None:
    async def interrupt(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: supervisor.status("engine@chat").state is State.DEACTIVATING)
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    stubborn = play.weights("ignore SIGTERM"), play.engine("ignore SIGTERM")
    assert ran(play, *stubborn, then=interrupt) == 1
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_it_ends_with_the_status_of_what_cannot_be_cured_when_nothing_runs_any_more(play: Play) -> None:
    assert ran(play, play.weights("complain no such key", "exit 78"), play.engine()) == 78
    assert play.starts("engine") == 0


def test_it_goes_on_while_anything_still_runs(play: Play) -> None:
    other = described("weights@other", "complain no such key", "exit 78")

    async def interrupt(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await until(lambda: supervisor.status("weights@other").state is State.FAILED)
        os.kill(os.getpid(), signal.SIGINT)

    assert ran(play, play.weights(), play.engine(), other, then=interrupt) == 78


def test_a_unit_that_crashes_until_the_end_is_not_all_well(play: Play) -> None:
    async def interrupt(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.status("weights@chat").state is State.AUTO_RESTART)
        os.kill(os.getpid(), signal.SIGINT)

    assert ran(play, play.weights("exit 1", first_restart_s=20.0, slowest_restart_s=20.0), then=interrupt) == 1


def test_a_bug_in_a_callback_stops_everything_and_is_raised(play: Play) -> None:
    def on_event(event: Event) -> None:
        if event.state is State.ACTIVE:
            raise ZeroDivisionError

    supervisor = Supervisor([play.weights()], play.screen, runtime=play.folder, on_event=on_event)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(supervisor.run(), TIMEOUT_S))
    assert ends(play.reported("weights")["pid"])


MAIN = """
import asyncio, sys
from pathlib import Path
from appliance.up.description import UnitDescription
from appliance.up.supervisor import Supervisor

class Screen:
    def line(self, name, text, *, serious=False): pass

unit = UnitDescription("weights@chat", tuple(sys.argv[2:]))
sys.exit(asyncio.run(Supervisor([unit], Screen(), runtime=Path(sys.argv[1])).run()))
"""


def start_apart(folder: Path, *steps: str, **options: Any) -> Any:
    return subprocess.Popen([sys.executable, "-c", MAIN, str(folder), *puppet(*steps)], **options)


def test_a_signal_that_nohup_has_had_ignored_stays_ignored(play: Play) -> None:
    process = start_apart(
        play.folder,
        play.report("weights"),
        "ready",
        "wait",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    asyncio.run(asyncio.wait_for(until_file(play.folder / "report-weights"), TIMEOUT_S))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0  # two signals that counted would have killed the unit


def test_a_supervisor_that_is_killed_takes_its_units_with_it(play: Play) -> None:
    path = play.folder / "report-weights"
    process = start_apart(play.folder, play.report("weights"), "ready", "wait")
    asyncio.run(asyncio.wait_for(until_file(path), TIMEOUT_S))
    process.kill()
    process.wait()
    assert ends(play.reported("weights")["pid"])


def test_the_next_supervisor_ends_what_a_killed_one_could_not_take_along(play: Play) -> None:
    process = start_apart(play.folder, f"spawn {play.folder}/child own", play.report("weights"), "ready", "wait")
    asyncio.run(asyncio.wait_for(until_file(play.folder / "report-weights"), TIMEOUT_S))
    process.kill()
    process.wait()
    child = int((play.folder / "child").read_text())
    assert Path(f"/proc/{child}/exe").exists()
    assert f"{MARK}={play.folder}/.up/weights@chat".encode() in Path(f"/proc/{child}/environ").read_bytes()

    async def scenario(supervisor: Supervisor) -> None:
        assert ends(child)
        await supervisor.wait_ready("engine@chat")

    play.run(scenario)
