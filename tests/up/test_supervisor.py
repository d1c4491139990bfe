"""Units under one supervisor: in which order they start and stop, and what the others notice of it."""

import asyncio
import os
import resource

import pytest

from appliance.errors import HostError, ResourceError, TrustError
from appliance.up.description import Result, State
from appliance.up.supervisor import Supervisor
from tests.up.stage import TIMEOUT_S, described, until, until_file
from tests.up.troupe import Play, ended_at


def test_the_engine_starts_only_when_the_weights_are_ready(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until_file(play.folder / "starts-weights")
        assert supervisor.status("engine@chat").text == "waits for weights@chat"
        assert play.starts("engine") == 0
        (play.folder / "go").touch()
        await supervisor.wait_ready("engine@chat", TIMEOUT_S)
        order = [event.unit for event in play.events if event.state is State.ACTIVE]
        assert order == ["weights@chat", "engine@chat"]

    play.run(scenario, play.engine(), play.weights(f"until {play.folder}/go"))


def test_everything_is_stopped_at_the_end_engines_first(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")

    supervisor = play.run(scenario)
    stopped = [event.unit for event in play.events if event.state is State.INACTIVE]
    assert stopped[-2:] == ["engine@chat", "weights@chat"]
    assert ended_at(play.folder / "ended-engine") <= ended_at(play.folder / "ended-weights")
    assert supervisor.exit_status == 0


def test_a_keeper_that_is_killed_comes_back_with_its_descriptors_and_the_engine_is_left_alone(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        engine_pid = supervisor.status("engine@chat").pid
        for _ in range(3):
            await supervisor.kill("weights@chat")
            assert supervisor.status("weights@chat").state is not State.ACTIVE
            await supervisor.wait_ready("weights@chat", TIMEOUT_S)
        assert play.reported("weights")["held"] == {f"slab-{index}": f"bytes-{index}" for index in range(3)}
        assert supervisor.status("engine@chat").pid == engine_pid

    play.run(scenario)
    assert (play.starts("weights"), play.starts("engine")) == (4, 1)


def test_a_restart_of_the_weights_keeps_the_store_and_leaves_the_engine_alone(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await supervisor.restart("weights@chat")
        look = await supervisor.wait_ready("weights@chat", TIMEOUT_S)
        assert (look.stored, look.starts) == (3, 2)
        assert len(play.reported("weights")["held"]) == 3

    play.run(scenario)
    assert play.starts("engine") == 1


def test_an_engine_restart_leaves_the_weights_alone(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await supervisor.restart("engine@chat")
        await supervisor.wait_ready("engine@chat", TIMEOUT_S)

    play.run(scenario)
    assert (play.starts("weights"), play.starts("engine")) == (1, 2)


def test_stopping_the_weights_stops_the_engine_first_and_frees_what_was_stored(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await supervisor.stop("weights@chat")
        looks = {look.name: look for look in supervisor.statuses()}
        assert looks["engine@chat"].state is looks["weights@chat"].state is State.INACTIVE
        assert looks["weights@chat"].stored == 0
        with pytest.raises(ResourceError, match="weights@chat is stopped"):
            await supervisor.wait_ready("weights@chat", 1)
        await supervisor.start("engine@chat")
        await supervisor.wait_ready("engine@chat", TIMEOUT_S)
        assert supervisor.status("weights@chat").state is State.ACTIVE

    play.run(scenario)
    assert ended_at(play.folder / "ended-engine") <= ended_at(play.folder / "ended-weights")


def test_restarting_an_engine_starts_the_weights_that_were_stopped(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await supervisor.stop("weights@chat")
        await supervisor.restart("engine@chat")
        await supervisor.wait_ready("engine@chat", TIMEOUT_S)

    play.run(scenario)
    assert (play.starts("weights"), play.starts("engine")) == (2, 2)


def test_an_engine_that_crashes_while_the_keeper_restarts_waits_for_it(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        (play.folder / "go").unlink()
        await supervisor.kill("weights@chat")
        await supervisor.kill("engine@chat")
        await until(lambda: supervisor.status("engine@chat").text == "waits for weights@chat")
        (play.folder / "go").touch()
        await supervisor.wait_ready("engine@chat", TIMEOUT_S)

    (play.folder / "go").touch()
    play.run(scenario, play.weights(f"until {play.folder}/go"), play.engine())


def test_waiting_for_a_unit_that_failed_raises_the_error_of_its_status(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        with pytest.raises(TrustError, match=r"weights@chat failed: .*status 77.*: model\.sig: unknown key"):
            await supervisor.wait_ready("weights@chat", TIMEOUT_S)

    supervisor = play.run(scenario, play.weights("complain model.sig: unknown key", "exit 77"))
    assert supervisor.exit_status == 77


def test_waiting_for_an_engine_whose_keeper_failed_does_not_wait_any_longer(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        with pytest.raises(TrustError, match=r"weights@chat failed: .*unknown key"):
            await supervisor.wait_ready("engine@chat", TIMEOUT_S)

    play.run(scenario, play.weights("complain model.sig: unknown key", "exit 77"), play.engine())


def test_waiting_too_long_says_what_the_unit_is_doing(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until_file(play.folder / "starts-weights")
        await until(lambda: supervisor.status("weights@chat").said)
        with pytest.raises(ResourceError, match=r"not ready after 0.01 s: activating: loading 34/66 files"):
            await supervisor.wait_ready("weights@chat", 0.01)

    play.run(scenario, play.weights("notify STATUS=loading%2034/66%20files", "wait"))


def test_a_unit_that_is_not_there_is_named_with_those_that_are(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        for ask in (supervisor.start, supervisor.stop, supervisor.restart, supervisor.kill, supervisor.wait_ready):
            with pytest.raises(ResourceError, match="no unit 'engine@x' here") as caught:
                await ask("engine@x")
            assert caught.value.hint == "there are: weights@chat, engine@chat"

    play.run(scenario)


def test_lines_are_shown_with_the_units_name_and_events_as_our_own(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("weights@chat")

    play.run(scenario, play.weights("say loading", "complain a warning"))
    assert ("weights@chat", "loading", False) in play.screen.lines
    assert ("weights@chat", "a warning", False) in play.screen.lines
    assert ("up", "weights@chat: active", False) in play.screen.lines


def test_a_second_supervisor_of_the_same_directory_is_refused_by_the_firsts_number(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        with pytest.raises(ResourceError, match=f"process {os.getpid()} supervises this manifest already"):
            async with play.supervisor(play.weights()):
                pass

    play.run(scenario)


def test_after_one_has_ended_the_next_may_begin(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")

    play.run(scenario)
    play.run(scenario)


def test_nothing_can_be_started_while_everything_is_being_stopped(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")

    supervisor = play.run(scenario)
    for ask in (supervisor.start, supervisor.restart):
        with pytest.raises(ResourceError, match="being stopped"):
            asyncio.run(ask("engine@chat"))


def test_descriptors_for_every_store_can_be_opened(play: Play) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    async def scenario(supervisor: Supervisor) -> None:
        look = await supervisor.wait_ready("weights@chat")
        assert look.stored == 600

    try:
        play.run(scenario, play.weights("store-once slab bytes 600", "barrier", store_limit=1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_that_cannot_be_written_to_is_refused(play: Play) -> None:
    (play.folder / "runtime").write_text("no folder")
    with pytest.raises(HostError, match="runtime"):
        asyncio.run(Supervisor([], play.screen, runtime=play.folder / "runtime").run())


def test_a_start_that_fails_half_way_leaves_the_directory_to_the_next(play: Play) -> None:
    too_long = described("weights@" + "x" * 100, "ready", "wait")

    async def scenario() -> None:
        async with play.supervisor(play.weights(), too_long):
            pass

    with pytest.raises(HostError, match="longer than"):
        asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))

    async def works(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")

    play.run(works)


def test_results_of_one_run_are_not_held_against_the_next(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        assert supervisor.status("weights@chat").result is Result.SUCCESS

    weights = play.weights(f"unless {play.folder}/ran exit 1")
    assert play.run(scenario, weights, play.engine()).exit_status == 0
