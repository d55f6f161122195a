"""The contract of a placement policy.

Called by `mooncake_lite.control` when a request arrives and whenever capacity frees. A policy reads the
state and changes nothing. Explained in docs/explain/paper.md, "Scheduling".
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from scheduler.requests import Placement, Rejection, Request, Terms, Wait
from scheduler.state import State


class Candidate(msgspec.Struct, frozen=True):
    """One prefill instance that a policy could choose, and its terms."""

    prefill: int
    terms: Terms


class Policy(Protocol):
    """Chooses the instances of a request.

    The choice is a function of (state, request, now) alone, and its terms can be recomputed from the state:
    while the state is unchanged, the first row of `explain` is the choice of `choose`.
    """

    name: str

    def choose(self, state: State, request: Request, now: float) -> Placement | Wait | Rejection:
        """Choose a place. `Wait`: there is none now. `Rejection`: there will be none."""

    def explain(self, state: State, request: Request) -> list[Candidate]:
        """Recompute the terms of all candidates, best first. Slow and plain, for people and tests."""
