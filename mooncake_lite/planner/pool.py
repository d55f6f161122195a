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
        found = Counter(self.places(ids, node))
        del found[-1]
        return found

    def places(self, ids: Ids, node: int) -> list[int]:
        """Return the node that a node would read each block from; -1: no node has it any more."""
        all_of = map(self._holders.get, ids)
        return [-1 if not holders else node if node in holders else holders[0] for holders in all_of]

    def put(self, node: int, ids: Ids) -> None:
        """Store new blocks: on a node while it has space, else where most is, else in place of the oldest."""
        fronts: list[int] = []  # the last use of each node's oldest block, once all are full
        for one in reversed(ids):  # the end of a prefix goes before its begin
            if not self._holders.get(one):
                at = node if len(self._held[node]) < self._blocks else self._emptiest()
                if len(self._held[at]) >= self._blocks:
                    fronts = fronts or [next(iter(held.values())) for held in self._held]
                    at = fronts.index(min(fronts))
                    self._drop(at)
                    self._add(at, one)
                    fronts[at] = next(iter(self._held[at].values()))
                else:
                    self._add(at, one)

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

    def _drop(self, node: int) -> None:
        """Let the oldest block of a node go."""
        gone, _ = self._held[node].popitem(last=False)
        self._holders[gone].remove(node)

    def _emptiest(self) -> int:
        sizes = [*map(len, self._held)]
        return sizes.index(min(sizes))


class Pages(Pool):
    """The pages of nodes that share nothing: each keeps what it has computed, and lets its own oldest go."""

    def put(self, node: int, ids: Ids) -> None:
        """Store blocks that a node lacks on this node."""
        for one in reversed(ids):
            if one not in self._held[node]:
                if len(self._held[node]) >= self._blocks:
                    self._drop(node)
                self._add(node, one)
