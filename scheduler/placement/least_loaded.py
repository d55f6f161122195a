"""Least loaded: the prefill instance that could begin first. "Load-balancing" in the paper."""

from __future__ import annotations

from scheduler.placement.contract import Ranked, near_only
from scheduler.placement.view import View


class LeastLoaded:
    """Minimises the predicted wait. Reuses what the chosen instance happens to have."""

    name = "least-loaded"

    def rank(self, view: View) -> Ranked:
        """Score: seconds of the queue."""
        return near_only(view, view.queue_s)
