"""Many clients of one keeper, some of them hostile: what one does costs only that one."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance import memfd, wire
from appliance.client import RefusedError
from appliance.keeper import server
from appliance.keeper.answers import Answers
from appliance.keeper.connection import Connection
from appliance.keeper.holdings import Holdings
from appliance.verdict import Reason
from tests.descriptors import count_descriptors, room_for
from tests.keeper.clients import ClientProcess
from tests.keeper.serving import Serving, attach, hear, offer, say
from tests.keeper.shards import TARGET, fingerprint_of, shard_of
from tests.messages import EVERY_MESSAGE, messages
from tests.service_manager import ServiceManager

NOBODY = 65534
QUICK_S = 2.0  # on a busy machine; a blocked keeper takes ten times that, or for ever

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's part can only be played by root")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as manager:
        yield manager


@pytest.fixture
def serving(tmp_path: Path, manager: ServiceManager) -> Iterator[Serving]:
    with Serving(tmp_path, environ=manager.environ) as serving:
        yield serving


@pytest.fixture
def resident(serving: Serving) -> Serving:
    serving.put(shard_of())
    return serving


def attaches_quickly(serving: Serving) -> None:
    began = time.monotonic()
    with serving.connect() as engine:
        engine.describe(role="target", rank=0, wait_s=0).configs.close()
        assert attach(engine, fingerprint_of(TARGET)) == 2
    assert time.monotonic() - began < QUICK_S


GARBAGE = {
    "nothing JSON": (b"{", 0),
    "a message of a keeper": (wire.encode(wire.Granted()), 0),
    "a keeper's descriptors": (wire.encode(wire.Described(shard_id="ab")), 2),
    "very many of a keeper's descriptors": (wire.encode(wire.Attached(shard_id="ab")), wire.MAX_DESCRIPTORS),
    "another version": (b'{"v":2,"op":"status"}', 0),
    "a field too many": (b'{"v":1,"op":"status","more":1}', 0),
    "deep nesting": (b"[" * 60_000, 0),
    "a message that is too large": (b'{"v":1,"op":"status"}' + b" " * 65_536, 0),
    "descriptors that nobody asked for": (wire.encode(wire.Status()), 3),
    "as many descriptors as there can be": (wire.encode(wire.Status()), wire.MAX_DESCRIPTORS),
    "only descriptors": (b"", 2),
    "a donation of one descriptor": (wire.encode(wire.Donate()), 1),
}


@pytest.mark.parametrize(("data", "count"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_by_name_and_costs_only_who_sent_it(resident: Serving, data: bytes, count: int) -> None:
    with resident.connect() as bystander:
        attach(bystander, fingerprint_of(TARGET))
        before = count_descriptors()
        with resident.raw() as channel, memfd.sealed("gift", [b"gift"]) as gift:
            answer = say(channel, data, [gift.fileno()] * count)
            assert isinstance(answer, wire.Refused)
            assert answer.reason == Reason.PROTOCOL
            assert hear(channel) is None
        assert count_descriptors() == before
        assert len(bystander.status()["leases"]) == 1
    attaches_quickly(resident)


def test_ten_megabytes_in_one_message_are_refused(resident: Serving) -> None:
    with resident.raw() as channel:
        with contextlib.suppress(PermissionError):  # root may have a buffer of any size
            channel.setsockopt(socket.SOL_SOCKET, 32, 32 << 20)  # SO_SNDBUFFORCE
        data = b'{"v":1,"op":"status"}' + b" " * (10 << 20)
        try:
            answer = say(channel, data)
        except OSError:  # the kernel refuses first
            answer = say(channel, data[:150_000])
        assert isinstance(answer, wire.Refused)
        assert "more than 65536 bytes" in answer.detail
    attaches_quickly(resident)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packets=st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 3)), min_size=1, max_size=4))
def test_random_packets_leave_a_keeper_that_serves(resident: Serving, packets: list[tuple[bytes, int]]) -> None:
    with resident.raw() as channel, memfd.sealed("gift", [b"gift"]) as gift, contextlib.suppress(OSError):
        for data, count in packets:
            socket.send_fds(channel, [data], [gift.fileno()] * count)
    with resident.connect() as client:
        assert client.status()["state"] == "resident"


_USUAL: dict[str, st.SearchStrategy[Any]] = {
    "role": st.sampled_from(["target", "target", "draft"]),
    "rank": st.sampled_from([0, 0, 0, 1, -1]),
    "wait_s": st.sampled_from([0.0, 0.01]),
    "target": st.sampled_from([TARGET.to_json(), {}]),
    "fingerprint": st.sampled_from([fingerprint_of(TARGET).to_json(), {}]),
    "verdict": st.sampled_from(["hit", "donated", "refused"]),
    "reason": st.sampled_from(["file_differs", "because"]),
}
_SAID = st.sampled_from(EVERY_MESSAGE).flatmap(lambda kind: messages(kind, **_USUAL))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(st.tuples(_SAID, st.sampled_from([0, 0, 0, 2, 4])), min_size=1, max_size=6))
def test_random_messages_in_any_order_leave_a_keeper_that_serves(
    serving: Serving, said: list[tuple[wire.Message, int]]
) -> None:
    if serving.holdings.missing and not serving.holdings.loading:
        serving.put(shard_of())
    with serving.raw() as channel, memfd.sealed("gift", [b"gift"]) as gift, contextlib.suppress(OSError):
        for message, count in said:
            socket.send_fds(channel, [wire.encode(message)], [gift.fileno()] * count)
    serving.wait_until(lambda: not (serving.holdings.leases or serving.holdings.loading))
    with serving.connect() as client:
        assert client.status()["model"] == "m"


def test_a_client_that_never_reads_costs_only_itself(resident: Serving) -> None:
    with ClientProcess(resident.path, "flood") as flood:
        attaches_quickly(resident)
        flood.wait_for("flood")  # it has been hung up on
        attaches_quickly(resident)


def test_clients_that_talk_without_pause_do_not_keep_others_from_being_heard(resident: Serving) -> None:
    with ClientProcess(resident.path, "talk") as one, ClientProcess(resident.path, "talk") as other:
        one.wait_for("talk")
        other.wait_for("talk")
        for _ in range(3):
            attaches_quickly(resident)


def test_after_every_message_the_others_have_their_turn() -> None:
    class Counting(Answers):
        """Answers nothing, and counts what it was asked."""

        asked = 0

        def __init__(self) -> None: ...

        async def answer(self, connection: Connection, packet: wire.Packet) -> None:
            self.asked += 1

    async def run() -> None:
        answers = Counting()
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, closing(Connection(other)) as connection:
            for _ in range(50):
                wire.send(one, wire.Status())
            one.shutdown(socket.SHUT_WR)
            conversing = asyncio.create_task(
                server.KeeperServer(Holdings(), answers, model="m", gid=None)._converse(connection)
            )
            for turn in range(50):
                await asyncio.sleep(0)
                assert answers.asked <= turn + 2
            await asyncio.wait_for(conversing, 20)
        assert answers.asked == 50

    asyncio.run(run())


def test_a_client_that_reads_no_refusals_is_hung_up_on(serving: Serving) -> None:
    with serving.raw() as channel:
        asked = wire.encode(wire.Describe(role="draft", rank=0, wait_s=0))
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            for _ in range(100_000):
                channel.send(asked)


def test_silence_ends_a_connection_that_holds_nothing(resident: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENT_CLIENT_TIMEOUT_S", 0.05)
    with resident.raw() as channel:
        answer = hear(channel)
        assert isinstance(answer, wire.Refused)
        assert "was silent for 0.05 s" in answer.detail
        assert hear(channel) is None


@pytest.mark.parametrize("holding", ["a lease", "a grant", "a description"])
def test_who_holds_something_may_be_silent(resident: Serving, monkeypatch: pytest.MonkeyPatch, holding: str) -> None:
    monkeypatch.setattr(server, "SILENT_CLIENT_TIMEOUT_S", 0.2)
    with resident.connect() as client, resident.raw() as idle:
        if holding == "a lease":
            attach(client, fingerprint_of(TARGET))
        elif holding == "a grant":
            offer(client, replace=True)
        else:
            client.describe(role="target", rank=0, wait_s=0).configs.close()
        # Once an idle one has been hung up on, and a second one after it, the time is surely over.
        assert isinstance(hear(idle), wire.Refused)
        with resident.raw() as second:
            assert isinstance(hear(second), wire.Refused)
        assert client.status()["pid"] == os.getpid()


def test_five_hundred_silent_connections_do_not_keep_another_client_out(
    resident: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS_OF_ONE_PROCESS", 600)
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(resident.raw())
        attaches_quickly(resident)


def test_one_process_that_opens_them_all_does_not_keep_others_out(resident: Serving) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(resident.connect()) for _ in range(server.MAX_CONNECTIONS_OF_ONE_PROCESS)]
        assert held[0].status()["state"] == "resident"
        with resident.connect() as one_too_many, pytest.raises(RefusedError, match="more than 64 connections of pid"):
            one_too_many.status()
        with ClientProcess(resident.path, "attach") as other:
            other.wait_for("attach")
        held[0].close()
        held[0].close()
        resident.wait_until(lambda: True)
        attaches_quickly(resident)


def test_beyond_the_most_connections_newcomers_are_told_so(resident: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(resident.connect()).status()
        with resident.connect() as newcomer, pytest.raises(RefusedError) as caught:
            newcomer.status()
        assert caught.value.verdict.reason is Reason.BUSY


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


@as_root
def test_another_user_is_refused_with_a_reason(open_folder: Path) -> None:
    with Serving(open_folder) as serving:
        serving.put(shard_of())
        serving.path.chmod(0o666)  # so that the keeper has to look who it is
        with ClientProcess(serving.path, "attach", uid=NOBODY, gid=NOBODY) as other:
            assert other.line() == (
                f"refused not_permitted user {NOBODY} is neither the keeper's user nor in its group"
            )
        attaches_quickly(serving)


@as_root
def test_another_user_cannot_even_connect(open_folder: Path) -> None:
    with Serving(open_folder) as serving, ClientProcess(serving.path, "status", uid=NOBODY, gid=NOBODY) as other:
        assert other.line().startswith("failed ConfigError")


@as_root
def test_a_member_of_the_group_attaches_and_neither_donates_nor_evicts(open_folder: Path) -> None:
    with Serving(open_folder, gid=NOBODY) as serving:
        serving.put(shard_of())
        steps = ("describe", "attach", "offer", "donate", "evict", "checkpoint", "status")
        with ClientProcess(serving.path, *steps, uid=NOBODY, gid=NOBODY) as member:
            member.wait_for("describe")
            member.wait_for("attach")
            assert member.line() == f"refused not_permitted user {NOBODY} may attach, but not fill a slot"
            assert member.line() == "refused bad_donation nobody granted this client to fill a slot"
            assert member.line() == f"refused not_permitted user {NOBODY} may attach, but not evict"
            assert member.line() == f"refused not_permitted user {NOBODY} may attach, but not say what is on disk"
            member.wait_for("status")
        assert serving.holdings.missing == []


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
