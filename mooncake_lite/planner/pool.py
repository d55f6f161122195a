"""Which node holds which blocks: the pool of a replay, without keys, leases or bytes.

Used by `replay.py`. The live books are `store.directory`; this one knows ids of a trace alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

Ids = Sequence[int]


class Pool:
    """The DRAM of the nodes that lend. blocks: of each. Where all are full, the one goes that was used first.

    _held     of each node: block -> number of its last use, the oldest in front
    _holders  block -> nodes that have it, the first copy in front
    """

    def __init__(self, nodes: int, blocks: int) -> None:
        self._blocks, self._uses = blocks, 0
        self._held = [OrderedDict[int, int]() for _ in range(nodes)]
        self._holders: dict[int, list[int]] = {}

    def leading(self, ids: Ids) -> tuple[int, dict[int, int]]:
        """Return the leading blocks that the pool has, and how many each node has that has the first one."""
        near, there = dict[int, int](), list[int]()
        for place, one in enumerate(ids):
            holders = self._holders.get(one)
            if not holders:
                return place, near
            there = [node for node in there if node in holders] if place else holders
            for node in there:
                near[node] = place + 1
        return len(ids), near

    def sources(self, ids: Ids, node: int) -> Counter[int]:
        """Return how many of these blocks a node reads from each node: its own copies, or else the first."""
        return Counter(at for at in self.places(ids, node) if at >= 0)

    def places(self, ids: Ids, node: int) -> list[int]:
        """Return the node that a node would read each block from; -1: no node has it any more."""
        found = []
        for one in ids:
            holders = self._holders.get(one)
            found.append(-1 if not holders else node if node in holders else holders[0])
        return found

    def has(self, one: int) -> bool:
        """Tell whether any node has a block."""
        return bool(self._holders.get(one))

    def put(self, node: int, ids: Ids) -> None:
        """Store new blocks: on a node while it has space, else where most is, else in place of the oldest."""
        for one in reversed(ids):  # the end of a prefix goes before its begin
            if not self.has(one):
                self._add(self._room(node), one)

    def copy(self, node: int, ids: Ids) -> None:
        """Store copies on a node as far as it has space."""
        for one in ids:
            if len(self._held[node]) < self._blocks and node not in self._holders.get(one, ()):
                self._add(node, one)

    def used(self, ids: Ids, node: int) -> None:
        """Note that a node has read these blocks, each from where it lies."""
        self._uses += 1
        for one, at in zip(reversed(ids), reversed(self.places(ids, node))):
            if at >= 0:
                self._held[at][one] = self._uses
                self._held[at].move_to_end(one)

    def _add(self, node: int, one: int) -> None:
        self._held[node][one] = self._uses
        self._holders.setdefault(one, []).append(node)

    def _room(self, node: int) -> int:
        """Return a node with space for one more block, made where there is none."""
        if len(self._held[node]) < self._blocks:
            return node
        sizes = [len(held) for held in self._held]
        if min(sizes) < self._blocks:
            return sizes.index(min(sizes))
        oldest = min(range(len(self._held)), key=lambda at: next(iter(self._held[at].values())))
        one, _ = self._held[oldest].popitem(last=False)
        self._holders[one].remove(oldest)
        return oldest
