"""The client of a keeper: whatever the other end does, one domain error, and no descriptor left behind."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from appliance import client as clients
from appliance import memfd, wire
from appliance.client import KeeperClient, RefusedError
from appliance.descriptors import Descriptor, close_all
from appliance.errors import ConfigError, PeerError, ResourceError
from appliance.verdict import Outcome, Reason, Verdict
from tests.descriptors import count_descriptors, room_for
from tests.keeper.serving import Serving, attach, donate, offer
from tests.keeper.shards import LAYOUT, TARGET, donation_of, fingerprint_of, record_of, shard_of


class Puppet:
    """A keeper that does with its first client what a test says, in a thread."""

    def __init__(self, path: Path, act: Callable[[socket.socket], None]) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(20)
        self._act = act
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> "Puppet":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()
        self._listener.close()

    def wait_for_end(self) -> None:
        """Return once it has done everything and hung up."""
        self._thread.join()

    def _serve(self) -> None:
        channel, _ = self._listener.accept()
        with channel:
            channel.settimeout(20)
            self._act(channel)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keeper.sock"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


def answering(*messages: wire.Message | bytes, fds: int = 0) -> Callable[[socket.socket], None]:
    """Return what reads one message and answers with these, each with so many memory files."""

    def act(channel: socket.socket) -> None:
        packet = wire.receive(channel)
        if packet is not None:
            packet.close()
        with memfd.sealed("gift", [b"gift"]) as gift:
            for message in messages:
                data = message if isinstance(message, bytes) else wire.encode(message)
                socket.send_fds(channel, [data], [gift.fileno()] * fds)

    return act


def test_a_keeper_that_is_not_there_is_named_and_so_is_what_to_look_at(path: Path) -> None:
    with pytest.raises(ResourceError, match=rf"no keeper answers at {path}: No such file") as caught:
        KeeperClient.connect(path)
    assert caught.value.hint is not None and f"is weights@{path.parent.name} running?" in caught.value.hint


def test_a_stale_socket_is_no_keeper(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    before = count_descriptors()
    with pytest.raises(ResourceError, match="Connection refused"):
        KeeperClient.connect(path)
    assert count_descriptors() == before


def test_another_programs_socket_is_not_waited_for(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match=f"{path} is the socket of another program"):
            KeeperClient.connect(path, timeout_s=600)


def test_connecting_waits_for_a_keeper_that_comes(tmp_path: Path) -> None:
    connected: list[str] = []

    def connect() -> None:
        with KeeperClient.connect(tmp_path / "keeper.sock", timeout_s=20) as client:
            connected.append(client.status()["model"])

    thread = threading.Thread(target=connect)
    thread.start()
    with Serving(tmp_path):
        thread.join(20)
    assert connected == ["m"]


def test_a_path_that_no_socket_can_have_is_the_operators_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a Unix socket's path has at most 107") as caught:
        KeeperClient.connect(tmp_path / ("a" * 120))
    assert caught.value.hint == "set a shorter directories.runtime"


def test_a_crowd_at_the_door_is_waited_for(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with KeeperClient.connect(path):  # the queue is full

            def let_in() -> None:
                listener.accept()[0].close()

            letting_in = threading.Timer(0.1, let_in)
            letting_in.start()
            KeeperClient.connect(path).close()
            letting_in.join()


def test_a_crowd_at_the_door_is_not_waited_for_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CROWD_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with KeeperClient.connect(path), pytest.raises(ResourceError, match="temporarily unavailable"):
            KeeperClient.connect(path)


def test_without_a_free_descriptor_there_is_no_connection(path: Path) -> None:
    with room_for(0), pytest.raises(ResourceError, match="cannot make a socket: Too many open files"):
        KeeperClient.connect(path)


def test_a_keeper_that_hangs_up_is_said_to_have(path: Path) -> None:
    with Puppet(path, lambda channel: None), KeeperClient.connect(path) as client:
        with pytest.raises(PeerError, match=f"the keeper at {path} closed the connection"):
            client.status()
        with pytest.raises(PeerError, match=f"the keeper at {path} closed the connection"):
            client.status()


def test_a_refusal_that_came_before_the_question_is_still_read(path: Path) -> None:
    def refuse(channel: socket.socket) -> None:
        wire.send(channel, wire.Refused(reason=str(Reason.NOT_PERMITTED), detail="user 7 is a stranger"))

    with Puppet(path, refuse) as puppet, KeeperClient.connect(path) as client:
        puppet.wait_for_end()
        with pytest.raises(RefusedError, match="user 7 is a stranger") as caught:
            client.status()
        assert caught.value.verdict.reason is Reason.NOT_PERMITTED


def test_a_refusal_is_read_though_the_keeper_hung_up_without_reading_all_of_ours(path: Path) -> None:
    def refuse(channel: socket.socket) -> None:
        # The second message stays unread: closing then resets the connection.
        assert channel.recv(100_000, socket.MSG_PEEK)
        wire.send(channel, wire.Refused(reason=str(Reason.BUSY), detail="too many"))

    with Puppet(path, refuse) as puppet, KeeperClient.connect(path) as client:
        client.progress("unread")
        puppet.wait_for_end()
        with pytest.raises(RefusedError, match="too many"):
            client.status()


def test_a_keeper_that_does_not_answer_is_not_waited_for_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "REPLY_TIMEOUT_S", 0.1)
    done = threading.Event()

    def say_nothing(channel: socket.socket) -> None:
        done.wait(20)

    with Puppet(path, say_nothing), KeeperClient.connect(path) as client:
        with pytest.raises(PeerError, match=f"the keeper at {path} does not answer"):
            client.status()
        done.set()


def test_progress_does_not_prolong_the_wait_for_an_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "REPLY_TIMEOUT_S", 0.2)
    done = threading.Event()

    def chat(channel: socket.socket) -> None:
        while not done.wait(0.02):
            wire.send(channel, wire.Progress(text="nearly"))

    with Puppet(path, chat), KeeperClient.connect(path) as client:
        began = time.monotonic()
        with pytest.raises(PeerError, match="does not answer"):
            client.status()
        assert time.monotonic() - began < 10
        done.set()


def test_a_short_wait_for_one_answer_does_not_shorten_the_next(serving: Serving) -> None:
    with serving.connect() as client:
        with pytest.raises(RefusedError):
            client.describe(role="target", rank=0, wait_s=0)
        client._channel.settimeout(0.000001)
        offer(client)
        client._channel.settimeout(0.000001)
        client.progress("reading")
        client._channel.settimeout(0.000001)
        client.report(Verdict(Outcome.DONATED), {})
        with closing(donation_of()) as donation:
            client._channel.settimeout(0.000001)
            donate(client, donation)


BROKEN_ANSWERS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "another message": (answering(wire.Granted()), "answered 'status' with 'granted'"),
    "another message, with descriptors": (
        answering(wire.Attached(shard_id="ab"), fds=3),
        "answered 'status' with 'attached'",
    ),
    "descriptors on a status": (answering(wire.StatusReply(status={}), fds=2), "carries 2 descriptors"),
    "garbage": (answering(b"\xff" * 50, fds=1), "message is not JSON"),
    "another version": (answering(b'{"v":2,"op":"status_reply","status":{}}'), "message of version 2"),
    "a refusal for an unknown reason": (answering(wire.Refused(reason="mood", detail="")), "unknown reason 'mood'"),
    "a refusal of half a fact": (
        answering(wire.Refused(reason="busy", detail="", fields=[["a"]])),
        "unknown reason 'busy'",
    ),
}


@pytest.mark.parametrize(("act", "message"), BROKEN_ANSWERS.values(), ids=BROKEN_ANSWERS)
def test_a_broken_answer_is_an_error_of_the_peer_and_leaves_no_descriptor(
    path: Path, act: Callable[[socket.socket], None], message: str
) -> None:
    before = count_descriptors()
    with Puppet(path, act), KeeperClient.connect(path) as client, pytest.raises(PeerError, match=message) as caught:
        client.status()
    assert str(path) in str(caught.value)
    assert count_descriptors() == before


def described_as(held: Callable[[], Descriptor], packed: Callable[[], Descriptor]) -> Callable[[socket.socket], None]:
    def act(channel: socket.socket) -> None:
        wire.receive(channel)
        with held() as one, packed() as other:
            wire.send(channel, wire.Described(shard_id="ab"), [one, other])

    return act


BROKEN_RECORDS: dict[str, tuple[Callable[[], Descriptor], str]] = {
    "a pipe": (lambda: Descriptor(os.eventfd(0)), "shard record: not a sealed memory file"),
    "an unsealed file": (lambda: memfd.create("record"), "shard record: not a sealed memory file"),
    "nothing": (lambda: memfd.sealed("record", []), "no header line"),
    "garbage": (lambda: memfd.sealed("record", [b"\xff" * 100 + b"\n"]), "the header is not JSON"),
    "another version": (lambda: memfd.sealed("record", [b'{"v":2}\n']), "missing or malformed field"),
}


@pytest.mark.parametrize(("held", "message"), BROKEN_RECORDS.values(), ids=BROKEN_RECORDS)
def test_a_broken_record_is_an_error_of_the_peer_and_leaves_no_descriptor(
    path: Path, held: Callable[[], Descriptor], message: str
) -> None:
    act = described_as(held, lambda: memfd.sealed("configs", [b"[]\n"]))
    before = count_descriptors()
    with Puppet(path, act), KeeperClient.connect(path) as client, pytest.raises(PeerError, match=message):
        client.describe(role="target", rank=0, wait_s=0)
    assert count_descriptors() == before


def test_a_description_has_the_record_its_layout_and_the_configs(path: Path) -> None:
    record = record_of()
    act = described_as(
        lambda: memfd.sealed("record", [record.encode(LAYOUT)]), lambda: memfd.sealed("configs", [b"[]\n"])
    )
    with Puppet(path, act), KeeperClient.connect(path) as client:
        description = client.describe(role="target", rank=0, wait_s=0)
        assert (description.record, description.layout) == (record, LAYOUT)
        with description.configs:
            assert memfd.read(description.configs, what="configs", limit_bytes=10) == b"[]\n"


def test_a_donors_descriptors_stay_its_own(serving: Serving) -> None:
    with serving.connect() as client, closing(donation_of()) as donation:
        offer(client)
        donate(client, donation)
        assert not any(descriptor.closed for descriptor in (donation.held, donation.configs, *donation.slabs))


def test_a_keeper_that_dies_during_a_donation_is_noticed(path: Path) -> None:
    with Puppet(path, answering(wire.Granted())), KeeperClient.connect(path) as client, closing(donation_of()) as given:
        offer(client)
        client.progress("nobody hears this")
        with pytest.raises(PeerError, match=r"closed the connection|lost the keeper"):
            donate(client, given)


def test_hanging_up_is_noticed_by_who_waits_for_it(serving: Serving) -> None:
    serving.put(shard_of())
    with serving.connect() as client:
        attach(client, fingerprint_of(TARGET))
        ended = threading.Event()

        def wait() -> None:
            client.wait_for_hangup()
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not ended.wait(0.05)
        serving.close()
        assert ended.wait(20)
        thread.join()


def test_a_report_of_another_thread_is_no_hang_up(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "REPLY_TIMEOUT_S", 0.05)
    serving.put(shard_of())
    with serving.connect() as client:
        attach(client, fingerprint_of(TARGET))
        thread = threading.Thread(target=client.wait_for_hangup)
        thread.start()
        for _ in range(5):
            client.report(Verdict(Outcome.HIT), {})
            thread.join(0.05)
        # Something that nobody asked for ends the waiting for one packet, and the next begins with that timeout.
        (connection,) = serving.call(lambda: list(serving.server._connections.values()))
        serving.call(lambda: connection.send(wire.Progress(text="unasked")))
        client.report(Verdict(Outcome.HIT), {})
        thread.join(0.2)
        assert thread.is_alive()
        serving.close()
        thread.join(20)
        assert not thread.is_alive()


def test_being_asked_to_leave_ends_the_waiting_and_not_the_lease(serving: Serving) -> None:
    shard = serving.put(shard_of())
    with serving.connect() as client:
        attach(client, fingerprint_of(TARGET))
        serving.wait_until(lambda: len(serving.holdings.leases) == 1)
        (lease,) = serving.holdings.leases
        serving.call(lambda: lease.ask_to_leave("no room"))
        # Whatever is asked for meanwhile is answered all the same.
        client.scrubbed(shard_id=shard.record.shard_id, damaged=[])
        assert client.wait_for_hangup() == "no room"
        serving.call(lambda: lease.ask_to_leave("still no room"))
        assert client.wait_for_hangup() == "still no room"
        assert serving.holdings.leases == {lease}


def test_closing_wakes_who_waits_for_the_hang_up(serving: Serving) -> None:
    client = serving.connect()
    thread = threading.Thread(target=client.wait_for_hangup)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    client.close()
    thread.join(20)
    assert not thread.is_alive()


def test_closing_twice_is_harmless(serving: Serving) -> None:
    client = serving.connect()
    client.close()
    client.close()


def test_what_a_keeper_says_while_nobody_asks_leaves_no_descriptor(path: Path) -> None:
    def give(channel: socket.socket) -> None:
        with memfd.sealed("gift", [b"gift"]) as gift:
            wire.send(channel, wire.Attached(shard_id="ab"), [gift, gift])

    before = count_descriptors()
    with Puppet(path, give), KeeperClient.connect(path) as client:
        client.wait_for_hangup()
    assert count_descriptors() == before


def test_attached_slabs_are_the_callers(serving: Serving) -> None:
    serving.put(shard_of(slabs=3))
    with serving.connect() as client:
        slabs = client.attach(role="target", rank=0, client="e", fingerprint=fingerprint_of(TARGET))
        assert len(slabs) == 3
    assert not any(slab.closed for slab in slabs)
    close_all(slabs)
