"""ARC: two LRU lists, seen once and seen again, and a border between them that moves with the ghosts.

T1 holds items that were referenced once, T2 items that were referenced more often. Their victims leave their
names in B1 and B2. A hit on a name in B1 shows that T1 was too short, so p, the length that T1 should have,
grows. A hit on a name in B2 makes p shrink.

      <---------- seen once ---------->   <------- seen again -------->
      | B1: names | coldest  T1  newest | | newest  T2  coldest | B2: names |
                          <- p ->
      victim: the coldest of T1 when T1 is longer than p, else the coldest of T2

N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from store.policies.contract import BlockFacts, Policy

Names = OrderedDict[int, None]


class ARC(Policy):
    """Four ordered dictionaries, the coldest in front.

    target      the paper's p: how long T1 should be, 0 to capacity
    _newcomer   the item inserted since the last eviction, and whether its name was in B2
    """

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._once: Names = OrderedDict()
        self._again: Names = OrderedDict()
        self._once_ghosts: Names = OrderedDict()
        self._again_ghosts: Names = OrderedDict()
        self.target = 0.0
        self._newcomer: tuple[int, bool] | None = None

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Put a new item into T1. An item whose name is a ghost moves the border, and goes into T2."""
        in_b2 = item in self._again_ghosts
        if item in self._once_ghosts:
            step = max(len(self._again_ghosts) / len(self._once_ghosts), 1)
            self.target = min(self.capacity, self.target + step)
            del self._once_ghosts[item]
            self._again[item] = None
        elif in_b2:
            step = max(len(self._once_ghosts) / len(self._again_ghosts), 1)
            self.target = max(0.0, self.target - step)
            del self._again_ghosts[item]
            self._again[item] = None
        else:
            self._once[item] = None
        self._newcomer = (item, in_b2)
        if len(self) <= self.capacity:  # else a victim's name is about to come
            self._trim()

    def on_access(self, item: int, now: float) -> None:
        """Make an item the newest of T2."""
        if item in self._once:
            del self._once[item]
            self._again[item] = None
        else:
            self._again.move_to_end(item)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Take an item out of its list; add the name of a victim to the ghosts of that list."""
        was_once = item in self._once
        del (self._once if was_once else self._again)[item]
        if evicted:
            (self._once_ghosts if was_once else self._again_ghosts)[item] = None
            self._newcomer = None
            self._trim()

    def victims(self, now: float) -> Iterator[int]:
        """Yield the list that the paper's REPLACE chooses, then the other one, each from its coldest item.

        The paper evicts before it inserts. If the caller inserts first, the new item is not counted.
        """
        once, again, in_b2 = len(self._once), len(self._again), False
        if self._newcomer is not None and len(self) > self.capacity:
            item, in_b2 = self._newcomer
            once, again = once - (item in self._once), again - (item in self._again)
        if once and (once > self.target or (in_b2 and once == self.target) or not again):
            return chain(self._once, self._again)
        return chain(self._again, self._once)

    def _trim(self) -> None:
        """Drop old ghosts: T1 and B1 have at most capacity names, and all lists together twice as many."""
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self.capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and self._names() > 2 * self.capacity:
            self._again_ghosts.popitem(last=False)

    def _names(self) -> int:
        return len(self) + len(self._once_ghosts) + len(self._again_ghosts)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[int]:
        return chain(self._once, self._again)

    def check(self) -> None:
        """Assert that no name is in two lists, and that the bounds on names and on the border hold."""
        lists = (self._once, self._again, self._once_ghosts, self._again_ghosts)
        assert len(set().union(*lists)) == self._names()
        assert 0 <= self.target <= self.capacity
        assert len(self._once_ghosts) <= max(0, self.capacity - len(self._once))
        assert self._names() <= max(2 * self.capacity, len(self) + len(self._once_ghosts))
