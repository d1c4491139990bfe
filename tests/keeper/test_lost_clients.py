"""Clients that are killed, hang or are many: what they held is free again, and nothing of it is left behind."""

import contextlib
import socket
import time
from pathlib import Path

import pytest

from appliance import memfd, wire
from appliance.client import RefusedError
from appliance.keeper import server
from tests.descriptors import count_descriptors, room_for
from tests.keeper.clients import ClientProcess
from tests.keeper.serving import QUICK_S, Serving, attach, attaches_quickly, hear, offer, say
from tests.keeper.shards import TARGET, fingerprint_of, shard_of
from tests.service_manager import ServiceManager


@pytest.mark.parametrize("steps", [("attach",), ("describe", "attach")], ids=" ".join)
def test_the_lease_of_a_killed_client_ends(resident: Serving, steps: tuple[str, ...]) -> None:
    with ClientProcess(resident.path, *steps) as client:
        for step in steps:
            client.wait_for(step)
        resident.wait_until(lambda: [lease.pid for lease in resident.holdings.leases] == [client.pid])
        client.kill()
        resident.wait_until(lambda: not resident.holdings.leases)
    attaches_quickly(resident)


def test_a_client_killed_after_it_was_described_leaves_nothing(resident: Serving) -> None:
    before = count_descriptors()
    with ClientProcess(resident.path, "describe") as client:
        client.wait_for("describe")
    with resident.connect() as other:
        other.status()
    resident.wait_until(lambda: not resident.holdings.leases)
    assert count_descriptors() <= before + 1


def test_a_client_killed_while_it_waits_leaves_nothing(serving: Serving) -> None:
    with ClientProcess(serving.path, "wait") as client:
        client.wait_for("wait")
        client.kill()
        with serving.connect() as other:
            assert other.status()["state"] == "empty"
    serving.put(shard_of())
    attaches_quickly(serving)


def test_a_donor_killed_between_offer_and_donation_frees_the_slot(serving: Serving) -> None:
    with ClientProcess(serving.path, "offer") as donor:
        donor.wait_for("offer")
        serving.wait_until(lambda: serving.holdings.donor(("target", 0)) is not None)
        with serving.connect() as other, pytest.raises(RefusedError, match="another process is loading"):
            offer(other)
        donor.kill()
        serving.wait_until(lambda: serving.holdings.donor(("target", 0)) is None)
        with serving.connect() as other:
            offer(other)


def test_a_donor_killed_while_its_donation_is_stored_has_given_it(serving: Serving, manager: ServiceManager) -> None:
    with ClientProcess(serving.path, "offer", "give") as donor:
        donor.wait_for("offer")
        manager.pause()
        donor.wait_for("give")
        serving.wait_for_storing()
        donor.kill()
        manager.go_on()
        serving.wait_until(lambda: not serving.holdings.missing and not serving.holdings.leases)
    assert len(manager.names()) == 4
    attaches_quickly(serving)


def test_a_donor_that_hangs_does_not_keep_others_from_being_answered(serving: Serving) -> None:
    with ClientProcess(serving.path, "offer") as donor:
        donor.wait_for("offer")
        donor.stop()
        with serving.connect() as other:
            assert other.status()["state"] == "loading"


def test_a_service_manager_that_hangs_does_not_keep_others_from_being_answered(
    resident: Serving, manager: ServiceManager
) -> None:
    manager.pause()
    with ClientProcess(resident.path, "evict") as owner:
        with resident.connect() as other:
            began = time.monotonic()
            while other.status()["shards"]:
                assert time.monotonic() - began < QUICK_S * 5
            for _ in range(3):
                other.status()
        manager.go_on()
        owner.wait_for("evict")


def test_a_thousand_attachments_leave_no_descriptor(resident: Serving) -> None:
    before = count_descriptors()
    for _ in range(1000):
        with resident.connect() as engine:
            engine.describe(role="target", rank=0, wait_s=0).configs.close()
            attach(engine, fingerprint_of(TARGET))
    resident.wait_until(lambda: not resident.holdings.leases)
    assert count_descriptors() <= before + 1


def test_a_thousand_refusals_leave_no_descriptor(resident: Serving) -> None:
    before = count_descriptors()
    with memfd.sealed("gift", [b"gift"]) as gift:
        for _ in range(1000):
            with resident.raw() as channel:
                assert isinstance(say(channel, wire.encode(wire.Status()), [gift.fileno()]), wire.Refused)
                assert hear(channel) is None
    assert count_descriptors() <= before + 1


def test_out_of_descriptors_those_who_are_connected_go_on_and_others_come_later(
    resident: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "ACCEPT_RETRY_S", 0.05)
    with resident.connect() as connected, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        connected.status()
        late.settimeout(20)
        with room_for(0):  # the keeper is in this process
            late.connect(str(resident.path))
            for _ in range(3):
                assert connected.status()["state"] == "resident"
        assert isinstance(say(late, wire.encode(wire.Status())), wire.StatusReply)
    assert "cannot accept clients: Too many open files" in capsys.readouterr().err


def test_stopping_ends_every_conversation(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.put(shard_of())
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(serving.raw())
        leased = stack.enter_context(serving.connect())
        attach(leased, fingerprint_of(TARGET))
        waiting = stack.enter_context(serving.raw())
        serving.call(lambda: serving.holdings.take(("target", 0))).close()  # type: ignore[union-attr]
        waiting.send(wire.encode(wire.Describe(role="target", rank=0, wait_s=600)))
        began = time.monotonic()
        serving.close()
        assert time.monotonic() - began < QUICK_S
        assert hear(idle) is None
        leased.wait_for_hangup()
