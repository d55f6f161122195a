"""Belady's oracle: it evicts the block whose next use is furthest away. It must know the future.

No policy for blocks of one size misses fewer of them (MIN). So it shows how much any other policy could still
gain, and runs in the replay only. In the paper's table a hit also needs all blocks before it; there the
oracle is a very good reference, but not a proven bound.

    now |  a  b  .  c  .  .  a        (d is never used again)
        next uses: a 1, b 2, c 4      victim: d, then c, then b

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966.
"""

from __future__ import annotations

from collections.abc import Sequence

from store.policies.contract import BlockFacts
from store.policies.ranked import Ranked


class Belady(Ranked):
    """A ranking by the next use, the latest first.

    _future      every reference there will be, in order
    _next_use    for each of them, the index of the next one to the same item; len(_future) for never
    _references  number of references so far
    """

    def __init__(self, capacity: int, future: Sequence[int]):
        """future: the items of all references to come, which on_insert and on_access then follow."""
        super().__init__(capacity)
        self._references = 0
        self._future = future
        self._next_use = [len(future)] * len(future)
        seen: dict[int, int] = {}
        for index in range(len(future) - 1, -1, -1):
            self._next_use[index] = seen.get(future[index], len(future))
            seen[future[index]] = index

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert the item of the next reference."""
        self.on_access(item, now)

    def on_access(self, item: int, now: float) -> None:
        """Count the next reference. Raises ValueError when the future has another item there."""
        index = self._references
        if index >= len(self._future) or self._future[index] != item:
            raise ValueError(f"reference {index} is to item {item}, which is not what the future said")
        self._references += 1
        self._ranking.rank(item, -self._next_use[index])

    def check(self) -> None:
        """Assert that every item is ranked by a use that is yet to come."""
        super().check()
        for item in self:
            use = -self._ranking.key(item)
            assert use == len(self._future) or (use >= self._references and self._future[use] == item)
