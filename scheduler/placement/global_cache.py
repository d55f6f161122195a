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
        compute_s, fetched_s = view.prefill_s(view.near), view.fetch_s + view.prefill_s(np.array(view.best))
        fetch = fetched_s < compute_s
        score = view.queue_s + np.where(fetch, fetched_s, compute_s)
        reused, transfer_s = np.where(fetch, view.best, view.near), np.where(fetch, view.fetch_s, 0.0)
        return Ranked(score, reused, transfer_s, fetch | (view.near == view.best))  # see kvcache_centric.py
