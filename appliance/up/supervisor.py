"""All units of a manifest in one process: order, requests, new checkpoints, and a clean end."""

import asyncio
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from appliance import errors
from appliance.descriptors import Descriptor
from appliance.errors import ApplianceError, HostError, ResourceError
from appliance.up import lock
from appliance.up.description import Checkpoint, Event, Kind, Result, State, UnitDescription, UnitStatus
from appliance.up.group import kill_leftovers
from appliance.up.invocation import KILL_TIMEOUT_S
from appliance.up.printer import OWN_NAME, LinePrinter
from appliance.up.renewal import Renewal
from appliance.up.unit import Unit
from appliance.up.watch import Watch

_SPARE_DESCRIPTORS = 1024
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ERRORS: dict[int, type[ApplianceError]] = {
    kind.exit_status: kind
    for kind in (errors.ConfigError, errors.TrustError, errors.MissError, ResourceError, errors.PeerError)
}


class Supervisor:
    """Runs units while it is entered; leaving it stops them all, those that need others first.

    `runtime` must be writable. Entering raises ResourceError while another supervisor has that directory. Keep the
    thread that runs it alive: the kernel kills the units with it. What `on_event` raises ends everything.
    """

    def __init__(
        self,
        units: Sequence[UnitDescription],
        printer: LinePrinter,
        *,
        runtime: Path,
        checkpoints: Sequence[Checkpoint] = (),
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._descriptions = {unit.name: unit for unit in units}
        self._printer = printer
        self._runtime = runtime
        self._checkpoints = {checkpoint.model: checkpoint for checkpoint in checkpoints}
        self._on_event = on_event
        self._units: dict[str, Unit] = {}
        self._renewals: dict[str, Renewal] = {}
        self._watches: dict[str, list[Watch]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._lock: Descriptor | None = None
        self._pulse = asyncio.Event()
        self._stopping = False
        self._asked_to_stop = 0
        self._bug: BaseException | None = None
        self._one_verification = asyncio.Lock()

    async def __aenter__(self) -> "Supervisor":
        """Claim the runtime directory, end what a killed supervisor left there, start every unit."""
        folder, self._lock = lock.claim(self._runtime)
        try:
            self._make_room()
            if not await asyncio.to_thread(kill_leftovers, f"{folder}/", timeout_s=KILL_TIMEOUT_S):
                raise HostError(f"{folder}: processes of an earlier supervisor are still there after SIGKILL")
            self._units = {name: self._unit(unit, folder) for name, unit in self._descriptions.items()}
            # First, so that nothing is replaced unseen between a keeper's look and ours.
            for model, checkpoint in self._checkpoints.items():
                self._watch(model, checkpoint, folder)
            for unit in self._units.values():
                await unit.start()
        except BaseException:
            await self._stop_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_all()

    async def run(self) -> int:
        """Supervise until SIGINT or SIGTERM, or until nothing runs and nothing will. Returns an exit status.

        0 if every unit ended well; else that of a unit that no restart can cure, or 1. A second signal kills. To be
        called in the main thread: signals arrive nowhere else.
        """
        loop = asyncio.get_running_loop()
        # What nohup or a shell's `&` has had ignored stays ignored.
        numbers = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self._ask_to_stop)
        try:
            async with self:
                while not self._asked_to_stop and not self._at_rest():
                    await self._pulse_once(None)
                # From here on everything is being stopped, whoever asked for it.
                self._asked_to_stop = max(self._asked_to_stop, 1)
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
        return self.exit_status

    @property
    def exit_status(self) -> int:
        """0 if the last run of every unit ended well, or goes on."""
        looks = self.statuses()
        for look in looks:
            if look.exit_status in errors.NOT_CURED_BY_RESTART and look.state is State.FAILED:
                return look.exit_status
        return 0 if all(look.result is Result.SUCCESS and look.state is not State.FAILED for look in looks) else 1

    def statuses(self) -> list[UnitStatus]:
        """Return how each unit is now, in the order they were given."""
        return [unit.status() for unit in self._units.values()]

    def status(self, name: str) -> UnitStatus:
        """Return how one unit is now. ResourceError, here and below, where there is none of that name."""
        return self._named(name).status()

    def renewals(self, model: str) -> tuple[int, int]:
        """Return how many replaced checkpoints of a model were taken, and how many were refused."""
        renewal = self._renewals.get(model)
        return (0, 0) if renewal is None else (renewal.renewed, renewal.refused)

    async def start(self, name: str) -> None:
        """Start a unit, and before it what it needs. It is not ready when this returns: see `wait_ready`."""
        self._refuse_while_stopping()
        for needed in self._named(name).description.needs:
            await self.start(needed)
        await self._named(name).start()

    async def stop(self, name: str) -> None:
        """Stop a unit, and before it what needs it. Its stored descriptors are closed: weights are freed."""
        unit = self._named(name)
        await asyncio.gather(*(self.stop(other) for other in self._needing(name)))
        await unit.stop()

    async def restart(self, name: str) -> None:
        """Restart a unit, its stored descriptors kept, whatever needs it left alone. See `wait_ready`.

        What it needs itself is started if it is not.
        """
        self._refuse_while_stopping()
        for needed in self._named(name).description.needs:
            await self.start(needed)
        await self._named(name).restart()

    async def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a unit's main process; with SIGKILL, return when the process is gone."""
        unit = self._named(name)
        pid = unit.status().pid
        if not unit.send(number):
            raise ResourceError(f"{name} has no process: it is {unit.state}")
        while number == signal.SIGKILL and unit.status().pid == pid:
            await self._pulse_once(None)

    async def wait_ready(self, name: str, timeout_s: float | None = None) -> UnitStatus:
        """Return once a unit is ready.

        ResourceError if that takes too long, or if it or what it needs is stopped; the error of its exit status once
        one of them has failed, unless a new checkpoint is about to start it again.
        """
        unit = self._named(name)
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while unit.state is not State.ACTIVE:
            self._raise_if_hopeless(unit)
            if deadline is not None and loop.time() >= deadline:
                look = unit.status()
                what = ": ".join(part for part in (look.state, look.text, look.said) if part)
                raise ResourceError(f"{name} is not ready after {timeout_s:g} s: {what}")
            await self._pulse_once(deadline)
        return unit.status()

    def _unit(self, description: UnitDescription, folder: Path) -> Unit:
        return Unit(
            description,
            directory=folder,
            awaited=lambda: self._awaited(description),
            on_event=self._hear,
            on_line=lambda line: self._printer.line(description.name, line),
            on_bug=self._fail,
        )

    def _watch(self, model: str, checkpoint: Checkpoint, folder: Path) -> None:
        renewal = Renewal(
            checkpoint,
            directory=folder,
            restart=self._restart_renewed,
            say=lambda text, serious: self._hear(Event(model, Kind.RENEWAL, text, serious=serious)),
            on_line=lambda line: self._printer.line(f"verify@{model}", line),
            on_bug=self._fail,
        )

        async def changed() -> bool:
            async with self._one_verification:  # two at once would read two checkpoints in turns from one disk
                verified = await renewal.renew()
            # All folders were verified, whichever had changed; and what was wrong may be in another.
            for watch in watches:
                watch.trust() if verified else watch.distrust()
            return verified

        self._renewals[model] = renewal
        self._watches[model] = watches = [Watch(directory, changed) for directory in checkpoint.directories]
        for watch in watches:
            task = asyncio.create_task(watch.run(), name=f"watch@{model}")
            task.add_done_callback(lambda task: None if task.cancelled() else self._fail(task.exception()))
            self._watching.append(task)

    async def _restart_renewed(self, name: str) -> None:
        unit = self._named(name)
        if not unit.wanted and unit.state is not State.FAILED:
            return  # somebody stopped it, and did not ask for it again
        await self.restart(name)
        if self._needing(name):
            await self.wait_ready(name)

    async def _stop_all(self) -> None:
        self._stopping = True
        for task in self._watching:
            task.cancel()
        ends = await asyncio.gather(*self._watching, return_exceptions=True)
        ends += await asyncio.gather(*(renewal.close() for renewal in self._renewals.values()), return_exceptions=True)
        # Each waits for those that need it, so engines end before the weights that they have mapped.
        ends += await asyncio.gather(*(self.stop(name) for name in self._units), return_exceptions=True)
        if self._lock is not None:
            self._lock.close()
        for end in ends:
            if isinstance(end, Exception):
                self._fail(end)
        if self._bug is not None:
            raise self._bug

    def _ask_to_stop(self) -> None:
        self._asked_to_stop += 1
        if self._asked_to_stop == 1:
            self._printer.line(OWN_NAME, "stopping; once more to kill")
        else:
            for unit in self._units.values():
                unit.kill()
        self._beat()

    def _at_rest(self) -> bool:
        """Tell whether a failure has left nothing running, and nothing that could start by itself."""
        if self._bug is not None:
            return True
        if not any(unit.state is State.FAILED for unit in self._units.values()):
            return False
        return not any(renewal.busy for renewal in self._renewals.values()) and all(
            map(self._is_stuck, self._units.values())
        )

    def _is_stuck(self, unit: Unit) -> bool:
        if not unit.wanted:
            return True
        if unit.state is not State.INACTIVE or (awaited := self._awaited(unit.description)) is None:
            return False
        return self._is_stuck(self._units[awaited])

    def _awaited(self, description: UnitDescription) -> str | None:
        return next((name for name in description.needs if self._units[name].state is not State.ACTIVE), None)

    def _raise_if_hopeless(self, unit: Unit) -> None:
        if unit.wanted and unit.state is State.INACTIVE and (awaited := self._awaited(unit.description)) is not None:
            self._raise_if_hopeless(self._units[awaited])
        elif not unit.wanted and not self._may_be_renewed(unit.name):
            look = unit.status()
            if look.state is not State.FAILED:
                raise ResourceError(f"{unit.name} is stopped")
            raise _ERRORS.get(look.exit_status or 0, HostError)(f"{unit.name} failed: {look.text}")

    def _may_be_renewed(self, name: str) -> bool:
        return any(
            renewal.busy and name in self._checkpoints[model].restart for model, renewal in self._renewals.items()
        )

    def _needing(self, name: str) -> list[str]:
        return [unit.name for unit in self._descriptions.values() if name in unit.needs]

    def _named(self, name: str) -> Unit:
        if name not in self._units:
            raise ResourceError(f"no unit {name!r} here", hint=f"there are: {', '.join(self._units) or 'none'}")
        return self._units[name]

    def _refuse_while_stopping(self) -> None:
        if self._stopping:
            raise ResourceError("everything is being stopped")

    def _hear(self, event: Event) -> None:
        if event.kind is Kind.STATE:
            for unit in self._units.values():
                if event.unit in unit.description.needs:
                    unit.nudge()
            model = event.unit.partition("@")[2]
            if event.state is State.FAILED and model in self._watches:
                # It may be cured by a file that somebody puts right, under the same signature.
                for watch in self._watches[model]:
                    watch.distrust()
        if event.kind is not Kind.STORE or event.serious:
            words = (event.unit, event.state, event.text)
            self._printer.line(OWN_NAME, ": ".join(word for word in words if word), serious=event.serious)
        try:
            self._on_event(event)
        except Exception as bug:  # the caller's, and it must not pass for a unit's
            self._fail(bug)
        self._beat()

    def _fail(self, bug: BaseException | None) -> None:
        """Note an error that nobody foresaw: everything is stopped, and it is raised where `run` or `with` ends."""
        self._bug = self._bug or bug
        self._beat()

    def _beat(self) -> None:
        self._pulse, pulse = asyncio.Event(), self._pulse
        pulse.set()

    async def _pulse_once(self, deadline: float | None) -> None:
        """Return when anything has changed, or at the deadline."""
        pulse = self._pulse
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await pulse.wait()

    def _make_room(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _SPARE_DESCRIPTORS + sum(unit.store_limit for unit in self._descriptions.values())
        if soft != resource.RLIM_INFINITY and soft < wanted:
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
