"""Least loaded: the prefill instance that could begin first. "Load-balancing" in the paper."""

from __future__ import annotations

from scheduler.placement.contract import Ranked
from scheduler.placement.view import NEVER, ZERO, View


class LeastLoaded:
    """Minimises the predicted wait. Reuses what the chosen instance happens to have."""

    name = "least-loaded"

    def rank(self, view: View) -> Ranked:
        """Score: seconds of the queue."""
        return Ranked(view.queue_s, view.near, ZERO, NEVER)
