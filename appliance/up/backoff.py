"""How long to wait before the next start: twice as long after each short run."""


class Backoff:
    """Delays from `first_s` up to `slowest_s`; a run of at least `ran_well_s` starts over."""

    def __init__(self, *, first_s: float, slowest_s: float, ran_well_s: float) -> None:
        self._first_s = first_s
        self._slowest_s = slowest_s
        self._ran_well_s = ran_well_s
        self._next_s = first_s

    def delay_s(self, ran_s: float) -> float:
        """Return the delay after a run that served for this long (0 for one that never became ready)."""
        if ran_s >= self._ran_well_s:
            self.reset()
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._slowest_s)
        return delay_s

    def reset(self) -> None:
        """Forget what went wrong so far: somebody asked for a start."""
        self._next_s = self._first_s
