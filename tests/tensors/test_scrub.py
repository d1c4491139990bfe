"""A scrub, against a real keeper: of host memory, and of a GPU's in host memory; tests/gpu does it on a real one."""

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from appliance import configs, memfd
from appliance.descriptors import Descriptor, close_all
from appliance.errors import MissError
from appliance.keeper.settings import Slot
from appliance.slabs.devices import backend
from appliance.tensors.checksum import slab_checksums
from appliance.tensors.scrub import Scrubbed, scrub
from tests.keeper.serving import Serving, donate, give, offer
from tests.keeper.shards import LAYOUT, PAGE, Donation, donation_of, record_of
from tests.slabs.cpu_gpu import installed
from tests.slabs.fake_driver import GRANULARITY_BYTES, FakeCuda, FakeGpu

UUID = "GPU-00000000-0000-0000-0000-0000000000a0"
BODIES = (b"\1" * PAGE, b"\2" * PAGE)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


@pytest.fixture
def gpu_serving(tmp_path: Path) -> Iterator[Serving]:
    """Serve one slot on a fake GPU."""
    with installed(FakeCuda([FakeGpu(UUID)])) as fake:
        with Serving(tmp_path, layout=[Slot("target", 0, UUID)]) as serving:
            yield serving
        gc.collect()
        assert not fake.live
        assert not fake.faults


def checksums_of(bodies: tuple[bytes, ...]) -> tuple[str, ...]:
    slabs = [memfd.sealed("slab", [body]) for body in bodies]
    try:
        return slab_checksums("cpu", slabs, [len(body) for body in bodies])
    finally:
        close_all(slabs)


def scrubbed(serving: Serving) -> Scrubbed:
    with serving.connect() as client:
        return scrub(client, role="target", rank=0, name="scrub")


def fill(slab_index: int) -> Descriptor:
    with backend(UUID).create(f"weights-{slab_index}", 2 * GRANULARITY_BYTES) as slab:
        slab.window(0, slab.size_bytes)[:] = bytes([slab_index + 1]) * slab.size_bytes  # type: ignore[index]
        return slab.seal()


def give_gpu(serving: Serving) -> tuple[Descriptor, ...]:
    """Have the slot filled with three slabs of device memory; return descriptors of them, which the caller closes."""
    slabs = tuple(fill(index) for index in range(3))
    sizes = (2 * GRANULARITY_BYTES,) * 3
    record = record_of(device=UUID, slab_sizes=sizes, checksums=slab_checksums(UUID, slabs, sizes))
    held = memfd.sealed("record", [record.encode(LAYOUT)])
    with serving.connect() as donor, held, configs.pack({"config.json": b"{}"}) as packed:
        offer(donor)
        donate(donor, Donation(record, held, packed, slabs))
    serving.wait_until(lambda: not serving.holdings.leases)
    return slabs


def test_weights_as_they_were_donated_are_intact_and_the_keeper_knows(serving: Serving) -> None:
    give(serving, checksums=checksums_of(BODIES))
    found = scrubbed(serving)
    assert found.damaged == ()
    assert found.found == found.record.checksums
    serving.wait_until(lambda: not serving.holdings.leases)
    assert serving.holdings.scrub_counts == {"intact": 1}
    with serving.connect() as client:
        [shard] = client.status()["shards"]
    assert shard["scrub"]["damaged"] == []


def test_a_slab_that_is_not_what_its_record_says_is_named(serving: Serving) -> None:
    # A memfd is sealed: only a record can lie about it.
    give(serving, checksums=(checksums_of(BODIES)[0], "0" * 16))
    assert scrubbed(serving).damaged == (1,)
    assert serving.holdings.scrub_counts == {"damaged": 1}


def test_one_flipped_bit_of_device_memory_is_found_in_its_slab(gpu_serving: Serving) -> None:
    slabs = give_gpu(gpu_serving)
    assert scrubbed(gpu_serving).damaged == ()
    # Whoever holds a descriptor of device memory can write it.
    os.pwrite(slabs[1].fileno(), bytes([2 ^ 16]), GRANULARITY_BYTES + 5)
    assert scrubbed(gpu_serving).damaged == (1,)
    os.pwrite(slabs[1].fileno(), bytes([2]), GRANULARITY_BYTES + 5)
    assert scrubbed(gpu_serving).damaged == ()
    close_all(slabs)
    assert gpu_serving.holdings.scrub_counts == {"intact": 2, "damaged": 1}


def test_what_is_scrubbed_is_leased_meanwhile(serving: Serving) -> None:
    give(serving, checksums=checksums_of(BODIES))
    with serving.connect() as client:
        scrub(client, role="target", rank=0, name="scrub")
        assert [lease.client for lease in serving.holdings.leases] == ["scrub"]
    serving.wait_until(lambda: not serving.holdings.leases)


def test_what_is_not_resident_is_a_miss(serving: Serving) -> None:
    with pytest.raises(MissError, match="target rank 0 is not resident: nothing is loaded yet"):
        scrubbed(serving)


def test_weights_without_checksums_cannot_be_compared(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor)
        with closing(donation_of()) as donation:
            donate(donor, donation)
    with pytest.raises(MissError, match="without checksums"):
        scrubbed(serving)
