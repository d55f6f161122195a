"""Round robin: one prefill instance after the other."""

from __future__ import annotations

import numpy as np

from scheduler.placement.contract import Ranked, near_only
from scheduler.placement.view import View


class RoundRobin:
    """Takes turns. Reuses what the instance whose turn it is happens to have."""

    name = "round-robin"

    def rank(self, view: View) -> Ranked:
        """Score: 0 for the instance whose turn it is, 1 for the others."""
        score = np.ones(len(view.near))
        score[view.rows[view.state.num_placed % len(view.rows)]] = 0.0
        return near_only(view, score)
