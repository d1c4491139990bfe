"""Custody: whatever a killed keeper left with the service manager, the next one finds whole shards or nothing."""

import os
import random
import threading
from pathlib import Path

import pytest

from appliance import memfd
from appliance.descriptors import Descriptor, close_all
from appliance.errors import HostError, ResourceError
from appliance.keeper import custody as custodies
from appliance.keeper.custody import SETTINGS, Adopted, Custody
from appliance.keeper.shard import Shard
from appliance.notify import Named, Notifier
from tests.descriptors import identity, open_files, room_for
from tests.keeper.shards import OTHER_TARGET, TARGET, shard_of
from tests.service_manager import ServiceManager, replayed


class Life:
    """One life of a keeper: a custody with a notifier of its own."""

    def __init__(self, manager: ServiceManager, *, limit: int | None = None) -> None:
        self.notifier = Notifier(manager.environ | ({} if limit is None else {"FDSTORE": str(limit)}))
        self.custody = Custody(self.notifier)

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *error: object) -> None:
        self.notifier.barrier()
        self.notifier.close()


def stored(manager: ServiceManager, *shards: Shard) -> None:
    """Store shards in one life, which then ends."""
    with Life(manager) as life:
        for shard in shards:
            life.custody.store(shard)
            shard.close()


def close(adopted: Adopted) -> None:
    for shard in adopted.shards:
        shard.close()


def body_of(descriptor: Descriptor) -> bytes:
    return memfd.read(descriptor, what="it", limit_bytes=1 << 20)


def test_what_is_stored_is_named_after_its_shard_and_place_and_the_record_comes_last(manager: ServiceManager) -> None:
    shard = shard_of(slabs=3)
    stored(manager, shard)
    prefix = f"w1.{shard.record.shard_id}"
    assert manager.names() == [
        f"{prefix}.slab.0",
        f"{prefix}.slab.1",
        f"{prefix}.slab.2",
        f"{prefix}.configs",
        f"{prefix}.record",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_shards_come_back_whole_in_whatever_order(manager: ServiceManager, seed: int) -> None:
    bodies = {rank: [bytes([rank, slab]) * 2048 for slab in range(12)] for rank in range(3)}
    stored(manager, *(shard_of(rank=rank, slabs=12, bodies=bodies[rank]) for rank in range(3)))
    with Life(manager) as life:
        adopted = life.custody.adopt(manager.handed_over(shuffle=random.Random(seed)))
        assert {shard.record.rank for shard in adopted.shards} == {0, 1, 2}
        for shard in adopted.shards:
            assert [body_of(slab) for slab in shard.slabs] == bodies[shard.record.rank]
        close(adopted)
    assert len(manager.names()) == 3 * 14


def test_a_keeper_killed_at_any_point_of_storing_leaves_a_whole_shard_or_nothing(manager: ServiceManager) -> None:
    with Life(manager) as life:
        for shard in (shard_of(rank=0, slabs=1), shard_of(rank=1, slabs=4)):
            life.custody.store(shard)
            shard.close()
    said = list(manager.datagrams)
    records = [any(line.endswith(".record") for line in datagram.lines) for datagram in said]
    first_ends, second_ends = (index + 1 for index, is_record in enumerate(records) if is_record)
    for killed_after in range(len(said) + 1):
        left = replayed(said[:killed_after])
        with Life(manager) as life:
            adopted = life.custody.adopt(left.handed_over(shuffle=random.Random(killed_after)))
        slabs = [len(shard.slabs) for shard in adopted.shards]
        assert sorted(slabs) == [1] * (killed_after >= first_ends) + [4] * (killed_after >= second_ends)
        # The store is rid of what was not adopted: only what the adopted shards consist of remains.
        for datagram in manager.datagrams[len(said) :]:
            left.apply(datagram)
        assert len(left.stored) == sum(count + 2 for count in slabs)
        close(adopted)
        left.close()
        del manager.datagrams[len(said) :]


def test_a_keeper_killed_at_any_point_of_dropping_leaves_a_whole_shard_or_nothing(manager: ServiceManager) -> None:
    with Life(manager) as life:
        shard = shard_of(slabs=4)
        life.custody.store(shard)
        life.custody.drop(shard)
    said = list(manager.datagrams)
    assert said[7].lines == ("FDSTOREREMOVE=1", f"FDNAME=w1.{shard.record.shard_id}.record")
    for killed_after in range(7, len(said) + 1):
        left = replayed(said[:killed_after])
        with Life(manager) as life:
            adopted = life.custody.adopt(left.handed_over())
        assert len(adopted.shards) == (1 if killed_after == 7 else 0)
        close(adopted)
        left.close()


def test_what_is_foreign_is_removed_and_closed(manager: ServiceManager) -> None:
    shard = shard_of(slabs=2)
    stored(manager, shard)
    shard_id = shard.record.shard_id
    strays = [
        "stored",
        "unknown",
        "w1.nonsense",
        "w2.0123456789abcdef.record",
        "w1.0123456789abcdef.slab.0",
        f"w1.{shard_id}.slab.2",
        f"w1.{shard_id}.slab.00",
        f"w1.{shard_id}.slab.1000",
        f"w1.{shard_id}.layout",
        f"w1.{shard_id.upper()}.record" if shard_id.upper() != shard_id else "w1.X.record",
    ]
    given = manager.handed_over()
    with Life(manager) as life:
        for name in strays:
            with memfd.sealed("stray", [b"stray"]) as stray:
                life.notifier.store(name, stray.fileno())
        life.notifier.barrier()
        close_all(named.descriptor for named in given)
        given = manager.handed_over(shuffle=random.Random(1))
        adopted = life.custody.adopt(given)
        assert [shard.record.shard_id for shard in adopted.shards] == [shard_id]
        close(adopted)
    assert len(manager.names()) == 4
    assert all(named.descriptor.closed for named in given)


def test_a_stray_that_bears_the_name_of_something_kept_does_not_take_it_along(manager: ServiceManager) -> None:
    shard = shard_of(slabs=2)
    stored(manager, shard)
    name = f"w1.{shard.record.shard_id}.slab.1"
    given = manager.handed_over()
    with Life(manager) as life:
        with memfd.sealed("stray", [b"stray"]) as stray:
            life.notifier.store(name, stray.fileno())
            given.append(Named(name, Descriptor(os.dup(stray.fileno()))))
        adopted = life.custody.adopt(given)
        assert body_of(adopted.shards[0].slabs[1]) == b"\2" * 4096
        close(adopted)
    with Life(manager) as life:
        again = life.custody.adopt(manager.handed_over())
        assert body_of(again.shards[0].slabs[1]) == b"\2" * 4096
        close(again)


MISFITS = ["configs", "record", "slab.0", "slab.1"]


@pytest.mark.parametrize("missing", MISFITS)
def test_a_shard_with_a_part_missing_is_dropped_and_its_memory_is_free(manager: ServiceManager, missing: str) -> None:
    broken, whole = shard_of(rank=0, slabs=2), shard_of(rank=1, slabs=2)
    stored(manager, broken, whole)
    given = manager.handed_over()
    lost = [named for named in given if named.name.endswith(missing) and broken.record.shard_id in named.name]
    close_all(named.descriptor for named in lost)
    with Life(manager) as life:
        adopted = life.custody.adopt([named for named in given if named not in lost])
        assert [shard.record.rank for shard in adopted.shards] == [1]
        close(adopted)
    assert {name.split(".")[1] for name in manager.names()} - {whole.record.shard_id} <= {broken.record.shard_id}
    assert all(name.endswith(missing) for name in manager.names() if broken.record.shard_id in name)


@pytest.mark.parametrize("part", MISFITS)
def test_a_shard_with_a_part_that_is_something_else_is_dropped(manager: ServiceManager, part: str) -> None:
    shard = shard_of(slabs=2)
    stored(manager, shard)
    given = manager.handed_over()
    with Life(manager) as life:
        swapped = []
        for named in given:
            if named.name.endswith(part):
                named.descriptor.close()
                swapped.append(Named(named.name, memfd.create("unsealed")))
            else:
                swapped.append(named)
        assert life.custody.adopt(swapped).shards == ()
    assert manager.names() == []
    assert all(named.descriptor.closed for named in swapped)


def test_a_record_under_the_name_of_another_shard_is_dropped(manager: ServiceManager) -> None:
    shard = shard_of(slabs=1)
    stored(manager, shard)
    given = [
        Named(named.name.replace(shard.record.shard_id, "0123456789abcdef"), named.descriptor)
        for named in manager.handed_over()
    ]
    with Life(manager) as life:
        assert life.custody.adopt(given).shards == ()


def test_shards_of_every_target_are_given_back(manager: ServiceManager) -> None:
    stored(manager, shard_of(TARGET), shard_of(OTHER_TARGET))
    with Life(manager) as life:
        adopted = life.custody.adopt(manager.handed_over())
        assert {shard.record.target for shard in adopted.shards} == {TARGET, OTHER_TARGET}
        close(adopted)


def test_settings_come_back_and_are_stored_once(manager: ServiceManager) -> None:
    with Life(manager) as life:
        life.custody.store_settings(b"first")
        life.custody.store_settings(b"first")
        life.custody.store_settings(b"second")
    assert manager.names() == [SETTINGS]
    with Life(manager) as life:
        before = len(manager.datagrams)
        assert life.custody.adopt(manager.handed_over()).settings == b"second"
        life.custody.store_settings(b"second")
        life.notifier.barrier()
        assert manager.said()[before:] == [("BARRIER=1",)]
    assert manager.names() == [SETTINGS]


@pytest.mark.parametrize("size_bytes", [0, custodies.MAX_SETTINGS_BYTES + 1])
def test_settings_that_cannot_be_read_are_removed(manager: ServiceManager, size_bytes: int) -> None:
    with memfd.create("settings") as descriptor, Life(manager) as life:
        os.ftruncate(descriptor.fileno(), size_bytes)
        if size_bytes:
            memfd.seal(descriptor)
        life.notifier.store(SETTINGS, descriptor.fileno())
        life.notifier.barrier()
        assert life.custody.adopt(manager.handed_over()).settings is None
        life.custody.store_settings(b"new")
    assert manager.names() == [SETTINGS]


def test_settings_twice_give_one_and_leave_one(manager: ServiceManager) -> None:
    with Life(manager) as life:
        for text in (b"one", b"other"):
            with memfd.sealed("settings", [text]) as descriptor:
                life.notifier.store(SETTINGS, descriptor.fileno())
        life.notifier.barrier()
        settings = life.custody.adopt(manager.handed_over()).settings
        life.notifier.barrier()
        (left,) = manager.handed_over()
        with left.descriptor:
            assert body_of(left.descriptor) == settings


def test_a_store_that_is_too_small_is_a_refusal_and_nothing_is_half_stored(manager: ServiceManager) -> None:
    with Life(manager, limit=8) as life:
        life.custody.store_settings(b"settings")
        first, second = shard_of(rank=0, slabs=2), shard_of(rank=1, slabs=2)
        life.custody.store(first)
        with pytest.raises(
            ResourceError, match="keeps at most 8 descriptors; 5 are stored and this shard has 4"
        ) as caught:
            life.custody.store(second)
        assert "FileDescriptorStoreMax=" in str(caught.value.hint)
        life.custody.drop(second)
        assert len(manager.names()) == 5
        life.custody.drop(first)
        exact = shard_of(rank=1, slabs=5)
        life.custody.store(exact)
        assert len(manager.names()) == 8
        life.custody.drop(exact)
    assert manager.names() == [SETTINGS]


def test_what_was_adopted_counts_against_the_limit(manager: ServiceManager) -> None:
    with Life(manager) as life:
        life.custody.store_settings(b"settings")
    stored(manager, shard_of(rank=0, slabs=2))
    with Life(manager, limit=8) as life:
        adopted = life.custody.adopt(manager.handed_over())
        second = shard_of(rank=1, slabs=2)
        with pytest.raises(ResourceError, match="5 are stored"):
            life.custody.store(second)
        second.close()
        life.custody.drop(*adopted.shards)
        fits = shard_of(rank=1, slabs=5)
        life.custody.store(fits)
        life.custody.drop(fits)


def test_ranks_that_donate_at_once_do_not_overrun_the_store(manager: ServiceManager) -> None:
    with Life(manager, limit=45) as life:
        refused = []

        def store(rank: int) -> None:
            shard = shard_of(rank=rank, slabs=13)
            try:
                life.custody.store(shard)
            except ResourceError:
                refused.append(rank)
            shard.close()

        # The first of them stops at its first message: a paused manager has no room for more.
        manager.pause()
        with pytest.raises(HostError, match="takes no messages"):
            while True:
                life.notifier.send(["STATUS=full"], timeout_s=0)
        threads = [threading.Thread(target=store, args=(rank,)) for rank in range(6)]
        for thread in threads:
            thread.start()
        threads[0].join(0.1)
        manager.go_on()
        for thread in threads:
            thread.join()
        assert len(refused) == 3
        assert len(manager.names()) == 45
        adopted = Custody(life.notifier).adopt(manager.handed_over())
        assert len(adopted.shards) == 3
        close(adopted)


def test_storing_returns_only_when_the_manager_has_everything(manager: ServiceManager) -> None:
    with Life(manager) as life:
        manager.pause()
        shard = shard_of(slabs=2)
        finished = threading.Event()

        def store() -> None:
            life.custody.store(shard)
            finished.set()

        thread = threading.Thread(target=store)
        thread.start()
        assert not finished.wait(0.1)
        manager.go_on()
        assert finished.wait(10)
        assert len(manager.names()) == 4
        thread.join()
        shard.close()


def test_a_manager_that_is_gone_is_an_error_of_the_host(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    with pytest.raises(HostError):
        Custody(notifier).store(shard := shard_of())
    shard.close()
    notifier.close()


def test_a_process_without_a_free_descriptor_refuses_and_takes_back_what_it_stored(manager: ServiceManager) -> None:
    with Life(manager) as life:
        shard = shard_of(slabs=1)
        manager.pause()  # it is in this process, which has no room for what it would receive
        with room_for(0), pytest.raises(ResourceError, match="no descriptor left"):
            life.custody.store(shard)
        manager.go_on()
        life.custody.drop(shard)
    assert manager.names() == []


def test_after_a_drop_nobody_has_the_memory_any_more(manager: ServiceManager) -> None:
    with Life(manager) as life:
        shard = shard_of(slabs=3)
        memory = {identity(part.fileno()) for part in (shard.held, shard.configs, *shard.slabs)}
        life.custody.store(shard)
        assert len(memory & open_files()) == 5
        life.custody.drop(shard)
        # What was sent is remembered by this test's manager too: let go of it.
        for datagram in manager.datagrams:
            close_all(datagram.descriptors)
        assert not memory & open_files()
