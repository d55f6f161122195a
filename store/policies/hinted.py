"""LRU that follows hints: dead blocks are evicted before all others, and held blocks after them.

    victim <- | demoted | not hinted, coldest first ... newest | held, the latest end first |

Of held blocks the one with the latest end is evicted first: it would take up space for longest, and the ends
are what clients expect of the next use (as Belady's oracle would). Whether hints deserve to be followed is
decided in `store.books.trust`. Explained in docs/explain/hints.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import chain

from store.policies.contract import BlockFacts
from store.policies.lru import LRU
from store.ranking import Ranking

FAR = 2.0**50
"""More seconds than any clock counts."""


class Hinted(LRU):
    """Lines of items; each item is in one of them.

    _order      items without a hint, as in LRU
    _released   items whose hint has ended, by their last use: they are a part of LRU's order
    _dead       demoted items, in the order of their eviction, and their numbers in that of all segments
    _held       held items by minus their end
    _last       every item -> its last use
    """

    def __init__(self, before: LRU, uses: dict[int, float]):
        """Take over the items of a plain LRU. uses: the last use of each."""
        super().__init__(before.capacity)
        self._order, self._last = before._order, uses
        self._released, self._held = Ranking[int](), Ranking[int]()
        self._dead: OrderedDict[int, int] = OrderedDict()

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item as the newest one."""
        self._order[item] = None
        self._last[item] = now

    def on_access(self, item: int, now: float) -> None:
        """Make a used item the newest one; a held item stays where it is, and a dead one lives."""
        if item not in self._held:
            self._take_out(item)
            self._order[item] = None
        self._last[item] = now

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Forget an item."""
        self._take_out(item)
        del self._last[item]

    def hold(self, item: int, end: float) -> None:
        """Evict an item after those that are not held, until it is released."""
        self._take_out(item)
        self._held.rank(item, -end)

    def demote(self, item: int, number: int) -> None:
        """Evict an item after those that were demoted with a lower number, and before all others."""
        self._take_out(item)
        self._dead[item] = number

    def release(self, item: int) -> None:
        """Take the hint off an item."""
        self._take_out(item)
        self._released.rank(item, self._last[item])

    def _take_out(self, item: int) -> None:
        for line in (self._held, self._released):
            if item in line:
                line.remove(item)
                return
        del (self._dead if item in self._dead else self._order)[item]

    def victims(self, now: float) -> Iterator[int]:
        """Yield dead items, then the least recently used ones, then held ones."""
        by_use = merge(self._released.ascending(), self._order, key=self._last.__getitem__)
        return chain(self._dead, by_use, self._held.ascending())

    def coldness(self, item: int, last_use_s: float) -> tuple[bool, float]:
        """Rate dead items as colder than all others, and held ones as warmer."""
        if item in self._held:
            return True, self._held.key(item)
        return False, self._dead[item] - FAR if item in self._dead else last_use_s

    def __len__(self) -> int:
        return len(self._last)

    def __iter__(self) -> Iterator[int]:
        return iter(self._last)

    def check(self) -> None:
        """Assert that each item is in one line."""
        self._held.check()
        self._released.check()
        items = [*self._order, *self._released, *self._dead, *self._held]
        assert sorted(items) == sorted(self._last)
