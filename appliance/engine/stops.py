"""Finds stop strings in text that arrives in pieces, and never lets a piece of one out."""

from collections.abc import Sequence


class StopScanner:
    """Holds back just as much text as could still turn out to be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that is safe to show now. Once a stop string was found, nothing more ever is."""
        if self.found:
            return ""
        self._held += text
        ends = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            shown, self._held = self._held[: min(ends)], ""
            return shown
        keep = self._possible_start()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """Return what was held back: the answer ended, so it is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Return the length of the longest end of the held text that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
