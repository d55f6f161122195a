"""LRU: evicts the block that was used longest ago. The paper's default, and ours.

A reference makes an item the newest one; the oldest one is the victim.

    victim <- | 4 | 1 | 3 | 2 | <- new items, and items that are hit
              coldest    newest

The usual baseline: P. J. Denning, "The working set model for program behavior", Communications of the ACM,
1968; k-competitive for k blocks: D. Sleator and R. Tarjan, "Amortized efficiency of list update and paging
rules", Communications of the ACM, 1985.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from store.policies.contract import BlockFacts, Policy


class LRU(Policy):
    """One ordered dictionary, coldest in front."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        # Not a dict: after many removals in front, finding its first entry takes a scan.
        self._order: OrderedDict[int, None] = OrderedDict()

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item as the newest one."""
        self._order[item] = None

    def on_access(self, item: int, now: float) -> None:
        """Make a used item the newest one."""
        self._order.move_to_end(item)

    def on_access_all(self, items: Sequence[int], now: float) -> None:
        """Make each used item the newest one in turn.

        The loop is in C: a million items are far apart in memory, and it waits for several of them at once.
        """
        deque(map(self._order.move_to_end, items), maxlen=0)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Forget an item."""
        del self._order[item]

    def victims(self, now: float) -> Iterator[int]:
        """Yield the items, the least recently used first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def check(self) -> None:
        """Assert nothing: there is one order, and nothing to disagree with it."""
