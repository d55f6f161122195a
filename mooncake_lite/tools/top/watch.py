"""What a watch knows of its server: the last samples, and since when it has not answered.

Used by `command.py`. Pure: times are given.
"""

from __future__ import annotations

from collections import deque

from mooncake_lite.tools.top.figures import Figures, figures_of
from mooncake_lite.tools.top.sample import Sample
from mooncake_lite.tools.top.screen import Watching

WINDOW_S = 5.0
"""Rates and medians are of this time at least. A prefill is counted when it ends, so that over one second
the figures would jump."""


class Watch:
    """One server.

    _samples   the last one, and those before it, back to the first that is WINDOW_S old
    """

    def __init__(self, address: str, hint: str, first: Sample) -> None:
        self._address, self._hint = address, hint
        self._samples = deque([first])
        self._problem = ""

    def take(self, sample: Sample) -> None:
        """Note an answer."""
        self._problem = ""
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= sample.at_s - WINDOW_S:
            self._samples.popleft()

    def fail(self, problem: str) -> None:
        """Note that the server did not answer."""
        self._problem = problem

    def figures(self) -> Figures:
        """Return the figures of the last answers."""
        return figures_of(self._samples[0], self._samples[-1])

    def state(self, now: float) -> Watching:
        """Return what the picture says of the watch."""
        silent_s = max(now - self._samples[-1].at_s, 0.001) if self._problem else 0.0
        return Watching(self._address, silent_s, self._problem, self._hint)
