"""The power of two choices: draw two prefill instances, take the one that could begin first.

Most of the gain of looking at all, with two looks: M. Mitzenmacher, "The power of two choices in randomized
load balancing", IEEE Transactions on Parallel and Distributed Systems, 2001.
"""

from __future__ import annotations

import numpy as np

from scheduler.placement.contract import Ranked, near_only
from scheduler.placement.view import View


class TwoChoices:
    """Draws two different instances and compares their predicted waits."""

    name = "two-choices"

    def rank(self, view: View) -> Ranked:
        """Score: seconds of the queue for the two that are drawn, infinite for the others."""
        drawn, count = view.draw(self.name), len(view.rows)
        first = drawn % count
        second = (first + 1 + drawn // count % max(1, count - 1)) % count
        two = view.rows[[first, second]]
        score = np.full(len(view.near), np.inf)
        score[two] = view.queue_s[two]
        return near_only(view, score)
