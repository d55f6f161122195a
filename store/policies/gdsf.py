"""GDSF: evicts the block whose loss costs least. Blocks that are not used lose worth over time.

Each item has a worth H = L + uses * cost_s / nbytes, computed when it is referenced. L, the age of the cache,
is the H of the last victim. It only grows, so that an item that was worth much long ago is worth little
today.

    L ----+----+---------+--------> H
          3    1         2          references: H = L + uses * cost / size
    victim^

L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs,
1998, after P. Cao and S. Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997. Cost is the time to
compute the block again. A block with an unknown cost adds nothing to L; without any costs this is LRU.
"""

from __future__ import annotations

from store.policies.contract import BlockFacts
from store.policies.ranked import Ranked


class GDSF(Ranked):
    """A ranking by worth.

    _age     L
    _uses    item -> references since it came in
    _value   item -> seconds saved per byte by having it
    """

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._age = 0.0
        self._uses: dict[int, int] = {}
        self._value: dict[int, float] = {}

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item with a use count of 1."""
        self._uses[item] = 0
        self._value[item] = facts.cost_s / facts.nbytes
        self.on_access(item, now)

    def on_access(self, item: int, now: float) -> None:
        """Count a use, and add the present age to the worth."""
        self._uses[item] += 1
        self._ranking.rank(item, self._age + self._uses[item] * self._value[item])

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Remove an item. The worth of a victim, the least of all, is the new age."""
        if evicted:
            self._age = max(self._age, self._ranking.key(item))
        super().on_remove(item, evicted=evicted)
        del self._uses[item], self._value[item]

    def check(self) -> None:
        """Assert that every item is counted and ranked."""
        super().check()
        assert set(self._ranking) == set(self._uses) == set(self._value)
        assert all(uses >= 1 for uses in self._uses.values())
