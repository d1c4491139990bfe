"""What a keeper answers to those who attach, scrub and evict."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from appliance import configs, memfd, wire
from appliance.client import RefusedError
from appliance.descriptors import close_all
from appliance.errors import PeerError
from appliance.fingerprint import Difference, Fingerprint
from appliance.keeper.holdings import State
from appliance.verdict import Reason, refused
from tests.descriptors import count_descriptors
from tests.keeper.serving import Serving, attach, donate, hear, offer, say
from tests.keeper.shards import LAYOUT, PAGE, TARGET, donation_of, fingerprint_of, shard_of, slots
from tests.service_manager import ServiceManager


@pytest.fixture
def serving(tmp_path: Path, manager: ServiceManager) -> Iterator[Serving]:
    """Serve two slots, of rank 0 and 1."""
    with Serving(tmp_path, environ=manager.environ | {"FDSTORE": "40"}, layout=slots(2)) as serving:
        yield serving


def reason_of(act: Callable[[], object]) -> Reason | None:
    with pytest.raises(RefusedError) as caught:
        act()
    return caught.value.verdict.reason


def test_what_was_donated_is_what_is_attached(serving: Serving) -> None:
    bodies = [bytes([7]) * PAGE, bytes([8]) * PAGE]
    with serving.connect() as donor:
        offer(donor)
        donation = donation_of(bodies=bodies)
        donate(donor, donation)
        donation.close()
    with serving.connect() as engine:
        described = engine.describe(role="target", rank=0, wait_s=0)
        assert described.record == donation.record
        assert described.layout == LAYOUT
        with described.configs:
            assert configs.unpack(described.configs) == {"config.json": b"{}"}
        slabs = engine.attach(role="target", rank=0, client="e", fingerprint=described.record.fingerprint)
        assert [memfd.read(slab, what="slab", limit_bytes=PAGE) for slab in slabs] == bodies
        close_all(slabs)


def test_another_fingerprint_is_refused_by_naming_every_fact_that_differs(serving: Serving) -> None:
    serving.put(shard_of())
    wanted = Fingerprint.of({**fingerprint_of(TARGET).to_json(), "engine": "other", "more": "1"})
    with serving.connect() as engine:
        with pytest.raises(RefusedError) as caught:
            attach(engine, wanted)
        assert caught.value.verdict == refused(
            Reason.FINGERPRINT_DIFFERS,
            fields=(Difference("engine", "other", "test"), Difference("more", "1", "(absent)")),
        )
        assert attach(engine, fingerprint_of(TARGET)) == 2


def test_a_refusal_of_very_many_long_facts_arrives(serving: Serving) -> None:
    facts = {f"fact {number}": "\U0001f525" * 200 for number in range(20)}
    serving.put(shard_of(fingerprint=Fingerprint.of({f"fact {number}": "\u00e9" * 2000 for number in range(250)})))
    with serving.connect() as engine:
        with pytest.raises(RefusedError) as caught:
            attach(engine, Fingerprint.of(facts))
        assert caught.value.verdict.reason is Reason.FINGERPRINT_DIFFERS
        assert caught.value.verdict.fields
        assert engine.status()["state"] == State.EMPTY


def test_facts_that_are_not_printable_end_the_connection(serving: Serving) -> None:
    serving.put(shard_of())
    with serving.connect() as engine:
        broken = Fingerprint((("a", "\x1b[2J"),))
        assert reason_of(lambda: attach(engine, broken)) is Reason.PROTOCOL
    assert serving.alive


@pytest.mark.parametrize(("role", "rank"), [("draft", 0), ("target", 2), ("target", -1), ("", 0)])
def test_a_slot_that_is_not_there_is_refused_by_naming_those_that_are(serving: Serving, role: str, rank: int) -> None:
    with serving.connect() as engine:
        with pytest.raises(RefusedError, match="there is target rank 0, target rank 1"):
            engine.describe(role=role, rank=rank, wait_s=0)
        with pytest.raises(RefusedError, match="there is target rank 0, target rank 1"):
            engine.attach(role=role, rank=rank, client="e", fingerprint=TARGET)
        with pytest.raises(RefusedError, match="there is target rank 0, target rank 1"):
            engine.offer(role=role, rank=rank, client="e", target=TARGET)


@pytest.mark.parametrize(
    ("attribute", "text", "reason"),
    [
        ("trouble", "nothing is loaded yet", Reason.NOT_RESIDENT),
        ("trouble", "the loader failed", Reason.LOADER_FAILED),
        ("progress", "reading 3 of 8", Reason.LOADING),
        ("refusal", "bad signature", Reason.CHECKPOINT_REFUSED),
    ],
)
def test_why_nothing_is_resident_is_said(serving: Serving, attribute: str, text: str, reason: Reason) -> None:
    if reason is not Reason.NOT_RESIDENT:
        serving.call(lambda: setattr(serving.holdings, attribute, text))
    with serving.connect() as engine:
        acts: list[Callable[[], object]] = [
            lambda: engine.describe(role="target", rank=0, wait_s=0),
            lambda: attach(engine, fingerprint_of(TARGET)),
        ]
        for act in acts:
            with pytest.raises(RefusedError, match=text) as caught:
                act()
            assert caught.value.verdict.reason is reason


def test_waiting_ends_when_the_shard_is_there_and_tells_progress_meanwhile(serving: Serving) -> None:
    told: list[str] = []
    heard = threading.Event()

    def hear_progress(text: str) -> None:
        told.append(text)
        heard.set()

    results = []

    def wait() -> None:
        with serving.connect() as engine:
            described = engine.describe(role="target", rank=0, wait_s=20, on_progress=hear_progress)
            described.configs.close()
            results.append(described.record)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with serving.connect() as donor:
        offer(donor)
        donor.progress("reading 1 of 2")
        assert heard.wait(20)
        with closing(donation_of()) as donation:
            donate(donor, donation)
        waiting.join(20)
    assert results == [donation.record]
    assert "reading 1 of 2" in told


def test_waiting_ends_after_the_time_that_was_asked_for(serving: Serving) -> None:
    with serving.connect() as engine:
        assert reason_of(lambda: engine.describe(role="target", rank=0, wait_s=0.05)) is Reason.NOT_RESIDENT
        assert reason_of(lambda: engine.describe(role="target", rank=0, wait_s=-5)) is Reason.NOT_RESIDENT


def test_nobody_waits_for_a_checkpoint_that_is_refused(serving: Serving) -> None:
    results: list[Reason | None] = []

    def wait() -> None:
        with serving.connect() as engine:
            results.append(reason_of(lambda: engine.describe(role="target", rank=0, wait_s=60)))

    waiting = threading.Thread(target=wait)
    waiting.start()

    def refuse() -> None:
        serving.holdings.refusal = "bad signature"
        serving.holdings.touch()

    serving.call(refuse)
    waiting.join(20)
    wait()
    assert results == [Reason.CHECKPOINT_REFUSED] * 2


def test_who_speaks_while_waiting_is_hung_up_on(serving: Serving) -> None:
    with serving.raw() as channel:
        asked = wire.encode(wire.Describe(role="target", rank=0, wait_s=60))
        channel.send(asked)
        answer = say(channel, wire.encode(wire.Status()))
        assert isinstance(answer, wire.Refused)
        assert answer.reason == Reason.PROTOCOL
        assert hear(channel) is None


def test_a_shard_that_was_replaced_since_it_was_described_is_not_attached(serving: Serving) -> None:
    serving.put(shard_of())
    with serving.connect() as engine, serving.connect() as donor:
        described = engine.describe(role="target", rank=0, wait_s=0)
        described.configs.close()
        offer(donor, replace=True)
        with closing(donation_of()) as donation:
            donate(donor, donation)
        before = count_descriptors()
        with pytest.raises(Exception, match="was replaced since it was described"):
            attach(engine, donation.record.fingerprint)
        assert count_descriptors() == before


def test_renewing_makes_a_connection_the_lease(serving: Serving) -> None:
    shard = serving.put(shard_of())
    with serving.connect() as engine:
        engine.renew(shard_id=shard.record.shard_id, client="engine")
        (lease,) = engine.status()["leases"]
        assert (lease["client"], lease["shard_id"], lease["pid"]) == ("engine", shard.record.shard_id, os.getpid())
    serving.wait_until(lambda: not serving.holdings.leases)


@pytest.mark.parametrize("shard_id", ["", "0123456789abcdef"])
def test_a_shard_that_is_not_held_cannot_be_renewed(serving: Serving, shard_id: str) -> None:
    held = serving.put(shard_of()).record.shard_id
    with serving.connect() as engine:
        for unknown in (shard_id, held + "0", held[:-1]):
            assert reason_of(partial(engine.renew, shard_id=unknown, client="e")) is Reason.UNKNOWN_SHARD


def test_one_connection_has_one_lease_of_a_shard_however_often_it_attaches(serving: Serving) -> None:
    shard = serving.put(shard_of())
    with serving.connect() as engine:
        for _ in range(10):
            attach(engine, fingerprint_of(TARGET))
            engine.renew(shard_id=shard.record.shard_id, client="engine")
        assert len(engine.status()["leases"]) == 1
    serving.wait_until(lambda: not serving.holdings.leases)


def test_names_that_clients_choose_are_made_printable(serving: Serving) -> None:
    serving.put(shard_of())
    with serving.connect() as engine:
        slabs = engine.attach(
            role="target", rank=0, client="\x1b[2J\nengine\0" + "x" * 500, fingerprint=fingerprint_of(TARGET)
        )
        close_all(slabs)
        (lease,) = engine.status()["leases"]
        assert lease["client"].isprintable()
        assert len(lease["client"]) < 200


def test_an_eviction_frees_every_shard_here_and_in_the_store(serving: Serving, manager: ServiceManager) -> None:
    with serving.connect() as owner:
        for rank in (0, 1):
            offer(owner, rank=rank)
            with closing(donation_of(rank=rank)) as donation:
                donate(owner, donation)
    serving.wait_until(lambda: not serving.holdings.leases)
    assert len(manager.names()) == 8
    with serving.connect() as owner:
        assert owner.evict(force=False) == 4 * PAGE
        assert manager.names() == []
        status = owner.status()
        assert (status["state"], status["size_bytes"], status["trouble"]) == ("empty", 0, "evicted by the operator")
        assert reason_of(lambda: owner.describe(role="target", rank=0, wait_s=0)) is Reason.NOT_RESIDENT


def test_what_is_leased_is_evicted_only_by_force_and_its_lease_goes_on(serving: Serving) -> None:
    shard = serving.put(shard_of())
    with serving.connect() as engine, serving.connect() as owner:
        attach(engine, fingerprint_of(TARGET))
        with pytest.raises(RefusedError, match=f"in use by engine .pid {os.getpid()}.") as caught:
            owner.evict(force=False)
        assert caught.value.verdict.reason is Reason.LEASED
        assert serving.holdings.shard(("target", 0)) is shard
        assert owner.evict(force=True) == 2 * PAGE
        assert [lease["client"] for lease in owner.status()["leases"]] == ["engine"]


def test_an_eviction_during_a_load_is_refused_unless_it_is_forced(serving: Serving) -> None:
    with serving.connect() as donor, serving.connect() as owner:
        offer(donor)
        donor.progress("reading 3 of 8")
        serving.wait_until(lambda: serving.holdings.progress != "")
        assert reason_of(lambda: owner.evict(force=False)) is Reason.LOADING
        assert owner.evict(force=True) == 0
        with closing(donation_of()) as donation:
            assert reason_of(lambda: donate(donor, donation)) is Reason.BAD_DONATION
        assert serving.holdings.evicted
        offer(donor)
        with closing(donation_of()) as donation:
            donate(donor, donation)
        assert not serving.holdings.evicted


def test_an_eviction_while_a_donation_is_stored_wins(serving: Serving, manager: ServiceManager) -> None:
    with serving.connect() as donor, serving.connect() as owner:
        offer(donor)
        manager.pause()
        refusals: list[Reason | None] = []

        def give() -> None:
            with closing(donation_of()) as donation:
                refusals.append(reason_of(lambda: donate(donor, donation)))

        giving = threading.Thread(target=give)
        giving.start()
        serving.wait_for_storing()
        assert owner.evict(force=True) == 0
        manager.go_on()
        giving.join(20)
    assert refusals == [Reason.BUSY]
    serving.notifier.barrier()
    assert manager.names() == []
    assert serving.holdings.missing == [("target", 0), ("target", 1)]


def test_why_the_checkpoint_on_disk_is_refused_is_kept_until_it_is_the_resident_one_again(serving: Serving) -> None:
    shard = serving.put(shard_of())
    with serving.connect() as owner:
        owner.checkpoint_seen("model.safetensors: not what was signed")
        owner.checkpoint_seen("model.safetensors: not what was signed")
        status = owner.status()
        assert (status["refused"], status["trouble"]) == (True, "model.safetensors: not what was signed")
        assert serving.holdings.verdict_counts["refused", "checkpoint_refused"] == 1
        assert attach(owner, fingerprint_of(TARGET)) == 2
        owner.checkpoint_seen("")
        assert (owner.status()["refused"], owner.status()["trouble"]) == (False, "")
    assert serving.holdings.shard(("target", 0)) is shard


def test_a_scrub_is_believed_only_of_what_its_client_has_attached(serving: Serving) -> None:
    shard = serving.put(shard_of())
    with serving.connect() as client:
        assert reason_of(lambda: client.scrubbed(shard_id=shard.record.shard_id, damaged=[0])) is Reason.UNKNOWN_SHARD
        attach(client, fingerprint_of(TARGET))
        assert reason_of(lambda: client.scrubbed(shard_id="0" * 16, damaged=[0])) is Reason.UNKNOWN_SHARD
        assert serving.holdings.scrub(shard) is None
        client.scrubbed(shard_id=shard.record.shard_id, damaged=[1, 0, 1])
        assert client.status()["shards"][0]["scrub"]["damaged"] == [0, 1]


@pytest.mark.parametrize("damaged", [[2], [-1], [1 << 61]])
def test_a_scrub_of_slabs_that_are_not_there_breaks_the_protocol(serving: Serving, damaged: list[int]) -> None:
    shard = serving.put(shard_of())
    with serving.connect() as client:
        attach(client, fingerprint_of(TARGET))
        with pytest.raises(PeerError):
            client.scrubbed(shard_id=shard.record.shard_id, damaged=damaged)
    assert not serving.call(lambda: serving.holdings.scrub_counts)


def test_what_a_scrub_found_goes_with_the_shard(serving: Serving) -> None:
    shard = serving.put(shard_of())
    serving.call(lambda: serving.holdings.note_scrub(shard, [0]))
    serving.call(lambda: serving.holdings.take(shard.slot))
    assert serving.call(lambda: serving.holdings.scrub(shard)) is None
    shard.close()
