"""The keeper's life: take back what the service manager kept, match it with the target, fill what is missing, serve."""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance import fingerprint
from appliance.descriptors import Descriptor
from appliance.errors import ApplianceError, HostError, ResourceError
from appliance.events import ERROR, event
from appliance.fingerprint import Fingerprint
from appliance.keeper import health, loading
from appliance.keeper import settings as planned
from appliance.keeper.custody import Custody
from appliance.keeper.holdings import Holdings, State
from appliance.keeper.server import KeeperServer, listen
from appliance.keeper.settings import ChildError, KeeperSettings, Refusal
from appliance.keeper.shard import Shard
from appliance.notify import Named, Notifier

START_EXTENSION_S = 120.0


class Keeper:
    """One model's keeper in this process."""

    def __init__(self, manifest: Path, model: str, *, notifier: Notifier) -> None:
        self._manifest = manifest
        self._model = model
        self._notifier = notifier
        self._custody = Custody(notifier)
        self._holdings = Holdings()
        self._refusal: Refusal | None = None

    async def run(self, given: Sequence[Named]) -> None:
        """Serve until SIGTERM. Ends with an ApplianceError only where it holds nothing that could go on."""
        adopted = self._custody.adopt(given)
        settings = await self._settings(adopted.settings, holds_shards=bool(adopted.shards))
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        with _lock(settings.runtime), contextlib.closing(listen(settings.socket_path, gid=settings.gid)) as listener:
            self._holdings.lay_out(settings.slots)
            foreign = self._put_back(adopted.shards, settings)
            server = KeeperServer(
                self._holdings,
                self._custody,
                model=self._model,
                gid=settings.gid,
                target=lambda: settings.target,
                status=lambda: self._status(settings),
            )
            runner = await self._start_health(settings)
            tasks = {
                asyncio.create_task(server.serve(listener)),
                asyncio.create_task(self._become_resident(settings, foreign)),
                asyncio.create_task(self._tell_progress()),
                asyncio.create_task(self._feed_watchdog()),
                asyncio.create_task(stop.wait()),
            }
            try:
                await _first_end(tasks)
            finally:
                self._notifier.stopping("stopping")
                if runner is not None:
                    await runner.cleanup()

    async def _settings(self, stored: bytes | None, *, holds_shards: bool) -> KeeperSettings:
        try:
            settings = await planned.obtain(self._manifest, self._model)
        except ApplianceError as error:
            if stored is None or not holds_shards:
                raise
            # What is resident outlives a manifest that somebody broke meanwhile.
            settings = planned.decode(stored)
            self._refuse(Refusal(f"{self._manifest} cannot be used: {error}", error.exit_status))
            return settings
        if settings.refusal is not None:
            if not holds_shards:
                raise ChildError(settings.refusal.detail, exit_status=settings.refusal.exit_status)
            self._refuse(settings.refusal)
        else:
            self._custody.store_settings(settings.raw)
        return settings

    def _put_back(self, shards: Sequence[Shard], settings: KeeperSettings) -> list[Shard]:
        """Fill slots with what was adopted; return the shards that the target no longer wants, served meanwhile."""
        foreign = []
        # Where two fit one slot, the one of the target wins.
        for shard in sorted(shards, key=lambda shard: shard.record.target != settings.target):
            slot = next((slot for slot in settings.slots if slot.key == shard.slot), None)
            if slot is None or slot.device != shard.record.device or self._holdings.shard(shard.slot) is not None:
                event(f"freeing {shard.record.role} rank {shard.record.rank}: no slot for it", model=self._model)
                self._custody.drop(shard)
                continue
            self._holdings.put(shard)
            if settings.target is not None and shard.record.target != settings.target and self._refusal is None:
                foreign.append(shard)
        if held := list(self._holdings.shards()):
            event(
                f"took back {len(held)} shards, {self._holdings.size_bytes} bytes",
                model=self._model,
                root_digest=held[0].record.fingerprint.root_digest,
            )
        return foreign

    async def _become_resident(self, settings: KeeperSettings, foreign: Sequence[Shard]) -> None:
        """Swap what is foreign once the new checkpoint is verified, load what is missing, say READY=1, and stay."""
        if foreign:
            await self._replace(settings.target, foreign)
        if self._holdings.missing:
            try:
                if self._refusal is not None:
                    raise ChildError(self._refusal.detail, exit_status=self._refusal.exit_status)
                await loading.fill(self._holdings, settings.loader, model=self._model)
            except ChildError as error:
                if not list(self._holdings.shards()):
                    raise
                self._refuse(Refusal(error.message, error.exit_status))
        if not self._holdings.missing:
            self._notifier.ready(self._summary())
        event(self._summary(), model=self._model, root_digest=self._root_digest())
        while True:
            await self._holdings.changed()
            self._notifier.status(self._summary())

    async def _replace(self, target: Fingerprint | None, foreign: Sequence[Shard]) -> None:
        for difference in () if target is None else target.differences(foreign[0].record.target):
            event(f"resident weights are of another target: {difference}", model=self._model)
        self._holdings.progress = "verifying the new checkpoint before the old weights go"
        self._holdings.touch()
        refusal = await planned.verify(self._manifest, self._model)
        self._holdings.progress = ""
        if refusal is not None:
            self._refuse(refusal)
            return
        for shard in foreign:
            if (taken := self._holdings.take(shard.slot)) is not None:
                self._custody.drop(taken)

    def _refuse(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._holdings.trouble = refusal.detail
        event(
            f"checkpoint refused, keeping what is resident: {refusal.detail}",
            priority=ERROR,
            model=self._model,
            verdict="refused",
            reason="checkpoint_refused",
        )

    async def _tell_progress(self) -> None:
        told = ""
        while True:
            await self._holdings.changed()
            if (text := self._holdings.progress) and text != told:
                told = text
                self._notifier.status(text)
                self._notifier.extend_timeout(START_EXTENSION_S)

    async def _feed_watchdog(self) -> None:
        while True:
            self._notifier.watchdog()
            await asyncio.sleep((self._notifier.watchdog_s or 3600.0) / 3)

    async def _start_health(self, settings: KeeperSettings) -> Any:
        if settings.health is None:
            return None
        collector = health.HoldingsCollector(
            self._holdings, model=self._model, refusals=lambda: int(self._refusal is not None)
        )
        app = health.make_app(
            collector, lambda: self._status(settings), ready=lambda: self._holdings.state is State.RESIDENT
        )
        return await health.start(app, host=settings.health[0], port=settings.health[1])

    def _summary(self) -> str:
        state = f"{self._holdings.state}: {self._holdings.size_bytes} bytes, {len(self._holdings.leases)} leases"
        return f"{state}; checkpoint refused: {self._refusal.detail}" if self._refusal is not None else state

    def _root_digest(self) -> str:
        return next((shard.record.fingerprint.root_digest for shard in self._holdings.shards()), "")

    def _status(self, settings: KeeperSettings) -> dict[str, Any]:
        holdings = self._holdings
        return {
            "model": self._model,
            "state": str(holdings.state),
            "pid": os.getpid(),
            "progress": holdings.progress,
            "trouble": holdings.trouble,
            "refused": self._refusal is not None,
            "root_digest": self._root_digest(),
            "target_root_digest": _target_root(settings.target),
            "signer": next((shard.record.signer for shard in holdings.shards()), settings.signer),
            "size_bytes": holdings.size_bytes,
            "shards": [
                {
                    "role": shard.record.role,
                    "rank": shard.record.rank,
                    "device": shard.record.device,
                    "shard_id": shard.record.shard_id,
                    "size_bytes": shard.record.size_bytes,
                    "slabs": len(shard.slabs),
                    "phases_s": dict(shard.record.phases_s),
                }
                for shard in holdings.shards()
            ],
            "leases": [lease.to_json() for lease in sorted(holdings.leases, key=lambda lease: lease.since)],
            "verdicts": list(holdings.verdicts)[-5:],
        }


def _target_root(target: Fingerprint | None) -> str:
    return "" if target is None else target.get(fingerprint.ROOT_DIGEST)


@contextlib.contextmanager
def _lock(runtime: Path) -> Any:
    """Hold the model's runtime directory; ResourceError naming the process that has it."""
    path = runtime / "keeper.lock"
    try:
        runtime.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640))
    except OSError as error:
        raise HostError(f"cannot use {path}: {error.strerror}", hint="who owns the runtime directory?") from error
    with lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock.fileno(), 32, 0).decode(errors="replace").strip()
            raise ResourceError(f"another keeper (pid {holder or 'unknown'}) serves {runtime}") from error
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
        yield


async def _first_end(tasks: set["asyncio.Task[Any]"]) -> None:
    """Return when one of them returns, raise when one raises; the others are cancelled and waited for."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
