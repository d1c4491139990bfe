"""What a keeper holds: state is derived, and nobody who waits for a change misses one."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from appliance.keeper.holdings import Holdings, State
from appliance.keeper.shard import Shard
from tests.keeper.shards import Filling, shard_of, slots


@pytest.fixture
def shards() -> Iterator[list[Shard]]:
    shards = [shard_of(rank=0), shard_of(rank=1)]
    yield shards
    for shard in shards:
        shard.close()


def test_no_slots_are_not_resident() -> None:
    assert Holdings().state is State.EMPTY


def test_every_sequence_of_four_events_leaves_the_state_that_its_end_implies(shards: list[Shard]) -> None:
    donor = Filling()
    for sequence in itertools.product(("put 0", "put 1", "take 0", "take 1", "grant 0", "end 0", "forget"), repeat=4):
        holdings = Holdings()
        holdings.lay_out(slots(2))
        filled: set[int] = set()
        granted = False
        for event in sequence:
            act, _, number = event.partition(" ")
            rank = int(number or 0)
            key = ("target", rank)
            if act == "put" and rank in filled:
                with pytest.raises(ValueError, match="is filled"):
                    holdings.put(shards[rank])
            elif act == "put":
                holdings.put(shards[rank])
                filled.add(rank)
            elif act == "take":
                assert holdings.take(key) is (shards[rank] if rank in filled else None)
                filled.discard(rank)
            elif act == "grant":
                holdings.set_donor(key, donor)
                granted = True
            elif act == "end":
                holdings.end_donation(key)
                granted = False
            else:
                holdings.forget_donor(donor)
                granted = False
        missing = [("target", rank) for rank in (0, 1) if rank not in filled]
        assert holdings.missing == missing, sequence
        assert holdings.unattended == [key for key in missing if not (granted and key == ("target", 0))], sequence
        assert holdings.is_donor(donor) == granted, sequence
        expected = State.RESIDENT if not missing else State.LOADING if granted else State.EMPTY
        assert holdings.state is expected, sequence
        assert holdings.size_bytes == sum(shards[rank].record.size_bytes for rank in filled)


def test_a_slot_that_is_filled_cannot_be_laid_out_away(shards: list[Shard]) -> None:
    holdings = Holdings()
    holdings.lay_out(slots(2))
    holdings.put(shards[1])
    with pytest.raises(ValueError, match="are filled"):
        holdings.lay_out(slots(1))
    holdings.lay_out(slots(3))
    assert holdings.shard(("target", 1)) is shards[1]
    assert holdings.missing == [("target", 0), ("target", 2)]


def test_a_shard_without_a_slot_is_not_put_anywhere(shards: list[Shard]) -> None:
    holdings = Holdings()
    holdings.lay_out(slots(1))
    with pytest.raises(KeyError):
        holdings.put(shards[1])


def test_what_was_said_of_a_load_ends_with_the_load(shards: list[Shard]) -> None:
    holdings = Holdings()
    holdings.lay_out(slots(1))
    donor = Filling()
    holdings.set_donor(("target", 0), donor)
    holdings.progress = "reading 3 of 8"
    holdings.forget_donor(donor)
    assert holdings.progress == ""
    assert not holdings.loading


def test_who_fills_slots_is_told_once_each_and_the_child_only_while_it_runs() -> None:
    holdings = Holdings()
    holdings.lay_out(slots(3))
    holdings.loader_pid = 7
    assert holdings.loaders() == {7: "loader"}
    child, engine = Filling("loader@m", 7), Filling("engine@m", 8)
    for rank, donor in enumerate((child, engine, engine)):
        holdings.set_donor(("target", rank), donor)
    assert holdings.loaders() == {7: "loader@m", 8: "engine@m"}
    holdings.loader_pid = None
    holdings.forget_donor(child)
    assert holdings.loaders() == {8: "engine@m"}
    holdings.end_donation(("target", 1))
    holdings.end_donation(("target", 2))
    assert holdings.loaders() == {}


def test_trouble_ends_when_everything_is_resident(shards: list[Shard]) -> None:
    holdings = Holdings()
    holdings.lay_out(slots(2))
    holdings.trouble = "the loader failed"
    holdings.put(shards[0])
    assert holdings.trouble
    holdings.put(shards[1])
    assert holdings.trouble == ""


def test_after_an_eviction_nobody_has_to_fill_anything_until_somebody_does(shards: list[Shard]) -> None:
    holdings = Holdings()
    holdings.lay_out(slots(2))
    holdings.evicted = True
    assert holdings.unattended == []
    holdings.put(shards[0])
    assert holdings.unattended == [("target", 1)]


def test_a_change_between_asking_for_it_and_waiting_for_it_is_not_missed() -> None:
    async def wait() -> None:
        holdings = Holdings()
        change = asyncio.ensure_future(holdings.changed())
        holdings.touch()  # before the task had its first turn
        await asyncio.wait_for(change, 5)

    asyncio.run(wait())


def test_a_change_wakes_everyone_and_only_once() -> None:
    async def wait() -> None:
        holdings = Holdings()
        first = [asyncio.ensure_future(holdings.changed()) for _ in range(3)]
        await asyncio.sleep(0)
        holdings.touch()
        await asyncio.wait_for(asyncio.gather(*first), 5)
        second = asyncio.ensure_future(holdings.changed())
        await asyncio.sleep(0)
        assert not second.done()
        second.cancel()

    asyncio.run(wait())
