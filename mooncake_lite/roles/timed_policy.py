"""A placement policy with a stopwatch. The control plane itself reads no clock."""

from __future__ import annotations

import time

from scheduler import Placement, Policy, Rejection, Request, State, Wait
from scheduler.placement import Candidate


class TimedPolicy:
    """Forwards every question to a policy, and keeps the time that each answer took.

    taken_s   of each decision since the list was cleared
    """

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.taken_s: list[float] = []
        self._policy = policy

    def choose(self, state: State, request: Request, now: float) -> Placement | Wait | Rejection:
        """Forward the question, and measure the answer."""
        began = time.perf_counter()
        decision = self._policy.choose(state, request, now)
        self.taken_s.append(time.perf_counter() - began)
        return decision

    def explain(self, state: State, request: Request) -> list[Candidate]:
        """Forward the question."""
        return self._policy.explain(state, request)
