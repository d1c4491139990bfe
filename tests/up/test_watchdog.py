"""A unit's watchdog: who feeds it lives, from when on, and who does not is killed."""

import signal
import time

from appliance.up.description import Result, State
from appliance.up.unit import Unit
from tests.up.stage import Stage, play


def test_a_watchdog_that_is_fed_lets_it_live(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: "fed" in stage.lines)
        assert (unit.state, unit.status().starts) == (State.ACTIVE, 1)

    play(stage, ("ready", "feed 23 0.1", "say fed", "feed 100 0.1"), scenario, watchdog_s=2.0)


def test_a_watchdog_that_is_no_longer_fed_kills_it(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)
        assert unit.status().result is Result.WATCHDOG
        assert unit.status().exit_status == -signal.SIGABRT

    play(stage, ("ready", "feed 2 0.05", "wait"), scenario, watchdog_s=0.4)


def test_a_watchdog_that_was_never_fed_kills_it_too(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)
        assert unit.status().result is Result.WATCHDOG

    play(stage, ("ready", "wait"), scenario, watchdog_s=0.3)


def test_a_watchdog_does_not_bite_before_the_unit_is_ready(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        assert unit.status().starts == 1

    play(stage, ("notify WATCHDOG=1", "sleep 0.5", "ready", "feed 100 0.05"), scenario, watchdog_s=0.3)


def test_a_unit_may_pull_its_own_watchdog(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)
        assert unit.status().result is Result.WATCHDOG

    play(stage, ("ready", "notify WATCHDOG=trigger", "wait"), scenario, watchdog_s=60.0)


def test_feeding_that_waits_in_the_socket_is_heard_before_the_watchdog_bites(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        time.sleep(1.5)  # noqa: ASYNC251  # the supervisor itself was held up, as by Ctrl-Z
        await stage.until(lambda: "fed" in stage.lines)
        assert (unit.state, unit.status().starts) == (State.ACTIVE, 1)

    play(stage, ("ready", "feed 20 0.1", "say fed", "feed 100 0.1"), scenario, watchdog_s=1.0)


def test_a_watchdog_that_nobody_feeds_any_more_does_not_keep_a_stop_busy(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)

    before = time.process_time()
    play(stage, ("ignore SIGTERM", "ready", "wait"), scenario, watchdog_s=0.5, stop_timeout_s=2.0)
    assert time.process_time() - before < 1.0
