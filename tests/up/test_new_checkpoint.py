"""A checkpoint that is replaced while its units run: what is restarted, and what is left alone."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from appliance.errors import TrustError
from appliance.up.description import Checkpoint, Kind, State
from appliance.up.supervisor import Supervisor
from tests.up.stage import TIMEOUT_S, described, ends, puppet, until, until_file
from tests.up.troupe import Play


def checkpoint(play: Play, *steps: str) -> Checkpoint:
    directory = play.folder / "checkpoint"
    directory.mkdir()
    (directory / "model.sig").write_text("first")
    return Checkpoint("chat", (directory,), puppet(*steps), ("weights@chat", "engine@chat"))


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
def test_a_drafts_new_checkpoint_restarts_them_too(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        play.events.clear()
        (draft / "new").write_text("second")
        (draft / "new").replace(draft / "model.sig")
        await until(lambda: supervisor.renewals("chat") == (1, 0))
        active = [event.unit for event in play.events if event.state is State.ACTIVE]
        assert active[0] == "weights@chat"

    model = checkpoint(play, "say %7B%7D")
    draft = play.folder / "draft"
    draft.mkdir()
    (draft / "model.sig").write_text("first")
    play.checkpoints = (replace(model, directories=(*model.directories, draft)),)
    play.run(scenario)


@pytest.mark.usefixtures("quick_watch")
def test_a_refusal_ends_when_a_file_of_the_draft_is_put_right(play: Play) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await supervisor.wait_ready("engine@chat")
        await replace_signature(play, "second")
        await until(lambda: supervisor.renewals("chat") == (0, 1))
        await asyncio.sleep(0.2)  # the draft's watch has seen what is there
        (play.folder / "right").touch()
        (draft / "a.safetensors").write_text("as it was signed")
        await until(lambda: supervisor.renewals("chat") == (1, 1))
        (play.folder / "checkpoint" / "README.md").write_text("something else")
        await asyncio.sleep(0.2)  # nobody asks for it, under the same signature
        assert supervisor.renewals("chat") == (1, 1)

    model = checkpoint(play, f"unless {play.folder}/right exit 77", "say %7B%7D")
    draft = play.folder / "draft"
    draft.mkdir()
    (draft / "model.sig").write_text("first")
    (draft / "a.safetensors").write_text("damaged")
    play.checkpoints = (replace(model, directories=(*model.directories, draft)),)
    play.run(scenario)


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
