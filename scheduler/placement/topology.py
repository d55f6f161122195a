"""Topology-aware: near sources first. A prefix is looked for on the own node, in its rack, then anywhere.

    own node    queue + prefill
    own rack    queue + transfer within the rack + prefill
    anywhere    queue + transfer within the rack, then from other racks and SSD + prefill

Each instance takes the fastest of the three. Racks are configured (--racks). In a single rack with one
bandwidth this is `global-cache`, as long as no block is on SSD only.
"""

from __future__ import annotations

import numpy as np

from scheduler.placement.contract import Ranked
from scheduler.placement.view import View


class Topology:
    """Minimises queue + fetch + prefill over the three places that a prefix may come from."""

    name = "topology"

    def rank(self, view: View) -> Ranked:
        """Score: predicted seconds to the first token."""
        near, in_rack = view.near, view.in_rack
        anywhere = np.maximum(in_rack, view.best)
        rack_s = view.rack_fetch_s
        fetch_s = np.stack([np.zeros(len(near)), rack_s, rack_s + view.fetch_beyond_s(in_rack)])
        reused = np.stack([near, in_rack, anywhere])
        prefill_s = view.prefill_s(reused)
        fastest = (fetch_s + prefill_s).argmin(axis=0), np.arange(len(near))
        return Ranked(
            view.queue_s + fetch_s[fastest] + prefill_s[fastest],
            reused[fastest],
            fetch_s[fastest],
            prefill_s[fastest],
            (reused[fastest] > near) | (near == view.best),  # see kvcache_centric.py
        )
