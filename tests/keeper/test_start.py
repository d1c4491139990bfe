"""What a keeper begins with: resident weights stay in their slots until what replaces them is verified."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.keeper.settings import KeeperSettings, Refusal, Slot
from appliance.keeper.shard import Shard
from appliance.keeper.start import plan
from tests.keeper.shards import OTHER_TARGET, TARGET, settings_of, shard_of

RUNTIME = Path("/run/m")


@pytest.fixture
def shards() -> Iterator[dict[str, Shard]]:
    """Give shards of two targets: `new` is what the manifest says now, `old` what it said before."""
    shards = {
        "new 0": shard_of(TARGET, rank=0),
        "new 1": shard_of(TARGET, rank=1),
        "old 0": shard_of(OTHER_TARGET, rank=0),
        "old 1": shard_of(OTHER_TARGET, rank=1),
        "new 0 elsewhere": shard_of(TARGET, rank=0, device="GPU-a"),
    }
    yield shards
    for shard in shards.values():
        shard.close()


def new(ranks: int = 1) -> KeeperSettings:
    return settings_of(RUNTIME, target=TARGET, ranks=ranks)


def old(ranks: int = 1) -> KeeperSettings:
    return settings_of(RUNTIME, target=OTHER_TARGET, ranks=ranks)


def bad(ranks: int = 1) -> KeeperSettings:
    return settings_of(RUNTIME, ranks=ranks, refusal=Refusal("bad signature", 77))


def test_nothing_given_back_is_an_empty_start(shards: dict[str, Shard]) -> None:
    start = plan([], settings=new(2), last=None, refused=False)
    assert (start.slots, start.keep, start.foreign, start.drop) == (new(2).slots, (), (), ())


def test_what_is_wanted_is_kept(shards: dict[str, Shard]) -> None:
    given = [shards["new 1"], shards["new 0"]]
    start = plan(given, settings=new(2), last=new(2), refused=False)
    assert set(start.keep) == set(given)
    assert (start.slots, start.foreign, start.drop) == (new(2).slots, (), ())


def test_a_part_of_what_is_wanted_is_kept(shards: dict[str, Shard]) -> None:
    start = plan([shards["new 1"]], settings=new(2), last=new(2), refused=False)
    assert (start.slots, start.keep, start.foreign) == (new(2).slots, (shards["new 1"],), ())


@pytest.mark.parametrize(("old_ranks", "new_ranks"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_weights_of_another_target_are_served_in_their_own_slots_until_they_are_replaced(
    shards: dict[str, Shard], old_ranks: int, new_ranks: int
) -> None:
    given = [shards[f"old {rank}"] for rank in range(old_ranks)]
    start = plan(given, settings=new(new_ranks), last=old(old_ranks), refused=False)
    assert start.slots == old(old_ranks).slots
    assert set(start.keep) == set(start.foreign) == set(given)
    assert start.drop == ()


@pytest.mark.parametrize("last", [old(2), None], ids=["known settings", "unknown settings"])
def test_while_the_checkpoint_is_refused_everything_stays_where_it_was(
    shards: dict[str, Shard], last: KeeperSettings | None
) -> None:
    given = [shards["old 0"], shards["old 1"]]
    start = plan(given, settings=bad(1), last=last, refused=True)
    assert start.slots == old(2).slots
    assert set(start.keep) == set(given)
    assert (start.foreign, start.drop) == ((), ())


def test_a_slot_whose_shard_is_lost_stays_empty_while_the_checkpoint_is_refused(shards: dict[str, Shard]) -> None:
    start = plan([shards["old 1"]], settings=bad(2), last=old(2), refused=True)
    assert (start.slots, start.keep) == (old(2).slots, (shards["old 1"],))


def test_where_two_fit_a_slot_the_verified_one_wins(shards: dict[str, Shard]) -> None:
    for given in itertools.permutations([shards["old 0"], shards["new 0"]]):
        start = plan(given, settings=new(1), last=new(1), refused=False)
        assert (start.slots, start.keep, start.drop) == (new(1).slots, (shards["new 0"],), (shards["old 0"],))
        assert start.foreign == ()


def test_a_replacement_that_was_interrupted_goes_on(shards: dict[str, Shard]) -> None:
    given = [shards["new 0"], shards["old 1"]]
    start = plan(given, settings=new(2), last=new(2), refused=False)
    assert (set(start.keep), start.foreign, start.drop) == (set(given), (shards["old 1"],), ())


def test_weights_on_another_device_are_foreign_and_keep_their_device(shards: dict[str, Shard]) -> None:
    start = plan([shards["new 0 elsewhere"]], settings=new(1), last=None, refused=False)
    assert start.foreign == (shards["new 0 elsewhere"],)
    assert start.slots == (Slot("target", 0, "GPU-a"),)


def test_every_combination_loses_nothing_that_has_a_slot_of_its_own(shards: dict[str, Shard]) -> None:
    for count in range(len(shards) + 1):
        for given in itertools.permutations(shards.values(), count):
            for last, refused in itertools.product((None, new(2), old(1), old(2)), (True, False)):
                start = plan(given, settings=bad() if refused else new(2), last=last, refused=refused)
                laid_out = {slot.key: slot for slot in start.slots}
                assert {id(shard) for shard in (*start.keep, *start.drop)} == {id(shard) for shard in given}
                assert len(laid_out) == len(start.slots)
                assert {shard.slot for shard in start.keep} == {shard.slot for shard in given} <= laid_out.keys()
                assert all(laid_out[shard.slot].device == shard.record.device for shard in start.keep)
                assert set(start.foreign) <= set(start.keep)
                assert not (refused and start.foreign)
