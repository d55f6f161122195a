"""LFU: evicts the block that was used least often; among equals, the one used longest ago.

Each item counts its references since it was inserted. Counts are forgotten on eviction and never age, so an
item that was popular once stays for long.

    uses    1: | 7 | 9 |   2: | 4 |   5: | 1 | 2 |
    victim <-----^ fewest uses, and of these the coldest

In constant time: K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache eviction
scheme", 2010. Ours ranks in a heap, O(log n), as the other policies here do.
"""

from __future__ import annotations

from store.policies.contract import BlockFacts
from store.policies.ranked import Ranked


class LFU(Ranked):
    """A ranking by number of uses."""

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item with a use count of 1."""
        self._ranking.rank(item, 1)

    def on_access(self, item: int, now: float) -> None:
        """Count a use."""
        self._ranking.rank(item, self._ranking.key(item) + 1)

    def check(self) -> None:
        """Assert the invariant of the ranking."""
        super().check()
        assert all(self._ranking.key(item) >= 1 for item in self)
