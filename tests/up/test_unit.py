"""One unit, from its start to its end: states, restarts, time limits, who may speak for it."""

import asyncio
import signal
import socket
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from appliance.errors import NOT_CURED_BY_RESTART
from appliance.up.description import Event, Kind, Result, State
from appliance.up.unit import Unit
from tests.up.stage import Stage, described, ends, play, report, running, until_file


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()


def test_a_unit_is_active_only_once_it_says_so(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: "waking up" in stage.lines)
        assert unit.state is State.ACTIVATING
        await stage.until_state(unit, State.ACTIVE)
        assert unit.status().pid is not None

    unit = play(stage, ("say waking up", "sleep 0.2", "notify READY=1 STATUS=all%20there", "wait"), scenario)
    assert stage.states() == [State.ACTIVATING, State.ACTIVE, State.DEACTIVATING, State.INACTIVE]
    assert stage.texts(Kind.STATE)[1] == "all there" and stage.texts(Kind.STATUS) == []
    assert (unit.status().result, unit.status().pid) == (Result.SUCCESS, None)


def test_a_clean_end_of_its_own_is_restarted(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE, starts=3)

    play(stage, ("ready", "exit 0"), scenario)


def test_a_program_that_ends_before_it_is_ready_has_broken_the_protocol(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)
        assert unit.status().result is Result.PROTOCOL

    play(stage, ("exit 0",), scenario)


@pytest.mark.parametrize("status", sorted(NOT_CURED_BY_RESTART))
def test_what_no_restart_can_cure_is_not_restarted_and_its_last_word_is_kept(stage: Stage, status: int) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.FAILED)
        assert not unit.wanted

    unit = play(stage, ("store slab x", "complain model.sig: unknown key", f"exit {status}"), scenario)
    look = unit.status()
    assert (look.state, look.starts, look.exit_status, look.stored) == (State.FAILED, 1, status, 0)
    assert look.said == "model.sig: unknown key"
    assert f"status {status}" in look.text and "model.sig: unknown key" in look.text


@pytest.mark.parametrize("status", [1, 71, 75, 76, 203])
def test_what_a_restart_may_cure_is_restarted(stage: Stage, status: int) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        assert unit.status().starts == 2

    play(stage, (f"unless {stage.directory}/ran exit {status}", "ready", "wait"), scenario)


def test_without_a_line_of_its_own_the_last_status_is_what_it_said(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.FAILED)

    assert play(stage, ("notify STATUS=no%20such%20key", "exit 78"), scenario).status().said == "no such key"


def test_restarts_come_slower_and_slower(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: unit.status().starts == 5)

    play(stage, (f"count {stage.directory}/starts", "exit 1"), scenario, first_restart_s=0.05, slowest_restart_s=0.2)
    starts = [float(line) for line in (stage.directory / "starts").read_text().split()]
    pauses = [after - before for before, after in pairwise(starts)]
    assert all(pause >= at_least for pause, at_least in zip(pauses, [0.05, 0.1, 0.2, 0.2], strict=False))
    told = [text for text in stage.texts(Kind.STATE) if "next start in" in text]
    assert [float(text.rpartition("in ")[2].removesuffix(" s")) for text in told[:4]] == [0.05, 0.1, 0.2, 0.2]


def test_a_run_that_went_well_is_followed_by_a_quick_restart(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: unit.status().starts == 4)

    steps = ("ready", "sleep 0.2", "exit 1")
    play(stage, steps, scenario, first_restart_s=0.01, slowest_restart_s=30.0, ran_well_s=0.1)
    assert all("next start in 0.01 s" in text for text in stage.texts(Kind.STATE) if "next start" in text)


def test_a_long_run_that_never_became_ready_did_not_go_well(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: unit.status().starts == 3)

    play(stage, ("sleep 0.2", "exit 1"), scenario, first_restart_s=0.01, slowest_restart_s=30.0, ran_well_s=0.1)
    told = [text for text in stage.texts(Kind.STATE) if "next start in" in text]
    assert told[1].endswith("next start in 0.02 s")


def test_a_start_that_was_asked_for_forgets_the_failures_before_it(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: unit.status().starts == 3)
        await unit.restart()
        await stage.until(lambda: unit.status().starts == 5)

    play(stage, ("exit 1",), scenario, first_restart_s=0.01, slowest_restart_s=30.0)
    told = [text for text in stage.texts(Kind.STATE) if "next start in" in text]
    assert sum(text.endswith("in 0.01 s") for text in told) == 2


def test_a_stop_during_the_pause_before_a_restart_does_not_wait_for_it(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)

    started = time.monotonic()
    assert play(stage, ("exit 1",), scenario, first_restart_s=25.0, slowest_restart_s=25.0).state is State.INACTIVE
    assert time.monotonic() - started < 15


def test_a_unit_that_is_not_ready_in_time_is_stopped_and_started_again(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)
        assert unit.status().result is Result.TIMEOUT

    play(stage, ("complain stuck", "wait"), scenario, start_timeout_s=0.3)
    assert State.ACTIVE not in stage.states()
    assert any("took too long: stuck" in text for text in stage.texts(Kind.STATE))


def test_more_time_to_start_is_given_to_whoever_asks_for_it(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        assert unit.status().starts == 1

    steps = ("notify EXTEND_TIMEOUT_USEC=20000000", "sleep 0.8", "ready", "wait")
    play(stage, steps, scenario, start_timeout_s=0.5)


def test_asking_for_less_time_than_there_is_takes_none_away(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        assert unit.status().starts == 1

    play(stage, ("notify EXTEND_TIMEOUT_USEC=1", "sleep 0.3", "ready", "wait"), scenario)


def test_a_stop_asks_first_and_lets_it_finish(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)

    unit = play(stage, (f"end-on-term {stage.directory}/ended", "ready", "wait"), scenario)
    assert (stage.directory / "ended").read_text() == "ended"
    assert unit.status().exit_status == 0


def test_a_suspended_unit_can_be_stopped(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        unit.send(signal.SIGSTOP)

    steps = (f"end-on-term {stage.directory}/ended", "ready", "wait")
    assert play(stage, steps, scenario).status().exit_status == 0


def test_whoever_ignores_the_question_is_killed_with_all_it_started(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)

    steps = ("ignore SIGTERM", f"spawn {stage.directory}/child", "ready", "wait")
    unit = play(stage, steps, scenario, stop_timeout_s=0.2)
    assert unit.status().exit_status == -signal.SIGKILL
    assert (unit.state, unit.status().result) == (State.FAILED, Result.TIMEOUT)
    assert ends(int((stage.directory / "child").read_text()))


@pytest.mark.parametrize("session", ["same", "own"])
def test_what_a_dead_main_process_left_is_killed_before_the_next_start(stage: Stage, session: str) -> None:
    alive_at_second_start: list[bool] = []

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        child = int((stage.directory / "child").read_text())
        unit.send(signal.SIGKILL)
        await stage.until(lambda: unit.state is State.ACTIVATING and unit.status().starts == 2)
        alive_at_second_start.append(is_alive(child))

    play(stage, (f"spawn {stage.directory}/child {session}", "ready", "wait"), scenario)
    assert alive_at_second_start == [False]


@pytest.mark.parametrize("access", ["main", "all"])
def test_messages_of_a_child_are_refused_unless_the_unit_lets_all_speak(stage: Stage, access: str) -> None:
    async def scenario(unit: Unit) -> None:
        kind, said = {"main": (Kind.REFUSED, "may not speak"), "all": (Kind.STATUS, "child")}[access]
        await stage.until(lambda: any(said in text for text in stage.texts(kind)))

    play(stage, (f"spawn-speaker {stage.directory}/child", "wait"), scenario, notify_access=access)
    assert stage.texts(Kind.STATUS) == ([] if access == "main" else ["child"])


def test_a_stranger_cannot_speak_for_a_unit(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until(lambda: "up" in stage.lines)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(str(stage.directory / "weights@chat.notify"))
            sender.send(b"READY=1")
        await stage.until(lambda: stage.texts(Kind.REFUSED))
        assert unit.state is State.ACTIVATING

    play(stage, ("say up", "wait"), scenario, notify_access="all")


def test_one_that_says_it_is_stopping_is_no_longer_active_and_is_killed_if_it_does_not_end(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)
        assert unit.status().exit_status == -signal.SIGKILL

    play(stage, ("ready", "notify STOPPING=1 STATUS=bye", "wait"), scenario, stop_timeout_s=0.2)
    assert stage.states()[:4] == [State.ACTIVATING, State.ACTIVE, State.DEACTIVATING, State.AUTO_RESTART]


def test_one_that_is_stopping_is_not_made_ready_again_by_saying_so(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)

    steps = ("ready", "notify STOPPING=1", "ready", "barrier", "exit 1")
    play(stage, steps, scenario, first_restart_s=20.0, slowest_restart_s=20.0)
    assert stage.states()[:4] == [State.ACTIVATING, State.ACTIVE, State.DEACTIVATING, State.AUTO_RESTART]


def test_its_environment_is_ours_without_what_was_meant_for_us(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "7")
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/elsewhere")
    monkeypatch.setenv("OWN_VARIABLE", "kept")
    path = stage.directory / "report"

    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)

    play(stage, (f"report {path}", "ready", "wait"), scenario, environment={"ADDED": "1"})
    environment = report(path)["environment"]
    assert not environment.keys() & {"LISTEN_FDS", "LISTEN_PID", "WATCHDOG_USEC", "WATCHDOG_PID"}
    assert environment["NOTIFY_SOCKET"] == str(stage.directory / "weights@chat.notify")
    assert (environment["OWN_VARIABLE"], environment["ADDED"]) == ("kept", "1")
    assert report(path)["fds"] == [0, 1, 2]


def test_a_unit_waits_for_what_it_needs_and_says_so(stage: Stage) -> None:
    missing = ["weights@chat"]

    async def scenario() -> None:
        unit = stage.unit(described("engine@chat", "ready", "wait"), lambda: missing[0] if missing else None)

        async def waits(unit: Unit) -> None:
            await stage.until(lambda: stage.texts(Kind.STATE))
            assert (unit.state, unit.status().text, unit.status().starts) == (
                State.INACTIVE,
                "waits for weights@chat",
                0,
            )
            missing.clear()
            unit.nudge()
            await stage.until_state(unit, State.ACTIVE)

        await running(unit, waits)

    stage.play(scenario())


def test_a_bug_of_ours_leaves_no_process_behind(stage: Stage) -> None:
    pids: list[int | None] = []

    async def scenario() -> None:
        def hear(event: Event) -> None:
            if event.state is State.DEACTIVATING:
                pids.append(unit.status().pid)
                raise ZeroDivisionError

        stage.hear = hear  # type: ignore[method-assign]
        unit = stage.unit(
            described(
                "weights@chat", "store slab x", f"report {stage.directory}/report", "ready", "wait", store_limit=1
            )
        )
        await unit.start()
        await until_file(stage.directory / "report")
        with pytest.raises(ZeroDivisionError):
            await unit.stop()
        await unit.stop()

    stage.play(scenario())
    assert isinstance(stage.bugs[0], ZeroDivisionError)
    assert pids[0] is not None and ends(pids[0])


def test_a_unit_that_waits_can_be_stopped(stage: Stage) -> None:
    async def scenario() -> None:
        unit = stage.unit(described("engine@chat", "ready", "wait"), lambda: "weights@chat")
        await unit.start()
        await stage.until(lambda: stage.texts(Kind.STATE))
        await unit.stop()
        assert (unit.state, unit.status().starts) == (State.INACTIVE, 0)

    stage.play(scenario())


def test_a_program_that_does_not_exist_is_tried_again_and_named(stage: Stage) -> None:
    async def scenario() -> None:
        unit = stage.unit(replace(described("engine@chat"), argv=("/no/such/program",)))

        async def fails(unit: Unit) -> None:
            await stage.until_state(unit, State.AUTO_RESTART, starts=3)
            assert "cannot start /no/such/program: No such file or directory" in unit.status().said

        await running(unit, fails)

    stage.play(scenario())


def test_a_kill_while_it_is_stopped_ends_it_at_once(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        stopping = asyncio.create_task(unit.stop())
        await stage.until_state(unit, State.DEACTIVATING)
        unit.kill()
        await stopping
        assert unit.status().exit_status == -signal.SIGKILL

    play(stage, ("ignore SIGTERM", "ready", "wait"), scenario)


@pytest.mark.parametrize(("death", "last_word"), [("exit 3", True), ("die SIGSEGV", True), ("die SIGKILL", False)])
def test_the_last_line_is_no_reason_for_a_death_that_came_from_outside(
    stage: Stage, death: str, last_word: bool
) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.AUTO_RESTART)
        assert ("last word" in unit.status().text) is last_word

    play(stage, ("complain last word", death), scenario, first_restart_s=20.0, slowest_restart_s=20.0)


def test_a_restart_goes_from_one_run_to_the_next_without_being_inactive_between(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        await unit.restart()
        assert unit.state is State.ACTIVATING
        await stage.until_state(unit, State.ACTIVE)

    play(stage, ("ready", "wait"), scenario)
    once = [State.ACTIVATING, State.ACTIVE, State.DEACTIVATING]
    assert stage.states() == [*once, *once, State.INACTIVE]


def test_a_unit_that_is_killed_is_not_restarted(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        unit.kill()
        await stage.until_state(unit, State.FAILED)

    assert play(stage, ("ready", "wait"), scenario).status().starts == 1


def test_a_caller_that_gives_up_a_stop_does_not_leave_the_unit_half_stopped(stage: Stage) -> None:
    async def scenario(unit: Unit) -> None:
        await stage.until_state(unit, State.ACTIVE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(unit.stop(), 0.05)
        await unit.stop()
        assert unit.status().pid is None

    play(stage, ("ignore SIGTERM", "ready", "wait"), scenario, stop_timeout_s=0.3)
