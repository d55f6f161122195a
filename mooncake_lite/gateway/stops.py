"""Stop strings, found in a text that arrives in pieces.

Used by `answer` for each request. Pure: knows no tokens, no cluster. The same stop is found however
the text is cut into pieces: the match that *ends* first wins, and of those the longest.
"""

from __future__ import annotations


class StopFinder:
    """Passes text on until a stop string is complete; holds back what may still become one.

        held       the longest end of the text so far that is the beginning of a stop string

    Invariant: held is shorter than the longest stop string, and empty once a stop was found.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown now. After a stop was found: nothing, for ever."""
        if self.found or not self._stops:
            return "" if self.found else text
        seen = self._held + text
        match = self._first_match(seen)
        if match is not None:
            self.found, self._held = True, ""
            return seen[:match]
        keep = self._beginning_at_end(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def flush(self) -> str:
        """Return the held-back text, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, seen: str) -> int | None:
        """Return the start of the match that ends first, the longest of those; None without one."""
        spots = [(seen.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at) for at, stop in spots if at >= 0]
        return min(ends)[1] if ends else None

    def _beginning_at_end(self, seen: str) -> int:
        """Length of the longest end of `seen` that is the beginning of a stop string."""
        longest = min(len(seen), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = seen[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
