"""Global cache-aware: the least predicted TTFT, where every prefill instance may reuse the longest prefix.

The paper's name (FAST'25, figure 5), without a formula. Here: of the longest prefix, fetched, and of the near
one, each instance takes whichever is faster. KVCache-centric differs by its threshold and its copies.
"""

from __future__ import annotations

import numpy as np

from scheduler.placement.contract import Ranked
from scheduler.placement.view import View


class GlobalCache:
    """Minimises queue + fetch + prefill, or queue + prefill where nothing is fetched."""

    name = "global-cache"

    def rank(self, view: View) -> Ranked:
        """Score: predicted seconds to the first token."""
        near, best = view.near, view.best
        near_s, best_s = view.prefill_s(near), view.prefill_s(best)
        fetch = view.fetch_s + best_s < near_s
        transfer_s, prefill_s = np.where(fetch, view.fetch_s, 0.0), np.where(fetch, best_s, near_s)
        reused = np.where(fetch, best, near)
        may_fetch = reused == best  # see kvcache_centric.py
        return Ranked(view.queue_s + transfer_s + prefill_s, reused, transfer_s, prefill_s, may_fetch)
