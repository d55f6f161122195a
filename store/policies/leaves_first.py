"""Leaves first: evicts a block only after all blocks that continue it; of those without any, the coldest.

Prefixes form a tree. A block whose parent is gone can never be hit again, so evicting an inner block wastes
all blocks after it. Evicting leaves keeps every cached prefix whole. When all leaves are leased or pinned,
inner blocks are evicted all the same, the deepest first: the pool would be full otherwise.

            0                  hit
           / \\
          1   4     leaves: 2, 3 and 4; the one used longest ago is evicted.
         / \\        Once 2 and 3 are both evicted, 1 is a leaf.
        2   3

Every serving system with a prefix tree does this; named and described in L. Zheng et al., "SGLang: Efficient
Execution of Structured Language Model Programs", NeurIPS 2024 (RadixAttention).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from store.policies.contract import BlockFacts, Policy
from store.ranking import Ranking


class LeavesFirst(Policy):
    """The leaves, ranked by their last use.

    _parent    item -> its parent, known or not, or None
    _children  item -> number of known items whose parent it is; absent for none
    _used      item -> when it was last referenced, in references
    _leaves    known items without children, by _used
    """

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._leaves = Ranking[int]()
        self._references = 0

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert a leaf. Its parent is no leaf any more."""
        parent = self._parent[item] = facts.parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            if parent in self._leaves:
                self._leaves.remove(parent)
        self.on_access(item, now)

    def on_access(self, item: int, now: float) -> None:
        """Note that an item was used now."""
        self._references += 1
        self._used[item] = self._references
        if item not in self._children:
            self._leaves.rank(item, self._references)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Remove an item. A parent without children becomes a leaf, ranked by its own last use."""
        parent = self._parent.pop(item)
        del self._used[item]
        if item in self._leaves:
            self._leaves.remove(item)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._used:
                self._leaves.rank(parent, self._used[parent])

    def victims(self, now: float) -> Iterator[int]:
        """Yield all known items, each once and each after all of its children; changes nothing.

        First the leaves, the one used longest ago in front. Then inner blocks: of those whose children have
        all been yielded, the one used longest ago, until none is left. A parent that is not known (not in
        _used: it never came or is gone) is not yielded. Its children are yielded like blocks without one.
        """
        # labs:begin 3c
        refused: dict[int, int] = {}
        waiting: list[tuple[int, int]] = []  # a heap of (last use, item): all its children were refused

        def refuse(item: int) -> None:
            parent = self._parent[item]
            if parent is None:
                return
            refused[parent] = refused.get(parent, 0) + 1
            if refused[parent] == self._children[parent] and parent in self._used:
                heappush(waiting, (self._used[parent], parent))

        for item in self._leaves.ascending():
            yield item
            refuse(item)
        while waiting:
            _, item = heappop(waiting)
            yield item
            refuse(item)
        # labs:end 3c

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[int]:
        return iter(self._used)

    def check(self) -> None:
        """Assert that children are counted, and that exactly the childless items are ranked."""
        self._leaves.check()
        counted: dict[int, int] = {}
        for parent in self._parent.values():
            if parent is not None:
                counted[parent] = counted.get(parent, 0) + 1
        assert counted == self._children
        assert self._parent.keys() == self._used.keys()
        assert set(self._leaves) == self._used.keys() - counted.keys()
        assert all(self._leaves.key(item) == self._used[item] for item in self._leaves)
