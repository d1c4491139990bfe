"""A keeper that answers as it is told to, on a real socket, and remembers what it was told of the disk."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from appliance import wire
from appliance.descriptors import close_all
from appliance.errors import PeerError
from appliance.fingerprint import Fingerprint
from appliance.record import FileFacts
from tests.keeper.shards import TARGET, donation_of


class StandIn:
    """`status` is its answer to that question, `seen` what clients said of the checkpoint on disk.

    `files` are those that it has read, for each role; it holds no other.
    """

    def __init__(self, status: Mapping[str, Any]) -> None:
        self.status = dict(status)
        self.seen: list[str] = []
        self.files: dict[str, dict[str, FileFacts]] = {}
        self.target: Fingerprint = TARGET

    def answer(self, channel: socket.socket) -> None:
        with channel, contextlib.suppress(OSError, PeerError):
            while (packet := wire.receive(channel)) is not None:
                match packet.message:
                    case wire.Status():
                        wire.send(channel, wire.StatusReply(status=self.status))
                    case wire.CheckpointSeen() as said:
                        self.seen.append(said.refusal)
                        wire.send(channel, wire.Noted())
                    case wire.Describe(role=role) if role in self.files:
                        self._describe(channel, role)
                    case _:
                        return

    def _describe(self, channel: socket.socket, role: str) -> None:
        donation = donation_of(self.target, role=role, files=self.files[role])
        try:
            said = wire.Described(shard_id=donation.record.shard_id)
            wire.send(channel, said, [donation.held, donation.configs])
        finally:
            close_all((donation.held, donation.configs, *donation.slabs))


@contextlib.contextmanager
def keeper(path: Path, status: Mapping[str, Any]) -> Iterator[StandIn]:
    """Listen at a keeper's socket until the end of the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stand_in = StandIn(status)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stand_in.answer(listener.accept()[0])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield stand_in
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            path.unlink()
