"""One run of a unit's program: from its start to the end of the last process that it started."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from appliance.errors import NOT_CURED_BY_RESTART
from appliance.run import ending
from appliance.up.deadlines import Deadlines
from appliance.up.description import Result, State, UnitDescription
from appliance.up.group import in_group
from appliance.up.message import Message
from appliance.up.process import STDERR, Process

# A process that does not go even after SIGKILL hangs in the kernel: no use to wait for it for long.
KILL_TIMEOUT_S = 10.0

_CLEAN_SIGNALS = frozenset({-signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM, -signal.SIGPIPE})


class _Phase(Enum):
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    KILLING = auto()


class Invocation:
    """Runs once. Meanwhile `enter` is told of each new state, with a text and whether it is bad news.

    `tell` gets the status lines that come between, `on_line` what the program writes.
    """

    def __init__(
        self,
        description: UnitDescription,
        *,
        enter: Callable[[State, str, bool], None],
        tell: Callable[[str], None],
        on_line: Callable[[str], None],
    ) -> None:
        self._description = description
        self._enter = enter
        self._tell = tell
        self._on_line = on_line
        self._process: Process | None = None
        self._phase = _Phase.STARTING
        self._deadlines = Deadlines(_now, watchdog_s=description.watchdog_s)
        self._wake = asyncio.Event()
        self._stop_wanted = False
        self._ready_at: float | None = None
        self._status = self._last_line = ""
        self.result = Result.SUCCESS
        self.exit_status: int | None = None
        self.served_s = 0.0
        self.all_gone = True

    @property
    def pid(self) -> int | None:
        """The main process, as long as there is one."""
        return None if self._process is None else self._process.pid

    @property
    def said(self) -> str:
        """The last line of its standard error; its last status where it wrote none."""
        return self._last_line or self._status

    async def run(
        self,
        *,
        environment: Mapping[str, str],
        mark: str,
        descriptors: Sequence[tuple[str, int]],
        listen: Callable[[], None],
    ) -> None:
        """Return when it and all that it started have ended. `listen` has `hear` called for what has arrived."""
        try:
            process = self._process = Process(
                self._description.argv,
                environment=environment,
                mark=mark,
                on_line=self._hear_line,
                on_exit=self._wake.set,
                descriptors=descriptors,
                cpus=self._description.cpus,
            )
        except OSError as error:
            self.result = Result.RESOURCES
            self._last_line = f"cannot be started: {error.strerror}"
            return
        self._deadlines.allow(self._description.start_timeout_s)
        try:
            while not process.exited and not self._is_given_up():
                await woken(self._wake, self._deadlines.next)
                listen()  # also for what it sent with its last breath, descriptors included
                self._step(process)
        finally:
            # Also after a bug of ours: nothing may be left that nobody looks after.
            self.exit_status, self.all_gone = await process.end(timeout_s=KILL_TIMEOUT_S)
            self._process = None
        self._conclude()

    def hear(self, message: Message) -> None:
        """Take in what it says of itself."""
        starts = message.ready and self._phase is _Phase.STARTING
        stops = message.stopping and self._phase is _Phase.RUNNING
        if message.status is not None and message.status != self._status:
            self._status = message.status
            if not starts and not stops:  # or the new state says it
                self._tell(message.status)
        self._hear_of_time(message)
        if starts:
            self._phase, self._ready_at = _Phase.RUNNING, _now()
            self._deadlines.allow(None)
            self._deadlines.feed()
            self._enter(State.ACTIVE, message.status or "", False)
        elif stops:
            # It ends by itself; what is overdue then is killed without being asked first.
            self._await_end()
            self._enter(State.DEACTIVATING, message.status or "", False)
        self._wake.set()

    def may_speak(self, pid: int) -> bool:
        """Tell whether messages from this process are the unit's."""
        if self._process is None or pid <= 0:
            return False
        main_pid = self._process.pid
        return pid == main_pid or (self._description.notify_access == "all" and in_group(pid, main_pid))

    def stop(self) -> None:
        """Have it end: SIGTERM to its main process, and SIGKILL to its group when that takes too long."""
        self._stop_wanted = True
        self._wake.set()

    def send(self, number: int) -> bool:
        """Send a signal to the main process; False if there is none."""
        if self._process is None:
            return False
        self._process.send(number)
        return True

    def kill(self) -> None:
        """SIGKILL its group at once."""
        self.stop()
        if self._process is not None:
            self._process.kill_group()

    def ending(self) -> str:
        """Return how it ended, in words, and the last that it said."""
        words = {
            Result.TIMEOUT: "took too long",
            Result.WATCHDOG: "stopped feeding its watchdog",
            Result.PROTOCOL: "ended before it was ready",
            Result.RESOURCES: "",
        }
        how = words.get(self.result, "ended" if self.exit_status is None else ending(self.exit_status))
        if self.exit_status in NOT_CURED_BY_RESTART:
            how += ", which no restart can cure"
        # Whoever was sent a signal said nothing about that; whoever crashed may have.
        quiet = self.result is Result.SUCCESS or self.exit_status == -signal.SIGKILL
        return ": ".join(part for part in (how, "" if quiet else self.said) if part)

    def _step(self, process: Process) -> None:
        """Act on what is wanted and on what is overdue. Messages have been heard, so nothing is late by our fault."""
        if self._phase in (_Phase.STARTING, _Phase.RUNNING):
            if self._stop_wanted:
                self._end(process, Result.SUCCESS, signal.SIGTERM)
            elif self._deadlines.overdue:
                self._end(process, Result.TIMEOUT, signal.SIGTERM)
            elif self._deadlines.starved:
                self._end(process, Result.WATCHDOG, signal.SIGABRT)
        elif self._phase is _Phase.STOPPING and self._deadlines.overdue:
            self.result = Result.TIMEOUT if self.result is Result.SUCCESS else self.result
            self._phase = _Phase.KILLING
            self._deadlines.allow(KILL_TIMEOUT_S)
            process.kill_group()

    def _end(self, process: Process, result: Result, number: signal.Signals) -> None:
        self.result = result
        self._await_end()
        why = {Result.TIMEOUT: "was not ready in time", Result.WATCHDOG: "its watchdog was not fed in time"}
        self._enter(State.DEACTIVATING, why.get(result, ""), result in why)
        process.send(number)
        process.send(signal.SIGCONT)  # one that somebody suspended would not notice

    def _await_end(self) -> None:
        self._phase = _Phase.STOPPING
        self._deadlines.allow(self._description.stop_timeout_s)
        self._deadlines.leave_unwatched()

    def _is_given_up(self) -> bool:
        return self._phase is _Phase.KILLING and self._deadlines.overdue

    def _conclude(self) -> None:
        status = self.exit_status
        self.served_s = 0.0 if self._ready_at is None else _now() - self._ready_at
        if not self.all_gone:
            self.result = Result.TIMEOUT
        elif self.result is not Result.SUCCESS:
            return
        elif status is None or status > 0:
            self.result = Result.EXIT_CODE
        elif status < 0:
            # A signal that asks a process to end is no failure of the process.
            self.result = Result.SUCCESS if status in _CLEAN_SIGNALS else Result.SIGNAL
        elif self._ready_at is None and not self._stop_wanted:
            self.result = Result.PROTOCOL

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

    def _hear_line(self, stream: str, line: str) -> None:
        if stream == STDERR and line.strip():
            self._last_line = line.strip()
        self._on_line(line)


async def woken(event: asyncio.Event, deadline: float | None) -> None:
    """Return when the event is set, and clear it, or at the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        return
    event.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()
