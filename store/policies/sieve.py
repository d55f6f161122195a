"""SIEVE: one queue in order of arrival, one bit per item, one hand that moves from old to new.

A hit sets the item's bit and moves nothing. To evict, the hand clears bits until it finds one that is clear,
and evicts that item. The next time it continues from there. Survivors stay where they are, and the hand
reaches new items soon: quick demotion.

    oldest                        newest
    | 5 | 2*| 8*| 3 | 6*| 9 | <- new items
          hand -->  ^ victim (2 and 8 lose their bits)

Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson and K. V. Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key
Eviction Algorithm for Web Caches", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Iterator

from store.policies.contract import BlockFacts, Policy


class _Node:
    """One item in the ring. older and newer are its neighbours."""

    __slots__ = ("item", "newer", "older", "visited")

    def __init__(self, item: int):
        self.item = item
        self.visited = False
        self.newer = self.older = self


class SIEVE(Policy):
    """A ring of nodes. One node is no item: the oldest item follows it, and the newest precedes it.

    _nodes  item -> its node
    _hand   where the next search begins; the node that is no item stands for the oldest
    """

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._nodes: dict[int, _Node] = {}
        self._end = _Node(-1)
        self._hand = self._end

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item as the newest one, with a clear bit."""
        node = self._nodes[item] = _Node(item)
        node.older, node.newer = self._end.older, self._end
        node.older.newer = node.newer.older = node

    def on_access(self, item: int, now: float) -> None:
        """Set the bit of an item; nothing moves."""
        self._nodes[item].visited = True

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Take an item out of the ring. If the hand pointed at the item, it now points at the next newer one.

        A pool may insert a new item first and then evict another to make room. If the hand now points at
        that new item, it has passed all others, so it begins again at the oldest item.
        """
        node = self._nodes.pop(item)
        node.older.newer, node.newer.older = node.newer, node.older
        if self._hand is node:
            made_room = len(self) == self.capacity and node.newer is self._end.older
            self._hand = self._end if made_room else node.newer

    def victims(self, now: float) -> Iterator[int]:
        """Yield the items in the order of their eviction, each once.

        The hand moves from older items to newer ones, and from the newest one to the oldest. It clears a bit
        that is set, and passes the item. It yields an item whose bit is clear. When the caller asks for the
        next item, this one may not be evicted now, and the hand passes it too.

        The paper evicts before it inserts. A pool may insert first: when it holds more items than its
        capacity, the newest item has just come in. The hand passes that item and leaves its bit as it is;
        it is yielded last.
        """
        # labs:begin 2e
        newcomer = self._end.older if len(self) > self.capacity else self._end
        passed = {self._end, newcomer}
        while len(passed) < len(self._nodes) + 1:
            node = self._hand
            if node not in passed:
                if not node.visited:
                    yield node.item
                    passed.add(node)
                node.visited = False
            self._hand = node.newer
        if newcomer is not self._end:
            yield newcomer.item
        # labs:end 2e

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def check(self) -> None:
        """Assert that the ring holds every item once, and that the hand is in it."""
        node, seen = self._end.newer, []
        while node is not self._end:
            assert node.newer.older is node
            assert self._nodes[node.item] is node
            seen.append(node.item)
            node = node.newer
        assert sorted(seen) == sorted(self._nodes)
        assert self._hand is self._end or self._nodes[self._hand.item] is self._hand
