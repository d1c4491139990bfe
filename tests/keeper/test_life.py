"""A keeper's life between its start and its end, and what the service manager hears of it."""

import asyncio
import os
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest

from appliance.client import KeeperClient
from appliance.errors import EXIT_HOST, EXIT_TRUST
from appliance.keeper import keeper as keepers
from appliance.keeper import loading
from appliance.notify import Named
from tests.keeper.probe import got
from tests.keeper.serving import donate, offer
from tests.keeper.shards import TARGET, donation_of
from tests.keeper.stage import Life, Stage, given_back, living
from tests.service_manager import ServiceManager

NEW = TARGET.root_digest


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
