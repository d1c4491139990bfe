"""Donations: one at a time for each slot, whole or refused with a reason, and never at the cost of what is held."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from appliance import memfd, wire
from appliance.client import RefusedError
from appliance.descriptors import Descriptor
from appliance.errors import HostError, PeerError
from appliance.fingerprint import Fingerprint
from appliance.keeper.holdings import State
from appliance.verdict import Reason
from tests.descriptors import count_descriptors, room_for
from tests.keeper.serving import Serving, attach, donate, give, offer, refusal_of, say
from tests.keeper.shards import (
    OTHER_TARGET,
    PAGE,
    TARGET,
    Donation,
    donation_of,
    fingerprint_of,
    slots,
    unsealed,
)
from tests.service_manager import ServiceManager

STORE_LIMIT = 40


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path, limit=STORE_LIMIT) as manager:
        yield manager


@pytest.fixture
def serving(tmp_path: Path, manager: ServiceManager) -> Iterator[Serving]:
    """Serve two slots, of rank 0 and 1."""
    environ = manager.environ | {"FDSTORE": str(STORE_LIMIT)}
    with Serving(tmp_path, environ=environ, layout=slots(2)) as serving:
        yield serving


def changed(**changes: Any) -> Callable[[], Donation]:
    return lambda: donation_of(**changes)


def with_part(name: str, make: Callable[[], Descriptor]) -> Callable[[], Donation]:
    """Return a donation one descriptor of which is something else."""

    def made() -> Donation:
        whole, other = donation_of(), make()
        old = {"held": whole.held, "configs": whole.configs, "slab": whole.slabs[1]}[name]
        old.close()
        return Donation(
            whole.record,
            other if name == "held" else whole.held,
            other if name == "configs" else whole.configs,
            (whole.slabs[0], other if name == "slab" else whole.slabs[1]),
        )

    return made


def one_slab_twice() -> Donation:
    whole = donation_of()
    whole.slabs[1].close()
    twice = Descriptor(os.dup(whole.slabs[0].fileno()))
    return Donation(whole.record, whole.held, whole.configs, (whole.slabs[0], twice))


BAD = Reason.BAD_DONATION


TARGET_DIFFERS = Reason.TARGET_DIFFERS


REFUSED: dict[str, tuple[Callable[[], Donation], Reason, str]] = {
    "a slab that can still be written": (
        with_part("slab", lambda: unsealed(b"\2" * PAGE)),
        BAD,
        "slab 1: not a sealed",
    ),
    "a slab of another size": (with_part("slab", lambda: memfd.sealed("slab", [b"\2"])), BAD, "slab 1: 1 bytes"),
    "a slab that is a file": (
        with_part("slab", lambda: Descriptor(os.open(__file__, os.O_RDONLY))),
        BAD,
        "slab 1: not a sealed",
    ),
    "a slab that is a socket": (
        with_part("slab", lambda: Descriptor(os.eventfd(0))),
        BAD,
        "slab 1: not a sealed",
    ),
    "one slab twice": (one_slab_twice, BAD, "came more than once"),
    "configs that can still be written": (
        with_part("configs", lambda: unsealed(b"[]\n")),
        BAD,
        "configs: not a sealed memory file",
    ),
    "a record that can still be written": (
        with_part("held", lambda: unsealed(b"{}\n")),
        BAD,
        "shard record: not a sealed memory file",
    ),
    "a record of garbage": (
        with_part("held", lambda: memfd.sealed("record", [os.urandom(100_000)])),
        BAD,
        "shard record: ",
    ),
    "a record nested deeply": (
        with_part("held", lambda: memfd.sealed("record", [b"[" * 1_000_000 + b"\n"])),
        BAD,
        "shard record: the header is not JSON",
    ),
    "more slabs than announced": (changed(slab_sizes=(PAGE,)), BAD, "shard of 1 slabs came with 2"),
    "fewer slabs than announced": (changed(slab_sizes=(PAGE,) * 3), BAD, "shard of 3 slabs came with 2"),
    "no slabs, though announced": (changed(slabs=0, slab_sizes=(PAGE,)), BAD, "shard of 1 slabs came with 0"),
    "a slot that was not granted": (changed(rank=1), BAD, "nobody granted this client to fill target rank 1"),
    "a slot that is not there": (changed(rank=7), BAD, "nobody granted"),
    "a role that is not there": (changed(role="draft"), BAD, "nobody granted"),
    "another device, where slabs would not be looked at": (changed(device="GPU-a"), BAD, "lives on cpu, not on GPU-a"),
    "another target": (changed(target=OTHER_TARGET), TARGET_DIFFERS, "root_digest: wanted a"),
    "a fingerprint of another checkpoint": (
        changed(fingerprint=fingerprint_of(OTHER_TARGET)),
        TARGET_DIFFERS,
        "its fingerprint contradicts its target",
    ),
    "a fingerprint that leaves facts out": (
        changed(fingerprint=Fingerprint.of({"rank": 0})),
        TARGET_DIFFERS,
        "held (absent)",
    ),
}


@pytest.mark.parametrize(("make", "reason", "text"), REFUSED.values(), ids=REFUSED)
def test_a_donation_wrong_in_one_way_is_refused_and_costs_nothing(
    serving: Serving, manager: ServiceManager, make: Callable[[], Donation], reason: Reason, text: str
) -> None:
    give(serving, rank=1)
    resident, stored = serving.holdings.shard(("target", 1)), manager.names()
    with serving.connect() as donor:
        offer(donor)
        with closing(make()) as donation:
            before = count_descriptors()
            refused_as, message = refusal_of(lambda: donate(donor, donation))
            assert count_descriptors() == before
        assert refused_as is reason
        assert text in message
        assert serving.holdings.shard(("target", 1)) is resident
        assert manager.names() == stored
        # The same donor may try again at once.
        with closing(donation_of()) as donation:
            donate(donor, donation)
    with serving.connect() as engine:
        assert attach(engine, fingerprint_of(TARGET)) == 2


def test_a_refused_donation_leaves_the_slot_to_the_next_donor(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor)
        with closing(donation_of(target=OTHER_TARGET)) as donation:
            refusal_of(lambda: donate(donor, donation))
        with serving.connect() as other:
            assert refusal_of(lambda: offer(other))[0] is Reason.LOADING
    serving.wait_until(lambda: serving.holdings.donor(("target", 0)) is None)
    give(serving)


@pytest.mark.parametrize("filled", [False, True], ids=["an empty slot", "a filled slot"])
def test_a_donation_without_a_grant_is_refused_without_being_looked_at(serving: Serving, filled: bool) -> None:
    if filled:
        give(serving)
    with serving.connect() as donor, closing(donation_of()) as donation:
        reason, message = refusal_of(lambda: donate(donor, donation))
        assert (reason, "nobody granted this client" in message) == (BAD, True)
        with serving.raw() as channel, memfd.sealed("record", [b"\xff" * 1000]) as held:
            answer = say(channel, wire.encode(wire.Donate()), [held.fileno(), held.fileno()])
            assert isinstance(answer, wire.Refused)
            assert "nobody granted this client" in answer.detail


def test_a_second_donation_over_one_grant_is_refused(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor)
        with closing(donation_of()) as first, closing(donation_of()) as second:
            donate(donor, first)
            assert "nobody granted" in refusal_of(lambda: donate(donor, second))[1]
        shard = serving.holdings.shard(("target", 0))
        assert shard is not None
        assert shard.record == first.record


def test_a_shard_id_that_is_held_already_is_refused(serving: Serving, manager: ServiceManager) -> None:
    give(serving, shard_id="0123456789abcdef")
    stored = manager.names()
    with serving.connect() as donor:
        offer(donor, rank=1)
        with closing(donation_of(rank=1, shard_id="0123456789abcdef")) as donation:
            assert "shard 0123456789abcdef is held already" in refusal_of(lambda: donate(donor, donation))[1]
        assert manager.names() == stored
        with closing(donation_of(rank=1)) as donation:
            donate(donor, donation)


def test_one_donor_may_fill_one_slot_after_the_other(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor, rank=0)
        offer(donor, rank=1)
        for rank in (1, 0):
            with closing(donation_of(rank=rank)) as donation:
                donate(donor, donation)
        assert donor.status()["state"] == State.RESIDENT
        assert len(donor.status()["leases"]) == 2


def test_two_ranks_donate_at_once(serving: Serving, manager: ServiceManager) -> None:
    with serving.connect() as one, serving.connect() as other:
        offer(one, rank=0)
        offer(other, rank=1)
        manager.pause()  # so that both are being stored at one time

        def donate_one() -> None:
            with closing(donation_of(rank=0)) as donation:
                donate(one, donation)

        def donate_other() -> None:
            with closing(donation_of(rank=1)) as donation:
                donate(other, donation)

        threads = [threading.Thread(target=donate_one), threading.Thread(target=donate_other)]
        for thread in threads:
            thread.start()
        with serving.connect() as bystander:
            assert bystander.status()["state"] == State.LOADING
        manager.go_on()
        for thread in threads:
            thread.join(20)
        assert one.status()["state"] == State.RESIDENT
    assert len(manager.names()) == 8


def test_two_donors_of_one_shard_id_at_once_do_not_mix(serving: Serving, manager: ServiceManager) -> None:
    with serving.connect() as one, serving.connect() as other:
        offer(one, rank=0)
        offer(other, rank=1)
        manager.pause()
        with (
            closing(donation_of(rank=0, shard_id="ab" * 8)) as first,
            closing(donation_of(rank=1, shard_id="ab" * 8)) as second,
        ):
            first_thread = threading.Thread(target=lambda: donate(one, first))
            first_thread.start()
            serving.wait_for_storing()
            assert "is held already" in refusal_of(lambda: donate(other, second))[1]
            manager.go_on()
            first_thread.join(20)
    assert len(manager.names()) == 4


def test_a_donation_granted_before_the_target_was_withdrawn_is_refused(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor)
        serving.target = None
        with closing(donation_of()) as donation:
            assert refusal_of(lambda: donate(donor, donation))[0] is Reason.TARGET_DIFFERS


def test_a_shard_too_large_for_the_store_is_refused_and_not_half_stored(
    serving: Serving, manager: ServiceManager
) -> None:
    give(serving, rank=1, slabs=20)
    stored = manager.names()
    with serving.connect() as donor:
        offer(donor)
        with closing(donation_of(slabs=20)) as donation:
            reason, message = refusal_of(lambda: donate(donor, donation))
        assert reason is Reason.BUSY
        assert "keeps at most 40 descriptors; 22 are stored and this shard has 22" in message
        assert "FileDescriptorStoreMax=" in message
        assert manager.names() == stored
        with closing(donation_of(slabs=16)) as donation:
            donate(donor, donation)
    assert len(manager.names()) == STORE_LIMIT


def test_a_service_manager_that_is_gone_costs_the_donation_and_ends_the_keeper(tmp_path: Path) -> None:
    # Ours or the kernel's fault: it ends, says so, and is started again.
    with (
        pytest.raises(HostError, match="cannot notify the service manager"),
        Serving(tmp_path, environ={"NOTIFY_SOCKET": str(tmp_path / "gone")}) as serving,
        serving.connect() as donor,
    ):
        offer(donor)
        with closing(donation_of()) as donation, pytest.raises(PeerError, match="closed the connection"):
            donate(donor, donation)
        serving.wait_for_end()


def test_a_keeper_out_of_descriptors_refuses_a_donation_and_loses_nothing(
    serving: Serving, manager: ServiceManager
) -> None:
    give(serving, rank=1)
    stored = manager.names()
    with serving.connect() as donor:
        offer(donor)
        with closing(donation_of(slabs=6)) as donation:
            before = count_descriptors()
            # The keeper is in this process: there is room for some of what it is sent, not for all.
            with room_for(4), pytest.raises(RefusedError, match="no room"):
                donate(donor, donation)
        assert count_descriptors() < before
    assert manager.names() == stored
    give(serving)
    with serving.connect() as engine:
        assert attach(engine, fingerprint_of(TARGET)) == 2
        assert attach(engine, fingerprint_of(TARGET, 1), rank=1) == 2


def test_a_shard_of_as_many_slabs_as_there_may_be_is_given_and_got(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        give(serving, slabs=250)
        with serving.connect() as engine:
            assert attach(engine, fingerprint_of(TARGET)) == 250


def test_a_donor_keeps_a_lease_of_what_it_gave(serving: Serving) -> None:
    with serving.connect() as donor:
        offer(donor)
        with closing(donation_of()) as donation:
            donate(donor, donation)
        (lease,) = donor.status()["leases"]
        assert (lease["client"], lease["verdict"]) == ("donor", "donated")
    serving.wait_until(lambda: not serving.holdings.leases)
    shard = serving.holdings.shard(("target", 0))
    assert shard is not None
    assert not shard.held.closed
