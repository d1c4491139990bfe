"""One supervised unit: started, watched, restarted and stopped as systemd would with Type=notify, Restart=always."""

import asyncio
import os
import signal
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

from appliance.descriptors import Descriptor
from appliance.errors import NOT_CURED_BY_RESTART
from appliance.run import ending
from appliance.up.backoff import Backoff
from appliance.up.deadlines import Deadlines
from appliance.up.description import Event, Kind, Result, State, UnitDescription, UnitStatus
from appliance.up.environment import unit_environment
from appliance.up.fdstore import DescriptorStore
from appliance.up.group import in_group
from appliance.up.message import Message
from appliance.up.notify_socket import NotifySocket
from appliance.up.process import STDERR, Process

# A process that does not go even after SIGKILL hangs in the kernel: no use to wait for it for long.
KILL_TIMEOUT_S = 10.0

# More than the kernel queues for one socket.
_LAST_MESSAGES = 1024
_CLEAN_SIGNALS = frozenset({-signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM, -signal.SIGPIPE})


class _Phase(Enum):
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    KILLING = auto()


class Unit:
    """Runs one description. Its descriptor store lives from `start` to `stop`, through every restart.

    `awaited` names a unit that has to become ready first, or returns None; call `nudge` when that may have changed.
    """

    def __init__(
        self,
        description: UnitDescription,
        *,
        directory: Path,
        awaited: Callable[[], str | None],
        on_event: Callable[[Event], None],
        on_line: Callable[[str], None],
        on_bug: Callable[[BaseException | None], None],
    ) -> None:
        self.description = description
        self.state = State.INACTIVE
        self._directory = directory
        self._awaited = awaited
        self._on_event = on_event
        self._on_line = on_line
        self._on_bug = on_bug
        self._store = DescriptorStore(limit=description.store_limit, say=self._say_store)
        self._backoff = Backoff(
            first_s=description.first_restart_s,
            slowest_s=description.slowest_restart_s,
            ran_well_s=description.ran_well_s,
        )
        self._changing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._stop_wanted = False
        self._restarting = False
        self._socket: NotifySocket | None = None
        self._process: Process | None = None
        self._phase = _Phase.STARTING
        self._deadlines = Deadlines(self._now, watchdog_s=description.watchdog_s)
        self._ready_at: float | None = None
        self._result = Result.SUCCESS
        self._exit_status: int | None = None
        self._text = self._said_text = self._said_line = ""
        self._starts = 0

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def wanted(self) -> bool:
        """True from `start` until `stop`, or until it failed for good."""
        return self._life is not None and not self._life.done()

    def status(self) -> UnitStatus:
        """Return how the unit is now."""
        return UnitStatus(
            name=self.name,
            state=self.state,
            result=self._result,
            pid=None if self._process is None else self._process.pid,
            text=self._text,
            said=self._said_line or self._said_text,
            starts=self._starts,
            exit_status=self._exit_status,
            stored=len(self._store),
        )

    async def start(self) -> None:
        """Start it unless it is started already; it is not ready when this returns."""
        async with self._changing:
            self._start()

    async def stop(self) -> None:
        """Return when all its processes are gone, and with them what is in its store."""
        async with self._changing:
            await self._stop()
            self._store.clear()
            if self.state is not State.FAILED:
                self._enter(State.INACTIVE, "")

    async def restart(self) -> None:
        """Stop it, keeping its store, and start it again; it is not ready when this returns."""
        async with self._changing:
            self._restarting = True
            await self._stop()
            self._start()

    def send(self, number: int) -> bool:
        """Send a signal to the main process; False if there is none."""
        if self._process is None:
            return False
        self._process.send(number)
        return True

    def kill(self) -> None:
        """Stop it without asking: SIGKILL to all of its group. `stop` still has to be called."""
        self._stop_wanted = True
        self._wake.set()
        if self._process is not None:
            self._process.kill_group()

    def nudge(self) -> None:
        """Look again at what it waits for."""
        self._wake.set()

    def _start(self) -> None:
        if self.wanted:
            return
        self._backoff.reset()
        self._stop_wanted = self._restarting = False
        if self._socket is None:
            self._socket = NotifySocket(self._notify_path, belongs=self._belongs, take=self._hear, refuse=self._refuse)
        self._enter_or_wait()
        self._life = asyncio.create_task(self._live(), name=self.name)
        self._life.add_done_callback(lambda life: None if life.cancelled() else self._on_bug(life.exception()))

    async def _stop(self) -> None:
        if (life := self._life) is not None:
            self._stop_wanted = True
            self._wake.set()
            # A caller that gives up waiting must not end the task that has a process to look after.
            await asyncio.shield(life)
            self._life = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _live(self) -> None:
        while not self._stop_wanted:
            if not self._enter_or_wait():
                await self._woken(None)
                continue
            ran_s = await self._run()
            if self._stop_wanted or self.state is State.FAILED:
                return
            delay_s = self._backoff.delay_s(ran_s)
            self._enter(State.AUTO_RESTART, f"{self._ending()}; next start in {delay_s:g} s", serious=True)
            await self._rest(delay_s)

    def _enter_or_wait(self) -> bool:
        if (awaited := self._awaited()) is not None:
            self._enter(State.INACTIVE, f"waits for {awaited}")
            return False
        self._enter(State.ACTIVATING, "")
        return True

    async def _rest(self, delay_s: float) -> None:
        end = self._now() + delay_s
        while not self._stop_wanted and self._now() < end:
            await self._woken(end)

    async def _run(self) -> float:
        """Run it once, to the end of its last process; return for how long it was ready."""
        self._begin()
        try:
            self._process = Process(
                self.description.argv,
                environment=unit_environment(
                    self.description, os.environ, notify_path=self._notify_path, mark=self._mark
                ),
                mark=self._mark,
                on_line=self._hear_line,
                on_exit=self._wake.set,
                descriptors=self._store.kept(),
                cpus=self.description.cpus,
            )
        except OSError as error:
            self._result = Result.RESOURCES
            self._said_line = f"cannot be started: {error.strerror}"
            return 0.0
        process = self._process
        try:
            while not process.exited and not self._given_up():
                await self._woken(self._deadlines.next)
                self._listen()  # also for what it sent with its last breath, descriptors included
                self._step(process)
        except BaseException:
            process.kill_group()
            raise
        self._exit_status, all_gone = await process.end(timeout_s=KILL_TIMEOUT_S)
        self._process = None
        ran_s = 0.0 if self._ready_at is None else self._now() - self._ready_at
        self._conclude(all_gone=all_gone)
        return ran_s

    def _begin(self) -> None:
        self._starts += 1
        self._result, self._exit_status, self._ready_at = Result.SUCCESS, None, None
        self._said_text = self._said_line = ""
        self._phase = _Phase.STARTING
        self._deadlines = Deadlines(self._now, watchdog_s=self.description.watchdog_s)
        self._deadlines.allow(self.description.start_timeout_s)

    def _step(self, process: Process) -> None:
        """Act on what is wanted and on what is overdue. Messages have been heard, so nothing is late by our fault."""
        overdue = self._deadlines.overdue
        if self._phase in (_Phase.STARTING, _Phase.RUNNING):
            if self._stop_wanted:
                self._end(process, Result.SUCCESS, signal.SIGTERM)
            elif overdue:
                self._end(process, Result.TIMEOUT, signal.SIGTERM)
            elif self._deadlines.starved:
                self._end(process, Result.WATCHDOG, signal.SIGABRT)
        elif self._phase is _Phase.STOPPING and overdue:
            self._result = Result.TIMEOUT if self._result is Result.SUCCESS else self._result
            self._phase = _Phase.KILLING
            self._deadlines.allow(KILL_TIMEOUT_S)
            process.kill_group()

    def _end(self, process: Process, result: Result, number: signal.Signals) -> None:
        self._result = result
        self._await_end()
        why = {Result.TIMEOUT: "was not ready in time", Result.WATCHDOG: "its watchdog was not fed in time"}
        self._enter(State.DEACTIVATING, why.get(result, ""), serious=result in why)
        process.send(number)

    def _await_end(self) -> None:
        self._phase = _Phase.STOPPING
        self._deadlines.allow(self.description.stop_timeout_s)
        self._deadlines.leave_unwatched()

    def _given_up(self) -> bool:
        return self._phase is _Phase.KILLING and self._deadlines.overdue

    def _conclude(self, *, all_gone: bool) -> None:
        status = self._exit_status
        if self._result is Result.SUCCESS and status != 0:
            # Signals that ask a process to end are no failure, and neither is one that somebody sent on purpose.
            if status is None or status > 0:
                self._result = Result.EXIT_CODE
            elif status not in _CLEAN_SIGNALS:
                self._result = Result.SIGNAL
        elif self._result is Result.SUCCESS and self._ready_at is None and not self._stop_wanted:
            self._result = Result.PROTOCOL
        if not all_gone:
            self._result = Result.TIMEOUT
            self._fail("processes are still there after SIGKILL")
        elif status in NOT_CURED_BY_RESTART or (self._stop_wanted and self._result is not Result.SUCCESS):
            self._fail(self._ending())
        elif self._stop_wanted and not self._restarting:
            self._enter(State.INACTIVE, "")

    def _fail(self, text: str) -> None:
        if not self._restarting:
            self._store.clear()
        self._enter(State.FAILED, text, serious=True)

    def _ending(self) -> str:
        words = {
            Result.TIMEOUT: "took too long",
            Result.WATCHDOG: "stopped feeding its watchdog",
            Result.PROTOCOL: "ended before it was ready",
            Result.RESOURCES: "",
        }
        how = words.get(self._result, "ended" if self._exit_status is None else ending(self._exit_status))
        if self._exit_status in NOT_CURED_BY_RESTART:
            how += ", which no restart can cure"
        # Whoever was sent a signal said nothing about that; whoever crashed may have.
        quiet = self._result is Result.SUCCESS or self._exit_status == -signal.SIGKILL
        said = "" if quiet else self._said_line or self._said_text
        return ": ".join(part for part in (how, said) if part)

    def _listen(self) -> None:
        if self._socket is not None:
            self._socket.receive(_LAST_MESSAGES)

    def _belongs(self, pid: int) -> bool:
        if self._process is None or pid <= 0:
            return False
        main_pid = self._process.pid
        return pid == main_pid or (self.description.notify_access == "all" and in_group(pid, main_pid))

    def _hear(self, message: Message, descriptors: list[Descriptor]) -> None:
        for ignored in message.ignored:
            self._say(Kind.REFUSED, f"ignored {ignored}", serious=True)
        turns = (message.ready and self._phase is _Phase.STARTING) or (
            message.stopping and self._phase is _Phase.RUNNING
        )
        if message.status is not None and message.status != self._said_text:
            self._said_text = message.status
            if not turns:  # or the new state says it
                self._say(Kind.STATUS, message.status)
        self._hear_of_descriptors(message, descriptors)
        self._hear_of_time(message)
        if turns and message.ready:
            self._phase, self._ready_at = _Phase.RUNNING, self._now()
            self._deadlines.allow(None)
            self._deadlines.feed()
            self._enter(State.ACTIVE, message.status or "")
        elif turns:
            # It ends by itself; what is overdue then is killed without being asked first.
            self._await_end()
            self._enter(State.DEACTIVATING, message.status or "")
        self._wake.set()

    def _hear_of_descriptors(self, message: Message, descriptors: list[Descriptor]) -> None:
        if message.store:
            added = self._store.add(descriptors, name=message.name, poll=message.poll)
            self._say(Kind.STORE, f"{added} descriptors stored as {message.name!r}")
        elif message.remove and message.name is not None:
            self._say(Kind.STORE, f"{self._store.remove(message.name)} descriptors named {message.name!r} removed")
        elif message.remove:
            self._say(Kind.REFUSED, "ignored FDSTOREREMOVE=1 without a valid FDNAME=", serious=True)

    def _hear_of_time(self, message: Message) -> None:
        if message.extend_timeout_s is not None:
            self._deadlines.extend(message.extend_timeout_s)
        if message.watchdog_s is not None:
            self._deadlines.change_watchdog(message.watchdog_s)
        if self._phase is not _Phase.RUNNING:
            return
        if message.watchdog_trigger:
            self._deadlines.starve()
        elif message.watchdog or message.watchdog_s is not None:
            self._deadlines.feed()

    def _refuse(self, why: str) -> None:
        self._say(Kind.REFUSED, f"dropped {why}", serious=True)

    def _hear_line(self, stream: str, line: str) -> None:
        if stream == STDERR and line.strip():
            self._said_line = line.strip()
        self._on_line(line)

    def _say_store(self, text: str) -> None:
        self._say(Kind.STORE, text, serious=True)

    def _say(self, kind: Kind, text: str, *, serious: bool = False) -> None:
        self._on_event(Event(self.name, kind, text, serious=serious))

    def _enter(self, state: State, text: str, *, serious: bool = False) -> None:
        if (state, text) == (self.state, self._text):
            return
        self.state, self._text = state, text
        self._on_event(Event(self.name, Kind.STATE, text, state=state, serious=serious))

    @property
    def _notify_path(self) -> Path:
        return self._directory / f"{self.name}.notify"

    @property
    def _mark(self) -> str:
        return f"{self._directory}/{self.name}"

    async def _woken(self, deadline: float | None) -> None:
        """Return when something happened, or at the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
