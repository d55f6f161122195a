"""What policies share that evict by a ranking of all items.

Parent of `belady`, `gdsf`, `length` and `lfu`, which say by what an item is ranked. Explained in
docs/explain/eviction.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from store.policies.contract import Policy
from store.ranking import Ranking


class Ranked(Policy):
    """Every known item is in _ranking, and the first one there is the next victim."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._ranking = Ranking[int]()

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Remove an item and forget its rank."""
        self._ranking.remove(item)

    def victims(self, now: float) -> Iterator[int]:
        """Yield the items in the order of their ranks."""
        return self._ranking.ascending()

    def __len__(self) -> int:
        return len(self._ranking)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranking)

    def check(self) -> None:
        """Assert the invariant of the ranking."""
        self._ranking.check()
