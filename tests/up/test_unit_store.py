"""What a unit stores: it outlives the process and a restart of the unit, and is gone after a stop."""

import signal
from pathlib import Path

from appliance.up.description import State
from appliance.up.unit import Unit
from tests.up.stage import Stage, play, report


def test_memory_files_outlive_a_main_process_that_is_killed_with_their_contents(stage: Stage) -> None:
    path = stage.directory / "report"

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        for start in range(2, 5):
            path.unlink()
            unit.send(signal.SIGKILL)
            await stage.until_state(unit, State.ACTIVE, starts=start)
            assert report(path)["held"] == {f"slab-{index}": f"bytes-{index}" for index in range(200)}
        assert unit.status().stored == 200

    steps = ("store-once slab bytes 200", "barrier", f"report {path}", "ready", "wait")
    assert play(stage, steps, scenario, store_limit=300).status().stored == 0
    assert report(path)["environment"]["FDSTORE"] == "300"


def test_what_was_stored_with_the_last_breath_is_kept(stage: Stage) -> None:
    path = stage.directory / "report"

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        assert report(path)["held"] == {f"slab-{index}": f"bytes-{index}" for index in range(5)}

    die = f"unless {stage.directory}/died die SIGKILL"
    play(stage, ("store-once slab bytes 5", die, f"report {path}", "ready", "wait"), scenario, store_limit=10)


def test_a_restart_keeps_the_store_and_a_stop_drops_it(stage: Stage) -> None:
    path = stage.directory / "report"

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        path.unlink()
        await unit.restart()
        await stage.until_state(unit, State.ACTIVE)
        assert list(report(path)["held"]) == ["slab-1", "slab-0"]
        await unit.stop()
        assert unit.status().stored == 0
        path.unlink()
        await unit.start()
        await stage.until_state(unit, State.ACTIVE)
        assert report(path)["held"] == {}

    steps = ("unless {0}/stored store slab bytes 2", "barrier", "report {0}/report", "ready", "wait")
    play(stage, tuple(step.format(stage.directory) for step in steps), scenario, store_limit=10)


def test_a_restart_keeps_the_store_of_one_that_had_to_be_killed_for_it(stage: Stage) -> None:
    path = stage.directory / "report"

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        path.unlink()
        await unit.restart()
        await stage.until_state(unit, State.ACTIVE)
        assert list(report(path)["held"]) == ["slab-0"]

    steps = ("ignore SIGTERM", "store-once slab bytes", "barrier", f"report {path}", "ready", "wait")
    play(stage, steps, scenario, store_limit=10, stop_timeout_s=0.2)


def test_removed_descriptors_do_not_come_back(stage: Stage) -> None:
    path = stage.directory / "report"

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        unit.send(signal.SIGKILL)
        await stage.until_state(unit, State.ACTIVE, starts=2)
        assert list(report(path)["held"]) == ["slab-1"]

    once = f"unless {stage.directory}/stored store slab bytes 2"
    steps = (once, "notify FDSTOREREMOVE=1 FDNAME=slab-0", f"report {path}", "ready", "wait")
    play(stage, steps, scenario, store_limit=10)


def test_more_than_the_store_takes_is_told_and_the_rest_is_kept(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        assert unit.status().stored == 3

    play(stage, ("store slab bytes 5", "barrier", "ready", "wait"), scenario, store_limit=3)
    assert sum("store is full with 3" in event.text and event.serious for event in stage.events) == 2


def test_a_unit_without_a_store_is_not_told_of_one(stage: Stage) -> None:
    path = stage.directory / "report"

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)

    play(stage, (f"report {path}", "ready", "wait"), scenario)
    assert "FDSTORE" not in report(path)["environment"]


def test_restarts_leak_no_descriptor(stage: Stage) -> None:
    def open_count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: unit.status().starts == 5)
        await stage.until_state(unit, State.AUTO_RESTART)
        before = open_count()
        await stage.until(lambda: unit.status().starts == 15)
        await stage.until_state(unit, State.AUTO_RESTART)
        assert open_count() == before

    steps = ("store-once slab bytes 20", "barrier", "ready", "exit 1")
    play(stage, steps, scenario, store_limit=30, slowest_restart_s=0.01)
