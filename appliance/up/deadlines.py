"""By when a process has to be ready, to have ended, or to have fed its watchdog."""

from collections.abc import Callable


class Deadlines:
    """Those of one run. There is no deadline before the first `allow`, and no watchdog before the first `feed`."""

    def __init__(self, clock: Callable[[], float], *, watchdog_s: float | None) -> None:
        self._clock = clock
        self._watchdog_s = watchdog_s
        self._end: float | None = None
        self._bite: float | None = None

    @property
    def overdue(self) -> bool:
        """True once what it was allowed time for has taken longer."""
        return self._end is not None and self._clock() >= self._end

    @property
    def starved(self) -> bool:
        """True once the watchdog was not fed in time."""
        return self._bite is not None and self._clock() >= self._bite

    @property
    def next(self) -> float | None:
        """The clock's time at which one of them may become true by itself."""
        return min((at for at in (self._end, self._bite) if at is not None), default=None)

    def allow(self, seconds: float | None) -> None:
        """Allow this much time from now for what comes next; None for any."""
        self._end = None if seconds is None else self._clock() + seconds

    def extend(self, seconds: float) -> None:
        """Allow at least this much from now. Nothing that was allowed already is taken away."""
        if self._end is not None:
            self._end = max(self._end, self._clock() + seconds)

    def feed(self) -> None:
        self._bite = None if self._watchdog_s is None else self._clock() + self._watchdog_s

    def starve(self) -> None:
        """Do as if the watchdog had waited too long: the process asks for it."""
        self._bite = self._clock()

    def leave_unwatched(self) -> None:
        """Feed it no more, and let it bite nobody."""
        self._bite = None

    def change_watchdog(self, seconds: float) -> None:
        """Have it fed in other intervals from the next time on; 0 for never."""
        self._watchdog_s = seconds or None
