"""Length-aware: as LFU, but evicts the deepest in its prompt among blocks that were used equally often.

A block helps only when all before it are there, so the beginning of a prompt is worth more than its end.

    one prompt          | 0 | 1 | 2 | 3 |  all used once
    order of eviction     4   3   2   1

R. Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", arXiv 2407.00079,
2024, section 4.2, which compares it with LRU and LFU. The paper gives one sentence; that position decides
among equal counts, and time among equal positions, is our reading of it.
"""

from __future__ import annotations

from store.policies.contract import BlockFacts
from store.policies.ranked import Ranked


class LengthAware(Ranked):
    """A ranking by (uses, -position)."""

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item with a use count of 1, at its position in the prompt."""
        self._ranking.rank(item, (1, -facts.position))

    def on_access(self, item: int, now: float) -> None:
        """Count a use."""
        uses, depth = self._ranking.key(item)
        self._ranking.rank(item, (uses + 1, depth))

    def check(self) -> None:
        """Assert the invariant of the ranking."""
        super().check()
        assert all(uses >= 1 and depth <= 0 for uses, depth in map(self._ranking.key, self))
