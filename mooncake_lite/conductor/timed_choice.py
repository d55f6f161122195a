"""A stopwatch around the choice of a place. The control plane itself reads no clock."""

from __future__ import annotations

import time

from mooncake_lite.control.dispatch import Choose
from scheduler import Placement, Rejection, Request, State, Wait


class TimedChoice:
    """Forwards every question, and keeps the time that each answer took.

    taken_s   of each decision since `seconds` was called
    """

    def __init__(self, choose: Choose) -> None:
        self.taken_s: list[float] = []
        self._choose = choose

    def __call__(self, state: State, request: Request, now: float) -> Placement | Wait | Rejection:
        """Forward the question, and measure the answer."""
        began = time.perf_counter()
        decision = self._choose(state, request, now)
        self.taken_s.append(time.perf_counter() - began)
        return decision

    def seconds(self) -> float:
        """Return how long the decisions took that led to a place, and begin anew."""
        seconds = sum(self.taken_s)
        self.taken_s.clear()
        return seconds
