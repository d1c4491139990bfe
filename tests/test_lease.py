"""The lease of an attached shard: it ends with the connection, and is made again when a keeper comes back."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.handover.lease import Lease, end_process
from appliance.keeper.shard import Shard
from tests.keeper.serving import Serving
from tests.keeper.shards import shard_of

TIMEOUT_S = 20.0


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def leased(serving: Serving, shard: Shard, *, leave: Callable[[], None] = end_process) -> Lease:
    client = serving.connect()
    slabs = client.attach(role="target", rank=0, client="engine@m", fingerprint=shard.record.fingerprint)
    for slab in slabs:
        slab.close()
    return Lease(client, serving.path, shard_id=shard.record.shard_id, name="engine@m", leave=leave)


def test_a_lease_is_open_until_it_is_ended(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        lease = leased(serving, serving.put(shard_of()))
        assert lease.held
        serving.wait_until(lambda: len(serving.holdings.leases) == 1)
        lease.end()
        serving.wait_until(lambda: not serving.holdings.leases)


def test_a_lease_is_renewed_with_the_keeper_that_comes_back_with_the_same_shard(tmp_path: Path) -> None:
    shard_id = "0123456789abcdef"
    with Serving(tmp_path) as serving:
        lease = leased(serving, serving.put(shard_of(shard_id=shard_id)))
    assert eventually(lambda: not lease.held)
    with Serving(tmp_path) as serving:
        serving.put(shard_of(shard_id=shard_id))
        serving.wait_until(lambda: len(serving.holdings.leases) == 1)
        assert eventually(lambda: lease.held)
        lease.end()


def test_a_keeper_that_comes_back_with_other_weights_gets_no_lease(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        lease = leased(serving, serving.put(shard_of()))
    with Serving(tmp_path) as serving:
        serving.put(shard_of())
        assert eventually(lambda: not lease.alive)
        assert not lease.held
        assert not serving.holdings.leases
        lease.end()


def test_a_keeper_without_room_for_the_next_weights_has_their_user_end(tmp_path: Path) -> None:
    asked = threading.Event()
    with Serving(tmp_path) as serving:
        lease = leased(serving, serving.put(shard_of()), leave=asked.set)
        serving.wait_until(lambda: len(serving.holdings.leases) == 1)
        (held,) = serving.holdings.leases
        serving.call(lambda: held.ask_to_leave("no room"))
        assert asked.wait(TIMEOUT_S)
        assert lease.held  # until the process has really ended
        lease.end()


@pytest.mark.parametrize("held", [True, False])
def test_a_keeper_that_came_back_without_room_has_their_user_end(tmp_path: Path, held: bool) -> None:
    asked, shard_id = threading.Event(), "0123456789abcdef"
    with Serving(tmp_path) as serving:
        lease = leased(serving, serving.put(shard_of(shard_id=shard_id)), leave=asked.set)
    with Serving(tmp_path) as serving:
        serving.holdings.clearing = "no room"
        if held:
            serving.put(shard_of(shard_id=shard_id))
            serving.holdings.clearing = "no room"
        assert asked.wait(TIMEOUT_S)
        serving.wait_until(lambda: bool(serving.holdings.leases) is held)
        lease.end()


def test_the_process_ends_as_if_it_had_been_stopped() -> None:
    received = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.set())
    try:
        end_process()
        assert received.wait(TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ending_a_lease_while_no_keeper_answers_does_not_wait_for_one(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        lease = leased(serving, serving.put(shard_of()))
    assert eventually(lambda: not lease.held)
    began = time.monotonic()
    lease.end()
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_a_report_over_a_lost_lease_is_dropped_without_an_error(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        lease = leased(serving, serving.put(shard_of()))
    assert eventually(lambda: not lease.held)
    asked: list[str] = []
    lease.use(lambda client: asked.append("asked"))
    assert asked == []
    lease.end()
