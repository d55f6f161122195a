"""Local cache-aware: the least predicted TTFT, where each instance reuses what is near it (FAST'25, 4)."""

from __future__ import annotations

from scheduler.placement.contract import Ranked, near_only
from scheduler.placement.view import View


class LocalCache:
    """Minimises queue + prefill. What other nodes have counts for nothing and is not fetched."""

    name = "local-cache"

    def rank(self, view: View) -> Ranked:
        """Score: predicted seconds to the first token without fetching."""
        return near_only(view, view.queue_s + view.prefill_s(view.near))
