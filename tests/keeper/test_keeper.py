"""A keeper's start, in every combination of what it is given back, what the checkpoint is, and what the loader does."""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.client import KeeperClient, RefusedError
from appliance.errors import EXIT_CONFIG, EXIT_HOST, EXIT_TRUST
from appliance.keeper import keeper as keepers
from appliance.keeper import loading, settings
from appliance.keeper.settings import Refusal
from appliance.keeper.shard import Shard
from appliance.notify import Named
from appliance.verdict import Reason
from tests.keeper.probe import got
from tests.keeper.serving import attach, donate, offer
from tests.keeper.shards import OTHER_TARGET, TARGET, donation_of, fingerprint_of, shard_of
from tests.keeper.stage import Life, Stage, living, stored
from tests.service_manager import ServiceManager

NEW, OLD = TARGET.root_digest, OTHER_TARGET.root_digest
BAD_SIGNATURE = Refusal("model.sig: not signed by a trusted key", EXIT_TRUST)
CORRUPT = Refusal("model.safetensors differs from its digest", EXIT_TRUST)

GIVEN = ("nothing", "the same", "another", "a part")
CHECKPOINT = ("fine", "refused", "broken manifest", "corrupt")
LOADER = ("works", "fails once", "refuses")


@dataclass(frozen=True)
class Outcome:
    """What must have happened once a keeper has settled."""

    exit_status: int | None
    ready: bool
    held: frozenset[tuple[str, int]]
    refused: bool
    loads: int


def outcome(given: str, checkpoint: str, loader: str) -> Outcome:
    """Return what must happen: old weights go only for a new checkpoint that was verified."""
    had = {
        "nothing": frozenset[tuple[str, int]](),
        "the same": frozenset({(NEW, 0), (NEW, 1)}),
        "another": frozenset({(OLD, 0), (OLD, 1)}),
        "a part": frozenset({(NEW, 0)}),
    }[given]
    if checkpoint in ("refused", "broken manifest"):
        if not had:
            return Outcome(EXIT_TRUST if checkpoint == "refused" else EXIT_CONFIG, False, had, False, 0)
        return Outcome(None, len(had) == 2, had, True, 0)
    if given == "another" and checkpoint == "corrupt":
        return Outcome(None, True, had, True, 0)
    if given == "the same":
        return Outcome(None, True, had, False, 0)
    kept = had if given == "a part" else frozenset()
    if loader == "refuses":
        return Outcome(None if kept else EXIT_TRUST, False, kept, bool(kept), 1)
    return Outcome(None, True, frozenset({(NEW, 0), (NEW, 1)}), False, 1 if loader == "works" else 2)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(tmp_path)
    monkeypatch.setattr(sys, "executable", str(stage.program))
    monkeypatch.setattr(loading, "FIRST_RETRY_S", 0.01)
    return stage


def given_back(stage: Stage, manager: ServiceManager, given: str) -> list[Named]:
    shards: dict[str, tuple[Shard, ...]] = {
        "nothing": (),
        "the same": (shard_of(TARGET, rank=0), shard_of(TARGET, rank=1)),
        "another": (shard_of(OTHER_TARGET, rank=0), shard_of(OTHER_TARGET, rank=1)),
        "a part": (shard_of(TARGET, rank=0),),
    }
    for name, unused in shards.items():
        if name != given:
            for shard in unused:
                shard.close()
    target = OTHER_TARGET if given == "another" else TARGET
    last = None if given == "nothing" else stage.settings(target=target)
    return stored(manager, *shards[given], settings=last)


def set_up(stage: Stage, checkpoint: str, loader: str) -> None:
    if checkpoint == "refused":
        stage.will_obtain(refusal=BAD_SIGNATURE)
    elif checkpoint == "broken manifest":
        stage.will_obtain(status=EXIT_CONFIG)
    elif checkpoint == "corrupt":
        stage.will_verify(refusal=CORRUPT)
    stage.will_load(*{"works": (), "fails once": (1,), "refuses": (EXIT_TRUST,)}[loader])


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("loader", LOADER)
def test_every_start_ends_as_it_must(
    stage: Stage, manager: ServiceManager, given: str, checkpoint: str, loader: str
) -> None:
    handed_over = given_back(stage, manager, given)
    set_up(stage, checkpoint, loader)
    seen: list[Outcome] = []

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            refused = bool(life.holdings.refusal)
            held = frozenset(life.held if life.exit_status is None else ())
            seen.append(Outcome(life.exit_status, manager.heard("READY=1"), held, refused, stage.loads))
            if life.exit_status is None:
                await life.stop()
                assert life.exit_status == 0

    asyncio.run(live())
    expected = outcome(given, checkpoint, loader)
    assert seen == [expected]
    # What the service manager has is what is held, so the next life begins where this one ended.
    shards = [name for name in manager.names() if name.endswith(".record")]
    assert len(shards) == len(expected.held)
    assert len(manager.names()) == 4 * len(shards) + ("w1.settings" in manager.names())
    assert ("verify" in stage.asked) == (given == "another" and checkpoint in ("fine", "corrupt"))


@pytest.mark.parametrize("checkpoint", ["refused", "broken manifest", "corrupt"])
@pytest.mark.parametrize(("old_ranks", "new_ranks"), [(1, 2), (2, 1)])
def test_weights_of_another_layout_are_served_as_they_were_while_the_new_checkpoint_is_no_good(
    stage: Stage, manager: ServiceManager, checkpoint: str, old_ranks: int, new_ranks: int
) -> None:
    stage.will_obtain(ranks=new_ranks)
    shards = [shard_of(OTHER_TARGET, rank=rank) for rank in range(old_ranks)]
    handed_over = stored(manager, *shards, settings=stage.settings(target=OTHER_TARGET, ranks=old_ranks))
    if checkpoint == "refused":
        stage.will_obtain(ranks=new_ranks, refusal=BAD_SIGNATURE)
    elif checkpoint == "broken manifest":
        stage.will_obtain(status=EXIT_CONFIG)
    else:
        stage.will_verify(ranks=new_ranks, refusal=CORRUPT)

    def attach_all() -> None:
        for rank in range(old_ranks):
            with KeeperClient.connect(stage.socket_path) as client:
                assert attach(client, fingerprint_of(OTHER_TARGET, rank), rank=rank) == 2

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.held == {(OLD, rank) for rank in range(old_ranks)}
            assert manager.heard("READY=1")
            await asyncio.to_thread(attach_all)

    asyncio.run(live())
    assert len(manager.names()) == 4 * old_ranks + 1


@pytest.mark.parametrize(("old_ranks", "new_ranks"), [(1, 2), (2, 1), (2, 3)])
def test_another_layout_replaces_the_old_one_once_it_is_verified(
    stage: Stage, manager: ServiceManager, old_ranks: int, new_ranks: int
) -> None:
    stage.will_obtain(ranks=new_ranks)
    stage.will_verify(ranks=new_ranks)
    shards = [shard_of(OTHER_TARGET, rank=rank) for rank in range(old_ranks)]
    handed_over = stored(manager, *shards, settings=stage.settings(target=OTHER_TARGET, ranks=old_ranks))

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.held == {(NEW, rank) for rank in range(new_ranks)}

    asyncio.run(live())
    assert len(manager.names()) == 4 * new_ranks + 1


def test_old_weights_are_served_and_nothing_can_be_donated_while_the_new_checkpoint_is_verified(
    stage: Stage, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over = given_back(stage, manager, "another")
    verifying, go_on = asyncio.Event(), asyncio.Event()
    real = settings.verify

    async def verify(*arguments: Any, **keywords: Any) -> Any:
        verifying.set()
        await go_on.wait()
        return await real(*arguments, **keywords)

    monkeypatch.setattr(settings, "verify", verify)

    def look() -> None:
        with KeeperClient.connect(stage.socket_path) as client:
            assert attach(client, fingerprint_of(OTHER_TARGET)) == 2
            assert client.status()["state"] == "resident"
            assert "verifying" in client.status()["progress"]
            with pytest.raises(RefusedError) as caught:
                offer(client, target=TARGET, replace=True)
            assert caught.value.verdict.reason is Reason.LOADING

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await verifying.wait()
            await asyncio.to_thread(look)
            assert not manager.heard("READY=1")
            go_on.set()
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}

    asyncio.run(live())


@pytest.mark.parametrize("status", [1, EXIT_CONFIG, EXIT_TRUST])
def test_a_verification_that_cannot_be_made_loses_nothing(stage: Stage, manager: ServiceManager, status: int) -> None:
    stage.will_verify(status=status)
    asyncio.run(refusing(stage, manager, given_back(stage, manager, "another"), "could not be verified"))


def test_a_checkpoint_that_changes_again_while_it_is_verified_loses_nothing(
    stage: Stage, manager: ServiceManager
) -> None:
    stage.will_verify(target=fingerprint_of(TARGET, changed="1"))
    asyncio.run(refusing(stage, manager, given_back(stage, manager, "another"), "changed while it was verified"))


async def refusing(stage: Stage, manager: ServiceManager, handed_over: list[Named], why: str) -> None:
    async with living(stage, manager, handed_over) as life:
        await life.settled()
        assert life.held == {(OLD, 0), (OLD, 1)}
        assert why in life.holdings.refusal
        assert manager.heard("READY=1")
        assert stage.loads == 0


def test_the_next_life_of_a_refusing_keeper_still_knows_the_old_layout(stage: Stage, manager: ServiceManager) -> None:
    # The manifest asks for one rank now; first the signature is bad, then the manifest breaks too.
    handed_over = given_back(stage, manager, "another")
    stage.will_obtain(ranks=1, refusal=BAD_SIGNATURE)

    async def live(given: list[Named]) -> None:
        async with living(stage, manager, given) as life:
            await life.settled()
            assert life.held == {(OLD, 0), (OLD, 1)}

    asyncio.run(live(handed_over))
    stage.will_obtain(status=EXIT_CONFIG)
    asyncio.run(live(manager.handed_over()))
    stage.will_obtain(ranks=1)
    stage.will_verify(ranks=1, refusal=CORRUPT)
    asyncio.run(live(manager.handed_over()))
    stage.will_verify(ranks=1)

    async def replaced() -> None:
        async with living(stage, manager, manager.handed_over()) as life:
            while life.held != {(NEW, 0)}:
                await life.holdings.changed()
            assert not life.holdings.refusal

    asyncio.run(asyncio.wait_for(replaced(), 20))


def test_what_is_lost_of_the_old_weights_is_still_missed_after_a_refusal(stage: Stage, manager: ServiceManager) -> None:
    handed_over = stored(manager, shard_of(OTHER_TARGET, rank=0), settings=stage.settings(target=OTHER_TARGET))
    stage.will_obtain(ranks=1, refusal=BAD_SIGNATURE)

    async def live(given: list[Named]) -> None:
        async with living(stage, manager, given) as life:
            await life.settled()
            assert life.held == {(OLD, 0)}
            assert life.holdings.missing == [("target", 1)]

    asyncio.run(live(handed_over))
    stage.will_obtain(status=EXIT_CONFIG)
    asyncio.run(live(manager.handed_over()))
    assert not manager.heard("READY=1")


@pytest.mark.parametrize("checkpoint", ["refused", "broken manifest", "corrupt"])
def test_nothing_replaces_old_weights_while_the_new_checkpoint_is_no_good(
    stage: Stage, manager: ServiceManager, checkpoint: str
) -> None:
    handed_over = given_back(stage, manager, "another")
    set_up(stage, checkpoint, "works")

    def replace() -> None:
        for target in (TARGET, OTHER_TARGET):
            with KeeperClient.connect(stage.socket_path) as donor:
                with pytest.raises(RefusedError) as caught:
                    offer(donor, target=target, replace=True)
                assert caught.value.verdict.reason is Reason.CHECKPOINT_REFUSED

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            await asyncio.to_thread(replace)
            assert life.held == {(OLD, 0), (OLD, 1)}

    asyncio.run(live())


def test_without_stored_settings_a_broken_manifest_ends_a_keeper_whatever_it_was_given(
    stage: Stage, manager: ServiceManager
) -> None:
    handed_over = stored(manager, shard_of(TARGET, rank=0), settings=None)
    stage.will_obtain(status=EXIT_CONFIG)

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.exit_status == EXIT_CONFIG

    asyncio.run(live())


def test_stored_settings_of_another_version_are_of_no_use_and_do_no_harm(stage: Stage, manager: ServiceManager) -> None:
    handed_over = stored(manager, shard_of(TARGET, rank=0), shard_of(TARGET, rank=1), settings={"v": 7})

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}
            assert manager.heard("READY=1")

    asyncio.run(live())


def test_ready_is_said_once_and_only_when_every_shard_is_resident(stage: Stage, manager: ServiceManager) -> None:
    stage.will_load(ranks=[0])  # one of two

    def donate_the_other() -> None:
        with KeeperClient.connect(stage.socket_path) as donor:
            offer(donor, rank=1)
            with closing(donation_of(rank=1)) as donation:
                donate(donor, donation)

    async def live() -> None:
        async with living(stage, manager) as life:
            while life.held != {(NEW, 0)} or "trying again" not in life.holdings.trouble:
                await life.holdings.changed()
            assert not manager.heard("READY=1")
            await asyncio.to_thread(donate_the_other)
            await asyncio.to_thread(manager.wait_for_line, "READY=1")
            life.holdings.touch()
            await life.status()

    asyncio.run(asyncio.wait_for(live(), 30))
    assert sum("READY=1" in lines for lines in manager.said()) == 1


def test_a_slot_that_is_emptied_and_given_up_is_filled_by_the_loader_again(
    stage: Stage, manager: ServiceManager
) -> None:
    def replace_and_die() -> None:
        with KeeperClient.connect(stage.socket_path) as donor:
            offer(donor, rank=0, replace=True)

    async def live() -> None:
        async with living(stage, manager, given_back(stage, manager, "the same")) as life:
            await life.settled()
            before = {shard.record.shard_id for shard in life.holdings.shards()}
            await asyncio.to_thread(replace_and_die)
            while life.holdings.missing or {shard.record.shard_id for shard in life.holdings.shards()} == before:
                await life.holdings.changed()
            assert stage.loads == 1

    asyncio.run(asyncio.wait_for(live(), 30))


def test_what_was_evicted_is_not_loaded_again_until_the_next_life(stage: Stage, manager: ServiceManager) -> None:
    def evict() -> None:
        with KeeperClient.connect(stage.socket_path) as owner:
            assert owner.evict(force=False)

    async def live() -> None:
        async with living(stage, manager, given_back(stage, manager, "the same")) as life:
            await life.settled()
            await asyncio.to_thread(evict)
            for _ in range(3):
                assert (await life.status())["state"] == "empty"
            assert stage.loads == 0

    asyncio.run(live())
    assert manager.names() == ["w1.settings"]

    async def next_life() -> None:
        async with living(stage, manager, manager.handed_over()) as life:
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}
            assert stage.loads == 1

    asyncio.run(asyncio.wait_for(next_life(), 30))


def test_a_loader_that_refuses_after_ready_does_not_end_the_keeper(stage: Stage, manager: ServiceManager) -> None:
    stage.will_load(EXIT_TRUST)

    def replace_and_die() -> None:
        for rank in (0, 1):
            with KeeperClient.connect(stage.socket_path) as donor:
                offer(donor, rank=rank, replace=True)

    async def live() -> None:
        async with living(stage, manager, given_back(stage, manager, "the same")) as life:
            await life.settled()
            await asyncio.to_thread(replace_and_die)
            while not life.holdings.refusal:
                await life.holdings.changed()
            assert (await life.status())["refused"]

    asyncio.run(asyncio.wait_for(live(), 30))


class TakenPort:
    """A port that another process listens on."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def test_a_health_port_that_is_taken_ends_a_keeper_that_holds_nothing(stage: Stage, manager: ServiceManager) -> None:
    with closing(TakenPort()) as port:
        stage.will_obtain(health_port=port.number)

        async def live() -> None:
            async with living(stage, manager) as life:
                await life.settled()
                assert life.exit_status == EXIT_HOST

        asyncio.run(live())
    assert stage.loads == 0


def test_a_health_port_that_is_taken_does_not_cost_weights_and_is_tried_again(
    stage: Stage, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "HEALTH_RETRY_S", 0.01)
    handed_over = given_back(stage, manager, "the same")

    async def live() -> None:
        port = TakenPort()
        stage.will_obtain(health_port=port.number)
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}
            port.close()
            async with asyncio.timeout(20):
                while True:
                    try:
                        code, _, _ = await asyncio.to_thread(got, f"http://127.0.0.1:{port.number}/health")
                        break
                    except OSError:
                        await asyncio.sleep(0.01)
            assert code == 200

    asyncio.run(live())


@pytest.mark.parametrize("when", ["obtaining", "verifying", "loading", "waiting to try again", "resident"])
def test_sigterm_ends_a_keeper_cleanly_at_any_time(
    stage: Stage, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch, when: str, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    os.mkfifo(reached)
    hang = f"#!/bin/sh\necho x > {reached}\nexec sleep 600\n"
    script = tmp_path / "hang"
    script.write_text(hang)
    script.chmod(0o755)
    given = {"verifying": "another", "resident": "the same"}.get(when, "nothing")
    handed_over = given_back(stage, manager, given)
    if when == "obtaining":
        monkeypatch.setattr(sys, "executable", str(script))
    elif when == "verifying":
        stage.program.write_text(
            f'#!/bin/sh\ncase "$*" in *--verify*) exec {script};; *) cat {tmp_path}/obtain;; esac\n'
        )
    elif when == "loading":
        stage.will_obtain(loader=[str(script)])
    elif when == "waiting to try again":
        monkeypatch.setattr(loading, "FIRST_RETRY_S", 600.0)
        stage.will_load(1)

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            if when == "resident":
                await life.settled()
            elif when == "waiting to try again":
                while "trying again" not in life.holdings.trouble:
                    await life.holdings.changed()
            else:
                await asyncio.to_thread(reached.read_text)
            await life.stop()
            assert life.exit_status == 0

    asyncio.run(asyncio.wait_for(live(), 30))
    assert manager.heard("STOPPING=1")


def test_the_watchdog_is_fed(stage: Stage, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        async with living(stage, manager, given_back(stage, manager, "the same")):
            await asyncio.to_thread(
                manager.wait_for, lambda manager: sum("WATCHDOG=1" in lines for lines in manager.said()) >= 3
            )

    manager_environ = manager.environ | {"WATCHDOG_USEC": "60000"}
    monkeypatch.setattr(type(manager), "environ", property(lambda self: manager_environ))
    asyncio.run(live())


def test_every_step_of_a_start_asks_for_more_time_and_nothing_does_after_it(
    stage: Stage, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "START_EXTENSION_S", 7.0)
    monkeypatch.setattr(loading, "FIRST_RETRY_S", 600.0)
    stage.will_load(1)

    def asked() -> int:
        return sum("EXTEND_TIMEOUT_USEC=7000000" in lines for lines in manager.said())

    def donate_all() -> None:
        for rank in (0, 1):
            with KeeperClient.connect(stage.socket_path) as donor:
                offer(donor, rank=rank)
                for step in range(3):
                    before = asked()
                    donor.progress(f"rank {rank}: reading {step} of 3")
                    manager.wait_for(lambda _, before=before: asked() > before)  # type: ignore[misc]
                with closing(donation_of(rank=rank)) as donation:
                    donate(donor, donation)

    async def live() -> None:
        async with living(stage, manager) as life:
            await asyncio.to_thread(manager.wait_for, lambda _: asked() >= 2)  # the loader starts, the loader fails
            await asyncio.to_thread(donate_all)
            await asyncio.to_thread(manager.wait_for_line, "READY=1")
            ready = asked()
            life.holdings.trouble = "something later"
            life.holdings.touch()
            await life.status()
            await asyncio.to_thread(life._notifier.barrier)
            assert asked() == ready

    asyncio.run(asyncio.wait_for(live(), 30))


def test_status_lines_tell_progress_and_then_what_is_held(stage: Stage, manager: ServiceManager) -> None:
    async def live() -> None:
        async with living(stage, manager) as life:
            await life.settled()

    asyncio.run(live())
    assert manager.heard("STATUS=starting the loader")
    assert manager.heard("STATUS=resident: 16384 bytes, 0 leases") or manager.heard(
        "STATUS=resident: 16384 bytes, 1 leases"
    )


def test_life_after_life_the_store_holds_the_same(stage: Stage, manager: ServiceManager) -> None:
    async def live(given: list[Named]) -> Life:
        async with living(stage, manager, given) as life:
            await life.settled()
            return life

    asyncio.run(live([]))
    names = sorted(manager.names())
    assert len(names) == 9
    for _ in range(3):
        asyncio.run(live(manager.handed_over()))
        assert sorted(manager.names()) == names
    assert stage.loads == 1
