"""A keeper that answers as it is told to, on a real socket, and remembers what it was told of the disk."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from appliance import wire
from appliance.errors import PeerError


class StandIn:
    """`status` is its answer to that question, `seen` what clients said of the checkpoint on disk."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self.status = dict(status)
        self.seen: list[str] = []

    def answer(self, channel: socket.socket) -> None:
        with channel, contextlib.suppress(OSError, PeerError):
            while (packet := wire.receive(channel)) is not None:
                match packet.message:
                    case wire.Status():
                        wire.send(channel, wire.StatusReply(status=self.status))
                    case wire.CheckpointSeen() as said:
                        self.seen.append(said.refusal)
                        wire.send(channel, wire.Noted())
                    case _:
                        return


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
