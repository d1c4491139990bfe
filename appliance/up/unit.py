"""One supervised unit: started, restarted and stopped as systemd would with Type=notify and Restart=always."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from appliance.descriptors import Descriptor
from appliance.errors import NOT_CURED_BY_RESTART
from appliance.up.backoff import Backoff
from appliance.up.description import Event, Kind, Result, State, UnitDescription, UnitStatus
from appliance.up.environment import unit_environment
from appliance.up.fdstore import DescriptorStore
from appliance.up.invocation import Invocation, woken
from appliance.up.message import Message
from appliance.up.notify_socket import NotifySocket

# More than the kernel queues for one socket.
_LAST_MESSAGES = 1024


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
        self._notify_path = directory / f"{description.name}.notify"
        self._mark = f"{directory}/{description.name}"
        self._awaited = awaited
        self._on_event = on_event
        self._on_line = on_line
        self._on_bug = on_bug
        self._store = DescriptorStore(
            limit=description.store_limit, say=lambda text: self._say(Kind.STORE, text, serious=True)
        )
        self._backoff = Backoff(
            first_s=description.first_restart_s,
            slowest_s=description.slowest_restart_s,
            ran_well_s=description.ran_well_s,
        )
        self._changing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._stop_wanted = self._restarting = False
        self._socket: NotifySocket | None = None
        self._invocation: Invocation | None = None  # the one that runs, or else the last
        self._text = ""
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
        last = self._invocation
        return UnitStatus(
            name=self.name,
            state=self.state,
            result=Result.SUCCESS if last is None else last.result,
            pid=None if last is None else last.pid,
            text=self._text,
            said="" if last is None else last.said,
            starts=self._starts,
            exit_status=None if last is None else last.exit_status,
            stored=len(self._store),
        )

    async def start(self) -> None:
        """Start it unless it is started already; it is not ready when this returns."""
        async with self._changing:
            self._start()

    async def stop(self) -> None:
        """Return when all its processes are gone, and with them what is in its store."""
        async with self._changing:
            try:
                await self._stop()
            finally:
                if self._life is None:
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
        return self._invocation is not None and self._invocation.send(number)

    def kill(self) -> None:
        """Stop it without asking: SIGKILL to all of its group. `stop` still has to be called."""
        self._want_stop()
        if self._invocation is not None:
            self._invocation.kill()

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
        try:
            if self._life is not None:
                self._want_stop()
                # A caller that gives up waiting must not end the task that has a process to look after.
                await asyncio.shield(self._life)
        finally:
            if self._life is None or self._life.done():
                self._life = None
                self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _want_stop(self) -> None:
        self._stop_wanted = True
        self._wake.set()
        if self._invocation is not None:
            self._invocation.stop()

    async def _live(self) -> None:
        while not self._stop_wanted:
            if not self._enter_or_wait():
                await woken(self._wake, None)
                continue
            invocation = await self._invoke()
            self._conclude(invocation)
            if self._stop_wanted or self.state is State.FAILED:
                return
            delay_s = self._backoff.delay_s(invocation.served_s)
            self._enter(State.AUTO_RESTART, f"{invocation.ending()}; next start in {delay_s:g} s", serious=True)
            await self._rest(delay_s)

    def _enter_or_wait(self) -> bool:
        if (awaited := self._awaited()) is not None:
            self._enter(State.INACTIVE, f"waits for {awaited}")
            return False
        self._enter(State.ACTIVATING, "")
        return True

    async def _invoke(self) -> Invocation:
        self._starts += 1
        invocation = self._invocation = Invocation(
            self.description,
            enter=lambda state, text, serious: self._enter(state, text, serious=serious),
            tell=lambda text: self._say(Kind.STATUS, text),
            on_line=self._on_line,
        )
        await invocation.run(
            environment=unit_environment(self.description, os.environ, notify_path=self._notify_path, mark=self._mark),
            mark=self._mark,
            descriptors=self._store.kept(),
            listen=self._listen,
        )
        return invocation

    def _conclude(self, invocation: Invocation) -> None:
        badly_stopped = self._stop_wanted and invocation.result is not Result.SUCCESS
        if not invocation.all_gone:
            self._fail("processes are still there after SIGKILL")
        elif badly_stopped or invocation.exit_status in NOT_CURED_BY_RESTART:
            self._fail(invocation.ending())
        elif self._stop_wanted and not self._restarting:
            self._enter(State.INACTIVE, "")

    def _fail(self, text: str) -> None:
        if not self._restarting:
            self._store.clear()
        self._enter(State.FAILED, text, serious=True)

    async def _rest(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + delay_s
        while not self._stop_wanted and loop.time() < end:
            await woken(self._wake, end)

    def _listen(self) -> None:
        if self._socket is not None:
            self._socket.receive(_LAST_MESSAGES)

    def _belongs(self, pid: int) -> bool:
        return self._invocation is not None and self._invocation.may_speak(pid)

    def _hear(self, message: Message, descriptors: list[Descriptor]) -> None:
        for ignored in message.ignored:
            self._say(Kind.REFUSED, f"ignored {ignored}", serious=True)
        if message.store:
            added = self._store.add(descriptors, name=message.name, poll=message.poll)
            self._say(Kind.STORE, f"{added} descriptors stored as {message.name!r}")
        elif message.remove and message.name is not None:
            self._say(Kind.STORE, f"{self._store.remove(message.name)} descriptors named {message.name!r} removed")
        elif message.remove:
            self._say(Kind.REFUSED, "ignored FDSTOREREMOVE=1 without a valid FDNAME=", serious=True)
        if self._invocation is not None:
            self._invocation.hear(message)

    def _refuse(self, why: str) -> None:
        self._say(Kind.REFUSED, f"dropped {why}", serious=True)

    def _say(self, kind: Kind, text: str, *, serious: bool = False) -> None:
        self._on_event(Event(self.name, kind, text, serious=serious))

    def _enter(self, state: State, text: str, *, serious: bool = False) -> None:
        if (state, text) == (self.state, self._text):
            return
        self.state, self._text = state, text
        self._on_event(Event(self.name, Kind.STATE, text, state=state, serious=serious))
