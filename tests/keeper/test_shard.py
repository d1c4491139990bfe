"""A shard is taken only whole: sealed, of the announced sizes, all of it in memory."""

import os
from collections.abc import Callable, Iterator

import pytest

from appliance import configs, memfd, record
from appliance.descriptors import Descriptor, close_all
from appliance.errors import PeerError
from appliance.keeper import shard as shards
from appliance.keeper.shard import checked, read_record
from tests.descriptors import count_descriptors
from tests.keeper.shards import LAYOUT, PAGE, Donation, donation_of, record_of, unsealed

Parts = tuple[Descriptor, Descriptor, list[Descriptor]]


@pytest.fixture
def whole() -> Iterator[Donation]:
    donation = donation_of(slabs=3)
    yield donation
    donation.close()


def test_a_whole_shard_is_taken_with_its_descriptors(whole: Donation) -> None:
    shard = checked(whole.held, whole.configs, whole.slabs)
    assert shard.record == whole.record
    assert shard.slot == ("target", 0)
    before = count_descriptors()
    shard.close()
    assert count_descriptors() == before - 5


def test_a_shard_without_slabs_is_whole() -> None:
    donation = donation_of(slabs=0)
    checked(donation.held, donation.configs, donation.slabs).close()


def test_the_record_is_read_without_its_layout() -> None:
    held = memfd.sealed("record", [record_of().encode(b"x" * record.MAX_HEADER_BYTES)])
    with held:
        assert read_record(held).role == "target"


def sparse(size_bytes: int) -> Descriptor:
    descriptor = memfd.create("sparse")
    os.ftruncate(descriptor.fileno(), size_bytes)
    memfd.seal(descriptor)
    return descriptor


def replaced(index: int, slab: Descriptor) -> Callable[[Donation], Parts]:
    def replace(whole: Donation) -> Parts:
        return whole.held, whole.configs, [*whole.slabs[:index], slab, *whole.slabs[index + 1 :]]

    return replace


BROKEN: dict[str, tuple[Callable[[], Callable[[Donation], Parts]], str]] = {
    "a slab that can still be written": (
        lambda: replaced(1, unsealed(b"\2" * PAGE)),
        "slab 1: not a sealed memory file",
    ),
    "a slab that is a device": (
        lambda: replaced(0, Descriptor(os.open("/dev/zero", os.O_RDONLY))),
        "slab 0: not a sealed memory file",
    ),
    "a slab that is too small": (
        lambda: replaced(2, memfd.sealed("slab", [b"\3"])),
        "slab 2: 1 bytes, the record says 4096",
    ),
    "a slab that is too large": (
        lambda: replaced(2, memfd.sealed("slab", [b"\3" * 5000])),
        "slab 2: 5000 bytes, the record says 4096",
    ),
    "a slab that is all hole": (lambda: replaced(0, sparse(PAGE)), "slab 0: only 0 of its 4096 bytes are in memory"),
    "too few slabs": (
        lambda: lambda whole: (whole.held, whole.configs, list(whole.slabs[:2])),
        "shard of 3 slabs came with 2",
    ),
    "too many slabs": (
        lambda: lambda whole: (whole.held, whole.configs, [*whole.slabs, whole.slabs[0]]),
        "shard of 3 slabs came with 4",
    ),
    "no slabs": (lambda: lambda whole: (whole.held, whole.configs, []), "shard of 3 slabs came with 0"),
    "one slab twice": (
        lambda: lambda whole: (whole.held, whole.configs, [whole.slabs[0], whole.slabs[1], whole.slabs[1]]),
        "one memory file came more than once",
    ),
    "configs that are the record": (
        lambda: lambda whole: (whole.held, whole.held, list(whole.slabs)),
        "one memory file came more than once",
    ),
    "configs that can still be written": (
        lambda: lambda whole: (whole.held, whole.slabs[0].__class__(os.memfd_create("configs")), list(whole.slabs)),
        "configs: not a sealed memory file",
    ),
    "configs larger than an engine reads": (
        lambda: lambda whole: (whole.held, sparse(configs.MAX_BYTES + 1), list(whole.slabs)),
        f"configs: more than {configs.MAX_BYTES} bytes",
    ),
    "a record that can still be written": (
        lambda: lambda whole: (unsealed(whole.record.encode(LAYOUT)), whole.configs, list(whole.slabs)),
        "shard record: not a sealed memory file",
    ),
    "a record of garbage": (
        lambda: lambda whole: (memfd.sealed("record", [b"\xff" * 100]), whole.configs, list(whole.slabs)),
        "shard record: no header line",
    ),
    "an empty record": (
        lambda: lambda whole: (memfd.sealed("record", []), whole.configs, list(whole.slabs)),
        "shard record: no header line",
    ),
    "a record without end": (
        lambda: lambda whole: (sparse(record.MAX_RECORD_BYTES + 1), whole.configs, list(whole.slabs)),
        f"more than {record.MAX_RECORD_BYTES}",
    ),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN)
def test_a_shard_broken_in_one_way_is_refused_and_stays_the_callers(
    whole: Donation, broken: Callable[[], Callable[[Donation], Parts]], message: str
) -> None:
    held, packed, slabs = broken()(whole)
    with pytest.raises(PeerError, match=message):
        checked(held, packed, slabs)
    assert not any(descriptor.closed for descriptor in (held, packed, *slabs))
    close_all([held, packed, *slabs])


def test_device_memory_is_not_asked_for_seals() -> None:
    donation = donation_of(slabs=1, device="GPU-aaaaaaaa")
    with unsealed(b"") as vmm:
        shard = shards.checked(donation.held, donation.configs, [vmm])
        assert shard.record.device == "GPU-aaaaaaaa"
    donation.close()
