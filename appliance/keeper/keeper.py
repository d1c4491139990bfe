"""The keeper's life: take back what the service manager kept, match it with the target, fill what is missing, serve."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError, HostError
from appliance.events import ERROR, WARNING, event
from appliance.fingerprint import Fingerprint
from appliance.keeper import health, loading
from appliance.keeper import settings as planned
from appliance.keeper.answers import Answers
from appliance.keeper.custody import Adopted, Custody
from appliance.keeper.holdings import Holdings, State
from appliance.keeper.runtime import listen, locked
from appliance.keeper.server import KeeperServer
from appliance.keeper.settings import ChildError, KeeperSettings
from appliance.keeper.shard import Shard
from appliance.keeper.start import Start, plan
from appliance.keeper.status import root_digest, status
from appliance.notify import Named, Notifier

START_EXTENSION_S = 300.0
HEALTH_RETRY_S = 5.0
LEAVE_TIMEOUT_S = 90.0  # an engine finishes the answers that it has begun
RENEWAL_S = 2.0  # in which every engine has leased anew what it got from the keeper before; it tries each half second


class Keeper:
    """One model's keeper in this process."""

    def __init__(self, manifest: Path, model: str, *, notifier: Notifier) -> None:
        self._manifest = manifest
        self._model = model
        self._notifier = notifier
        self._custody = Custody(notifier)
        self._holdings = Holdings()
        # What may be donated; None until it is settled that it may replace what is held.
        self._target: Fingerprint | None = None
        self._ready = False

    async def run(self, given: Sequence[Named]) -> None:
        """Serve until SIGTERM. Ends with an ApplianceError only where it holds nothing that could go on."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            await _first_end(self._live(given), self._tell_progress(), stop.wait())
        finally:
            self._notifier.stopping("stopping")

    async def _live(self, given: Sequence[Named]) -> None:
        adopted = self._custody.adopt(given)
        try:
            await self._live_with(adopted)
        finally:
            # Ours only: the service manager keeps its own.
            for shard in (*adopted.shards, *self._holdings.shards()):
                shard.close()

    async def _live_with(self, adopted: Adopted) -> None:
        last = _decoded(adopted)
        settings = await self._settings(last, holds_shards=bool(adopted.shards))
        with (
            locked(settings.runtime, gid=settings.gid),
            contextlib.closing(listen(settings.socket_path, gid=settings.gid)) as listener,
        ):
            start = plan(adopted.shards, settings=settings, last=last, refused=bool(self._holdings.refusal))
            self._take_back(start)
            answers = Answers(
                self._holdings,
                self._custody,
                model=self._model,
                target=lambda: self._target,
                status=lambda: self._status(settings),
            )
            server = KeeperServer(self._holdings, answers, model=self._model, gid=settings.gid)
            health_tried = asyncio.Event()
            await _first_end(
                server.serve(listener),
                self._serve_health(settings, health_tried),
                self._become_resident(settings, start.foreign, health_tried),
                self._feed_watchdog(),
            )

    async def _settings(self, last: KeeperSettings | None, *, holds_shards: bool) -> KeeperSettings:
        try:
            settings = await planned.obtain(self._manifest, self._model, on_progress=self._progress)
        except ApplianceError as error:
            if last is None or not holds_shards:
                raise
            # What is resident outlives a manifest that somebody broke meanwhile.
            self._refuse(f"{self._manifest} cannot be used: {error}")
            return last
        finally:
            self._progress("")
        if settings.refusal is not None:
            if not holds_shards:
                raise ChildError(settings.refusal.detail, exit_status=settings.refusal.exit_status)
            self._refuse(settings.refusal.detail)
        return settings

    def _take_back(self, start: Start) -> None:
        for shard in start.drop:
            event(f"freeing {shard.record.role} rank {shard.record.rank}: its slot is taken", model=self._model)
        self._custody.drop(*start.drop)
        self._holdings.lay_out(start.slots)
        for shard in start.keep:
            self._holdings.put(shard)
        if start.keep:
            event(
                f"took back {len(start.keep)} shards, {self._holdings.size_bytes} bytes",
                model=self._model,
                root_digest=root_digest(self._holdings),
            )

    async def _become_resident(
        self, settings: KeeperSettings, foreign: Sequence[Shard], health_tried: asyncio.Event
    ) -> None:
        """Swap what is foreign once the new checkpoint is verified, load what is missing, say READY=1, and stay."""
        await health_tried.wait()
        if foreign:
            await self._replace(settings, foreign)
        if not self._holdings.refusal:
            self._target = settings.target
            self._custody.store_settings(settings.raw)
        while True:
            if self._holdings.unattended and self._target is not None and not self._holdings.refusal:
                await self._fill(settings)
            if not self._holdings.missing and not self._ready:
                self._ready = True
                self._notifier.ready(self._summary())
                event(self._summary(), model=self._model, root_digest=root_digest(self._holdings))
            elif self._ready:
                self._notifier.status(self._summary())
            await self._holdings.changed()

    async def _replace(self, settings: KeeperSettings, foreign: Sequence[Shard]) -> None:
        """Free what is foreign and lay out the new slots; or refuse the new checkpoint, and nothing changes."""
        if settings.target is not None:
            for difference in settings.target.differences(foreign[0].record.target):
                event(f"resident weights are of another target: {difference}", model=self._model)
        self._progress("verifying the new checkpoint before the old weights go")
        leases_known = asyncio.get_running_loop().time() + RENEWAL_S
        try:
            verified = await planned.verify(self._manifest, self._model, on_progress=self._progress)
        except ApplianceError as error:
            self._refuse(f"the new checkpoint could not be verified: {error}")
            return
        finally:
            self._progress("")
        if verified.refusal is not None:
            self._refuse(verified.refusal.detail)
            return
        if verified.target != settings.target:
            self._refuse("the checkpoint or the manifest changed while it was verified: restart this keeper")
            return
        if crowding := [shard for shard in foreign if shard.record.device in verified.crowded]:
            # Where all was verified before, this keeper is quicker than they are.
            await asyncio.sleep(max(0.0, leases_known - asyncio.get_running_loop().time()))
            await self._clear(crowding)
        taken = [shard for shard in foreign if self._holdings.take(shard.slot) is not None]
        self._holdings.lay_out(settings.slots)
        await asyncio.to_thread(self._custody.drop, *taken)

    async def _clear(self, shards: Sequence[Shard]) -> None:
        """Ask whoever leases these shards to end, and wait for that: their memory is needed for what replaces them."""
        self._holdings.clearing = "no room for the new weights beside the old"
        while leases := [lease for shard in shards for lease in self._holdings.leased(shard)]:
            names = ", ".join(sorted({f"{lease.client} (pid {lease.pid})" for lease in leases}))
            self._progress(f"{self._holdings.clearing}: waiting for the end of {names}")
            event(self._holdings.progress, priority=WARNING, model=self._model)
            for lease in leases:
                lease.ask_to_leave(self._holdings.clearing)
            try:
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    while any(lease in self._holdings.leases for lease in leases):
                        await self._holdings.changed()
            except TimeoutError:
                # They keep the memory, and the loader, which finds no room, tries until it does.
                event("they did not end; going on without them", priority=WARNING, model=self._model)
                break
        self._progress("")

    async def _fill(self, settings: KeeperSettings) -> None:
        try:
            await loading.fill(self._holdings, settings.loader, model=self._model)
        except ChildError as error:
            if not self._ready and not list(self._holdings.shards()):
                raise
            self._refuse(error.message)

    def _refuse(self, detail: str) -> None:
        self._target = None
        self._holdings.refusal = detail
        self._holdings.clearing = ""
        self._holdings.touch()
        event(
            f"checkpoint refused, keeping what is resident: {detail}",
            priority=ERROR,
            model=self._model,
            verdict="refused",
            reason="checkpoint_refused",
            root_digest=root_digest(self._holdings),
        )

    def _progress(self, text: str) -> None:
        self._holdings.progress = text
        self._holdings.touch()

    async def _tell_progress(self) -> None:
        # Each step asks for more time: loading takes what it takes, and what hangs takes no steps.
        told = ""
        while True:
            text = self._holdings.progress or self._holdings.trouble
            if text and text != told and not self._ready:
                self._notifier.status(text)
                self._notifier.extend_timeout(START_EXTENSION_S)
            told = text
            await self._holdings.changed()

    async def _feed_watchdog(self) -> None:
        while True:
            self._notifier.watchdog()
            await asyncio.sleep((self._notifier.watchdog_s or 3600.0) / 3)

    async def _serve_health(self, settings: KeeperSettings, tried: asyncio.Event) -> None:
        if settings.health is None:
            tried.set()
            await asyncio.get_running_loop().create_future()
            return
        host, port = settings.health
        collector = health.HoldingsCollector(self._holdings, model=self._model)
        while True:
            app = health.make_app(
                collector, lambda: self._status(settings), ready=lambda: self._holdings.state is State.RESIDENT
            )
            try:
                await health.serve(app, host=host, port=port, listening=tried)
            except HostError as error:
                # Weights are worth more than the port: somebody else may give it back.
                if not list(self._holdings.shards()):
                    raise
                if not tried.is_set():
                    event(f"{error}; trying again", priority=WARNING, model=self._model)
                tried.set()
            await asyncio.sleep(HEALTH_RETRY_S)

    def _summary(self) -> str:
        state = f"{self._holdings.state}: {self._holdings.size_bytes} bytes, {len(self._holdings.leases)} leases"
        return f"{state}; checkpoint refused: {self._holdings.refusal}" if self._holdings.refusal else state

    def _status(self, settings: KeeperSettings) -> dict[str, Any]:
        return status(self._holdings, model=self._model, target=settings.target, signer=settings.signer)


def _decoded(adopted: Adopted) -> KeeperSettings | None:
    if adopted.settings is None:
        return None
    try:
        return planned.decode(adopted.settings)
    except ApplianceError as error:
        event(f"stored settings are of no use: {error}", priority=WARNING)
        return None


async def _first_end(*parts: Coroutine[Any, Any, Any]) -> None:
    """Return when one of them returns, raise when one raises; the others are cancelled and waited for."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
