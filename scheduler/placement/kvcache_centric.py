"""KVCache-centric: Algorithm 1 of the paper (FAST'25, section 4), the default.

    if best / near > threshold and fetching pays:   TTFT = transfer(best - near) + queue + prefill(best)
    else:                                           TTFT = queue + prefill(near)
    if best / near > threshold on the chosen one:   copy the blocks there (`scheduler.hot_spots`)

Ours, where the paper is silent: a near prefix of zero exceeds every threshold if there is anything to fetch;
equality does not; blocks that are on SSD alone need not exceed it, because they load no other node; and a
prefix is fetched only where that is faster than computing it.
"""

from __future__ import annotations

import numpy as np

from scheduler.placement import THRESHOLD
from scheduler.placement.contract import Ranked
from scheduler.placement.view import View


class KVCacheCentric:
    """Minimises the predicted TTFT, transfer of a longer prefix included."""

    name = "kvcache-centric"

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self.threshold = threshold

    def rank(self, view: View) -> Ranked:
        """Rank every instance by its predicted seconds to the first token: queue, transfer and prefill.

        An instance fetches the longest prefix if two things hold. First, `best` is more than `threshold`
        times `near`, or the instance lacks at most as many blocks as lie on SSD alone (`pool.ssd_blocks`).
        Second, fetching and then computing the rest is faster than computing all that follows `near`. It then
        reuses `best` blocks, and `fetch_s` is its transfer. Otherwise it reuses `near` blocks without one.
        `near` may exceed `best`: own pages count.

        The `fetch` of the result is true where `reused` is `best`, also if nothing is fetched now: there may
        be more of the prefix when the prefill begins. Returns one array with a row per instance for each
        field. The arrays of the view are not changed.
        """
        # labs:begin 7b
        near, best = view.near, view.best
        near_s, best_s = view.prefill_s(near), view.prefill_s(best)
        may_fetch = (self.threshold * near < best) | (near >= best - view.pool.ssd_blocks)
        fetches = may_fetch & (view.fetch_s + best_s < near_s)
        reused = np.where(fetches, best, near)
        transfer_s = np.where(fetches, view.fetch_s, 0.0)
        prefill_s = np.where(fetches, best_s, near_s)
        return Ranked(view.queue_s + transfer_s + prefill_s, reused, transfer_s, prefill_s, reused == best)
        # labs:end 7b
