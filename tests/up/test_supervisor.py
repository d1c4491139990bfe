import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import HostError, ResourceError, TrustError
from appliance.up.description import Checkpoint, Event, Kind, Result, State, UnitDescription
from appliance.up.group import MARK
from appliance.up.supervisor import Supervisor
from tests.up.stage import TIMEOUT_S, described, ends, puppet, until, until_file


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


@pytest.fixture
def play(folder: Path) -> Play:
    return Play(folder)


def ended_at(path: Path) -> float:
    return path.stat().st_mtime


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


def checkpoint(play: Play, *steps: str) -> Checkpoint:
    directory = play.folder / "checkpoint"
    directory.mkdir()
    (directory / "model.sig").write_text("first")
    return Checkpoint("chat", directory, puppet(*steps), ("weights@chat", "engine@chat"))


async def replace_signature(play: Play, text: str) -> None:
    path = play.folder / "checkpoint" / "new"
    path.write_text(text)
    path.replace(play.folder / "checkpoint" / "model.sig")


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.up.watch.INTERVAL_S", 0.01)
    monkeypatch.setattr("appliance.up.watch.SETTLE_S", 0.03)


@pytest.mark.usefixtures("quick_watch")
def test_a_new_checkpoint_restarts_the_keeper_and_then_the_engine(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        play.events.clear()
        await replace_signature(play, "second")
        await until(lambda: supervisor.renewals("chat") == (1, 0))
        await supervisor.wait_ready("engine@chat", TIMEOUT_S)
        active = [event.unit for event in play.events if event.state is State.ACTIVE]
        assert active == ["weights@chat", "engine@chat"]
        assert supervisor.status("weights@chat").stored == 3

    play.checkpoints = (checkpoint(play, "say %7B%7D"),)
    play.run(scenario)


@pytest.mark.usefixtures("quick_watch")
def test_a_new_checkpoint_that_is_not_in_order_changes_nothing_and_is_told(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        before = [(look.pid, look.starts) for look in supervisor.statuses()]
        await replace_signature(play, "second")
        await until(lambda: supervisor.renewals("chat") == (0, 1))
        assert [(look.pid, look.starts) for look in supervisor.statuses()] == before
        told = [event for event in play.events if event.kind is Kind.RENEWAL and event.serious]
        assert [(event.unit, "a.safetensors: differs" in event.text) for event in told] == [("chat", True)]

    play.checkpoints = (checkpoint(play, "complain a.safetensors: differs", "exit 77"),)
    play.run(scenario)
    assert any("a.safetensors: differs" in text and serious for _, text, serious in play.screen.lines)


@pytest.mark.usefixtures("quick_watch")
def test_what_somebody_stopped_is_not_started_for_a_new_checkpoint(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await supervisor.stop("engine@chat")
        await replace_signature(play, "second")
        await until(lambda: supervisor.renewals("chat") == (1, 0))
        assert supervisor.status("engine@chat").state is State.INACTIVE

    play.checkpoints = (checkpoint(play, "say %7B%7D"),)
    play.run(scenario)
    assert (play.starts("weights"), play.starts("engine")) == (2, 1)


@pytest.mark.usefixtures("quick_watch")
def test_an_engine_that_refused_its_weights_starts_again_on_the_new_checkpoint(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.status("engine@chat").state is State.FAILED)
        await replace_signature(play, "second")
        await until(lambda: supervisor.renewals("chat") == (1, 0))
        await supervisor.wait_ready("engine@chat")

    play.checkpoints = (checkpoint(play, "say %7B%7D"),)
    play.run(scenario, play.weights(), play.engine(f"unless {play.folder}/refused exit 77"))


@pytest.mark.usefixtures("quick_watch")
def test_a_checkpoint_that_was_refused_at_the_start_is_looked_at_again_when_a_file_is_put_right(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.status("weights@chat").state is State.FAILED)
        await asyncio.sleep(0.2)  # the watch has seen what is there
        (play.folder / "checkpoint" / "a.safetensors").write_text("as it was signed")
        await supervisor.wait_ready("engine@other", TIMEOUT_S)
        await until(lambda: supervisor.renewals("chat") == (1, 0))
        await supervisor.wait_ready("engine@chat", TIMEOUT_S)

    play.checkpoints = (checkpoint(play, "say %7B%7D"),)
    other = described("engine@other", "ready", "wait")
    play.run(scenario, play.weights(f"unless {play.folder}/refused exit 77"), play.engine(), other)


@pytest.mark.usefixtures("quick_watch")
def test_whoever_waits_for_a_failed_engine_waits_for_the_new_checkpoint_to_start_it(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.status("engine@chat").state is State.FAILED)
        await replace_signature(play, "second")
        await until_file(play.folder / "verifying")
        waiting = asyncio.create_task(supervisor.wait_ready("engine@chat"))
        await asyncio.sleep(0)
        (play.folder / "go").touch()
        assert (await waiting).starts == 2

    verify = f"report {play.folder}/verifying", f"until {play.folder}/go", "say %7B%7D"
    play.checkpoints = (checkpoint(play, *verify),)
    play.run(scenario, play.weights(), play.engine(f"unless {play.folder}/refused exit 77"))


@pytest.mark.usefixtures("quick_watch")
def test_whoever_waits_for_a_failed_engine_learns_that_the_new_checkpoint_is_refused(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.status("engine@chat").state is State.FAILED)
        await replace_signature(play, "second")
        await until_file(play.folder / "verifying")
        with pytest.raises(TrustError, match="status 77"):
            await supervisor.wait_ready("engine@chat", TIMEOUT_S)

    play.checkpoints = (checkpoint(play, f"report {play.folder}/verifying", "sleep 0.2", "exit 77"),)
    play.run(scenario, play.weights(), play.engine("exit 77"))


@pytest.mark.usefixtures("quick_watch")
def test_a_checkpoint_that_verifies_but_does_not_load_does_not_keep_a_better_one_out(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        (play.folder / "broken").touch()
        await replace_signature(play, "second")
        await until(lambda: supervisor.status("weights@chat").state is State.AUTO_RESTART)
        assert supervisor.status("engine@chat").state is State.ACTIVE
        (play.folder / "broken").unlink()
        await replace_signature(play, "third")
        await until(lambda: supervisor.renewals("chat") == (1, 0))

    play.checkpoints = (checkpoint(play, "say %7B%7D"),)
    never_by_itself = {"first_restart_s": 1000.0, "slowest_restart_s": 1000.0}
    play.run(scenario, play.weights(f"if {play.folder}/broken exit 75", **never_by_itself), play.engine())


@pytest.mark.usefixtures("quick_watch")
def test_a_verification_is_ended_when_everything_is_stopped(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await replace_signature(play, "second")
        await until_file(play.folder / "verifying")

    play.checkpoints = (checkpoint(play, f"report {play.folder}/verifying", "wait"),)
    started = time.monotonic()
    play.run(scenario)
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert ends(json.loads((play.folder / "verifying").read_text())["pid"])


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
