"""What a client in a process of its own does, step by step."""

import socket
import threading
from contextlib import closing
from pathlib import Path

from appliance import wire
from appliance.client import KeeperClient
from appliance.descriptors import close_all
from tests.keeper.serving import attach, donate, offer
from tests.keeper.shards import TARGET, donation_of, fingerprint_of


def take(step: str, client: KeeperClient | None, path: Path) -> KeeperClient:
    """Do one thing over the connection and return it."""
    if client is None:
        client = KeeperClient.connect(path, timeout_s=20)
    channel = client._channel
    if step == "describe":
        client.describe(role="target", rank=0, wait_s=0).configs.close()
    elif step == "wait":
        # Says so before the answer: it will wait for that, and not get it.
        wire.send(channel, wire.Describe(role="target", rank=0, wait_s=600))
    elif step == "attach":
        attach(client, fingerprint_of(TARGET))
    elif step == "offer":
        offer(client)
    elif step == "donate":
        with closing(donation_of()) as donation:
            donate(client, donation)
    elif step == "give":
        # Sends the donation and does not look at the answer.
        donation = donation_of()
        wire.send(channel, wire.Donate(), [donation.held, donation.configs, *donation.slabs])
        close_all((donation.held, donation.configs, *donation.slabs))
    elif step == "evict":
        client.evict(force=True)
    elif step == "checkpoint":
        client.checkpoint_seen("bad signature")
    elif step == "status":
        client.status()
    elif step == "flood":
        # Asks for more and more and reads nothing, until it is hung up on.
        channel.settimeout(5)
        try:
            while True:
                wire.send(channel, wire.Status())
        except OSError:
            pass
    elif step == "talk":
        # Says something from now on, without a pause and for ever.
        report = wire.Report(verdict="hit", reason="", detail="", phases_s={})
        channel.settimeout(None)
        threading.Thread(target=_talk, args=(channel, wire.encode(report)), daemon=True).start()
    else:
        assert step == "connect"
    return client


def _talk(channel: socket.socket, data: bytes) -> None:
    while True:
        channel.send(data)
