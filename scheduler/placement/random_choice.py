"""Random: any prefill instance. The paper's weakest baseline (FAST'25, figure 5).

A hash of the request's id draws, so that a replay draws the same.
"""

from __future__ import annotations

import numpy as np

from scheduler.placement.contract import Ranked, near_only
from scheduler.placement.view import View


class RandomChoice:
    """Draws an instance. Reuses what it happens to have."""

    name = "random"

    def rank(self, view: View) -> Ranked:
        """Score: 0 for the instance that is drawn, 1 for the others."""
        score = np.ones(len(view.near))
        score[view.rows[view.draw(self.name) % len(view.rows)]] = 0.0
        return near_only(view, score)
