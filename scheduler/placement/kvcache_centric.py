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

from scheduler.placement.contract import Ranked
from scheduler.placement.view import View

THRESHOLD = 1.5
"""How many times longer than the near prefix the best one must be: the paper's kvcache_balancing_threshold.

The paper gives no number. At 1.5 a prefix is fetched if more than a third of it is missing near the instance.
"""


class KVCacheCentric:
    """Minimises the predicted TTFT, transfer of a longer prefix included."""

    name = "kvcache-centric"

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self.threshold = threshold

    def rank(self, view: View) -> Ranked:
        """Score: predicted seconds to the first token."""
        near, best = view.near, view.best
        compute_s, transfer_s = view.prefill_s(near), view.fetch_s
        fetched_s = transfer_s + view.prefill_s(np.array(best))
        is_longer = (best > self.threshold * near) | (best - near <= view.pool.ssd_blocks)
        fetch = is_longer & (fetched_s < compute_s)
        return Ranked(
            view.queue_s + np.where(fetch, fetched_s, compute_s),
            np.where(fetch, best, near),
            np.where(fetch, transfer_s, 0.0),
            fetch | (near == best),  # nothing to fetch now; there may be when the prefill begins
        )
