"""A keeper's server in a thread of the test's process, with a real socket and a real service manager's socket."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from appliance import wire
from appliance.client import KeeperClient, RefusedError
from appliance.fingerprint import Fingerprint
from appliance.keeper.answers import Answers
from appliance.keeper.custody import Custody
from appliance.keeper.holdings import Holdings
from appliance.keeper.runtime import listen
from appliance.keeper.server import KeeperServer
from appliance.keeper.settings import Slot
from appliance.keeper.shard import Shard
from appliance.keeper.status import status
from appliance.notify import Notifier
from appliance.verdict import Reason
from tests.keeper.shards import TARGET, Donation, donation_of, fingerprint_of, slots

WAIT_TIMEOUT_S = 20.0
QUICK_S = 2.0  # on a busy machine; a blocked keeper takes ten times that, or for ever

Result = TypeVar("Result")


class Serving:
    """Serves holdings until closed; `close` raises what ended the server, if anything did."""

    def __init__(
        self,
        folder: Path,
        *,
        environ: dict[str, str] | None = None,
        layout: Sequence[Slot] | None = None,
        target: Fingerprint | None = TARGET,
        gid: int | None = None,
    ) -> None:
        self.path = folder / "keeper.sock"
        self.holdings = Holdings()
        self.holdings.lay_out(slots() if layout is None else layout)
        self.target = target
        self.notifier = Notifier(environ or {})
        self.custody = Custody(self.notifier)
        self.answers = Answers(
            self.holdings,
            self.custody,
            model="m",
            target=lambda: self.target,
            status=lambda: status(self.holdings, model="m", target=self.target, signer=""),
        )
        self.server = KeeperServer(self.holdings, self.answers, model="m", gid=gid)
        self._listener = listen(self.path, gid=gid)
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="keeper")
        self._thread.start()
        self._started.wait()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def connect(self) -> KeeperClient:
        return KeeperClient.connect(self.path, timeout_s=WAIT_TIMEOUT_S)

    def raw(self) -> socket.socket:
        """Return a bare connection, for what no client of ours would say."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(WAIT_TIMEOUT_S)
        channel.connect(str(self.path))
        return channel

    def call(self, act: Callable[[], Result]) -> Result:
        """Do something in the server's thread and return its result."""

        async def acted() -> Result:
            return act()

        return self.do(acted())

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_TIMEOUT_S)

    def put(self, shard: Shard) -> Shard:
        self.call(lambda: self.holdings.put(shard))
        return shard

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once it holds; it is looked at after every change of the holdings."""

        async def until() -> None:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while not condition():
                    await self.holdings.changed()

        self.do(until())

    def wait_for_storing(self) -> None:
        """Return once a donation is being stored with a service manager that does not answer."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not self.answers._storing:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait_for_end(self) -> None:
        """Return once the server has ended by itself; `close` says why."""
        self._thread.join(WAIT_TIMEOUT_S)
        assert not self.alive

    def close(self) -> None:
        if self.alive:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._listener.close()
        for shard in list(self.holdings.shards()):
            shard.close()
        self.notifier.close()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        serving = asyncio.create_task(self.server.serve(self._listener))
        stopping = asyncio.create_task(self._stop.wait())
        self._started.set()
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            stopping.cancel()
            serving.result()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def offer(client: KeeperClient, *, rank: int = 0, target: Fingerprint = TARGET, replace: bool = False) -> None:
    client.offer(role="target", rank=rank, client="donor", target=target, replace=replace)


def donate(client: KeeperClient, donation: Donation) -> None:
    client.donate(donation.held, donation.configs, donation.slabs)


def attach(client: KeeperClient, fingerprint: Fingerprint, *, rank: int = 0) -> int:
    """Attach and return the number of slabs; the descriptors are closed again."""
    slabs = client.attach(role="target", rank=rank, client="engine", fingerprint=fingerprint)
    for slab in slabs:
        slab.close()
    return len(slabs)


def say(channel: socket.socket, data: bytes, fds: Sequence[int] = ()) -> wire.Message | None:
    """Send bytes and return the answer, None where the keeper hung up."""
    socket.send_fds(channel, [data], list(fds))
    return hear(channel)


def hear(channel: socket.socket) -> wire.Message | None:
    try:
        packet = wire.receive(channel)
    except ConnectionResetError:  # told once, ahead of what was said before
        packet = wire.receive(channel)
    if packet is None:
        return None
    packet.close()
    return packet.message


def attaches_quickly(serving: Serving) -> None:
    """Attach as an engine does, and fail where that takes long."""
    began = time.monotonic()
    with serving.connect() as engine:
        engine.describe(role="target", rank=0, wait_s=0).configs.close()
        assert attach(engine, fingerprint_of(TARGET)) == 2
    assert time.monotonic() - began < QUICK_S


def give(serving: Serving, **changes: Any) -> None:
    """Have a slot filled by a donor who goes away."""
    with serving.connect() as donor:
        offer(donor, rank=changes.get("rank", 0))
        with closing(donation_of(**changes)) as donation:
            donate(donor, donation)
    serving.wait_until(lambda: not serving.holdings.leases)


def refusal_of(act: Callable[[], object]) -> tuple[Reason | None, str]:
    """Return the reason of a refusal, and its text."""
    with pytest.raises(RefusedError) as caught:
        act()
    return caught.value.verdict.reason, str(caught.value)
