"""Old weights are served until the checkpoint that replaces them is verified, and for good where it is refused."""

import asyncio
import threading
from typing import Any

import pytest

from appliance.client import KeeperClient, RefusedError
from appliance.errors import EXIT_CONFIG, EXIT_TRUST
from appliance.keeper import keeper, settings
from appliance.notify import Named
from appliance.verdict import Reason
from tests.keeper.serving import attach, offer
from tests.keeper.shards import OTHER_TARGET, TARGET, fingerprint_of, shard_of
from tests.keeper.stage import BAD_SIGNATURE, CORRUPT, TIMEOUT_S, Stage, given_back, living, set_up, stored
from tests.service_manager import ServiceManager

NEW = TARGET.root_digest


OLD = OTHER_TARGET.root_digest


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


def test_without_room_for_both_the_old_weights_are_waited_for_until_their_users_end(
    stage: Stage, manager: ServiceManager
) -> None:
    handed_over = given_back(stage, manager, "another")
    stage.will_verify(crowded=["cpu"])
    asked = threading.Event()

    def use(shard_id: str, ask: threading.Event) -> None:
        with KeeperClient.connect(stage.socket_path, timeout_s=TIMEOUT_S) as engine:
            engine.renew(shard_id=shard_id, client="engine@m")
            assert engine.wait_for_hangup() == "no room for the new weights beside the old"
            # Nobody is told of the old weights any more, and they are here until this engine has ended.
            with KeeperClient.connect(stage.socket_path) as other, pytest.raises(RefusedError) as caught:
                other.describe(role="target", rank=0, wait_s=0)
            assert caught.value.verdict.reason is Reason.LOADING
            assert "waiting for the end of engine@m" in caught.value.verdict.detail
            assert stage.loads == 0
            ask.set()

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            while not (old := [shard for shard in life.holdings.shards() if shard.record.target == OTHER_TARGET]):
                await life.holdings.changed()
            await asyncio.to_thread(use, old[0].record.shard_id, asked)
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}
            assert life.holdings.clearing == ""

    asyncio.run(live())
    assert asked.is_set()


def test_users_of_old_weights_that_do_not_end_are_not_waited_for_for_ever(
    stage: Stage, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAVE_TIMEOUT_S", 0.05)
    handed_over = given_back(stage, manager, "another")
    stage.will_verify(crowded=["cpu"])
    clients: list[KeeperClient] = []

    def use(shard_id: str) -> None:
        clients.append(KeeperClient.connect(stage.socket_path, timeout_s=TIMEOUT_S))
        clients[0].renew(shard_id=shard_id, client="engine@m")

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            while not (old := list(life.holdings.shards())):
                await life.holdings.changed()
            await asyncio.to_thread(use, old[0].record.shard_id)
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}

    asyncio.run(live())
    clients[0].close()


def test_with_room_for_both_nobody_is_asked_to_end(stage: Stage, manager: ServiceManager) -> None:
    handed_over = given_back(stage, manager, "another")
    stage.will_verify(crowded=["GPU-11111111-2222-3333-4444-555555555555"])

    async def live() -> None:
        async with living(stage, manager, handed_over) as life:
            await life.settled()
            assert life.held == {(NEW, 0), (NEW, 1)}
            assert life.holdings.clearing == ""

    asyncio.run(live())
