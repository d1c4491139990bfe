import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.descriptors import Descriptor
from appliance.up.fdstore import DescriptorStore
from tests.up.stage import TIMEOUT_S


def memory(content: bytes = b"") -> Descriptor:
    descriptor = Descriptor(os.memfd_create("test"))
    os.write(descriptor.fileno(), content)
    return descriptor


def duplicate(descriptor: Descriptor) -> Descriptor:
    return Descriptor(os.dup(descriptor.fileno()))


def filled(test: Callable[[DescriptorStore], object], *, limit: int = 100) -> list[str]:
    """Run a test with a store, inside a loop; return what the store said."""
    said: list[str] = []

    async def scenario() -> None:
        store = DescriptorStore(limit=limit, say=said.append)
        try:
            test(store)
        finally:
            store.clear()

    asyncio.run(scenario())
    return said


def open_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_stored_comes_back_with_its_name_newest_first() -> None:
    def check(store: DescriptorStore) -> None:
        assert store.add([memory(b"a")], name="first") == 1
        assert store.add([memory(b"b")], name="second") == 1
        kept = store.kept()
        assert [name for name, _ in kept] == ["second", "first"]
        assert [os.pread(fd, 9, 0) for _, fd in kept] == [b"b", b"a"]

    assert filled(check) == []


def test_several_descriptors_of_one_message_share_its_name() -> None:
    def check(store: DescriptorStore) -> None:
        assert store.add([memory(), memory(), memory()], name="slab") == 3
        assert [name for name, _ in store.kept()] == ["slab"] * 3

    filled(check)


def test_a_descriptor_without_a_name_is_called_stored() -> None:
    def check(store: DescriptorStore) -> None:
        store.add([memory()])
        assert [name for name, _ in store.kept()] == ["stored"]

    filled(check)


def test_the_same_open_file_is_kept_once_under_its_first_name_and_the_second_is_closed() -> None:
    def check(store: DescriptorStore) -> None:
        descriptor = memory()
        again = duplicate(descriptor)
        assert store.add([descriptor], name="a") == 1
        assert store.add([again], name="b") == 0
        assert again.closed
        assert [name for name, _ in store.kept()] == ["a"]

    filled(check)


def test_removal_closes_all_of_a_name_and_nothing_else() -> None:
    def check(store: DescriptorStore) -> None:
        doomed = [memory(), memory()]
        store.add(doomed, name="a")
        store.add([memory()], name="ab")
        assert store.remove("a") == 2
        assert all(descriptor.closed for descriptor in doomed)
        assert [name for name, _ in store.kept()] == ["ab"]
        assert store.remove("a") == 0

    filled(check)


def test_what_exceeds_the_limit_is_closed_and_told() -> None:
    def check(store: DescriptorStore) -> None:
        descriptors = [memory() for _ in range(5)]
        assert store.add(descriptors, name="slab") == 3
        assert [descriptor.closed for descriptor in descriptors] == [False, False, False, True, True]
        assert len(store) == 3

    assert filled(check, limit=3) == ["the descriptor store is full with 3: 2 more not kept"]


def test_a_store_of_none_keeps_none() -> None:
    def check(store: DescriptorStore) -> None:
        assert store.add([memory()]) == 0

    assert len(filled(check, limit=0)) == 1


def test_clearing_closes_everything() -> None:
    before = open_count()

    def check(store: DescriptorStore) -> None:
        reading, writing = os.pipe()
        store.add([Descriptor(reading), Descriptor(writing), *(memory() for _ in range(200))])
        assert store.clear() == 202
        assert store.kept() == []

    filled(check, limit=300)
    assert open_count() == before


def hangs_up(*, poll: bool) -> tuple[int, list[str]]:
    """Store one end of a socket pair, close the other; return how many are stored then, and what was said."""
    said: list[str] = []

    async def scenario() -> int:
        store = DescriptorStore(limit=10, say=said.append)
        # A second polled one, which has data to read, must not be dropped and must not make the loop spin.
        ours, theirs = socket.socketpair()
        busy, other = socket.socketpair()
        other.send(b"data")
        store.add([Descriptor(theirs.detach()), Descriptor(busy.detach())], name="peer", poll=poll)
        with other:
            ours.close()
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(50 if not poll else 10_000):
                    await asyncio.sleep(0)
                    if len(store) == 1:
                        break
            left = len(store)
            store.clear()
            return left

    return asyncio.run(scenario()), said


def test_a_polled_descriptor_whose_peer_hangs_up_is_dropped() -> None:
    assert hangs_up(poll=True) == (1, ["the other end of stored descriptor 'peer' hung up: dropped"])


def test_a_descriptor_that_is_not_polled_is_kept_though_its_peer_hangs_up() -> None:
    assert hangs_up(poll=False) == (2, [])


def test_a_memory_file_can_be_stored_without_fdpoll_0() -> None:
    def check(store: DescriptorStore) -> None:
        assert store.add([memory()], poll=True) == 1

    filled(check)


def test_a_removed_polled_descriptor_is_not_reported_under_a_number_that_is_used_again() -> None:
    said: list[str] = []

    async def scenario() -> None:
        store = DescriptorStore(limit=10, say=said.append)
        reading, writing = os.pipe()
        also_reading = os.dup(reading)  # keeps the open file, and with it a registration, alive
        store.add([Descriptor(reading)], name="gone", poll=True)
        store.remove("gone")
        assert store.add([memory()], name="kept", poll=False) == 1
        os.close(writing)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [name for name, _ in store.kept()] == ["kept"]
        store.clear()
        os.close(also_reading)

    asyncio.run(scenario())
    assert said == []


@pytest.mark.parametrize("count", [500])
def test_hundreds_are_stored_without_comparing_each_with_each(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counting(first: int, second: int) -> bool:
        nonlocal compared
        compared += 1
        return False

    monkeypatch.setattr("appliance.up.fdstore.same_file", counting)
    filled(lambda store: store.add([memory() for _ in range(count)]), limit=count)
    assert compared == 0
