"""Many clients of one keeper, some of them hostile: what one does costs only that one."""

import asyncio
import contextlib
import os
import socket
from contextlib import closing
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
from tests.descriptors import count_descriptors
from tests.keeper.clients import ClientProcess
from tests.keeper.serving import Serving, attach, attaches_quickly, hear, offer, say
from tests.keeper.shards import TARGET, fingerprint_of, shard_of
from tests.messages import EVERY_MESSAGE, messages

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
