"""Admission: who may come in at all. A filter in front of any policy, named with a plus: `lru+second-hit`.

    reference to a block that is not there --> filter --yes--> policy
                                                 `-----no----> it is used by its request, and not kept

second-hit  a block comes in at its second reference; one that is used once never takes anybody's place. Known
            from content delivery: B. Maggs and R. Sitaraman, "Algorithmic Nuggets in Content Delivery", ACM
            SIGCOMM CCR 2015. Names, not a Bloom filter: exact, and as many as the pool has blocks.
size        a prompt may fill a tenth of the pool; what lies deeper in it stays outside, so that no single
            giant sweeps everything else away. The threshold rule of web caches, for prefixes: the size of a
            block is that of the prefix it ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from store.policies.contract import BlockFacts, Policy

LARGEST_SHARE = 10
"""The prefix that `size` lets in is at most one in this many blocks of the pool."""


class Filter(ABC):
    """Built with the capacity of the pool, in blocks."""

    @abstractmethod
    def admits(self, item: int, facts: BlockFacts) -> bool:
        """Whether a block that is not there should come in."""


class SecondHit(Filter):
    """_seen: items that were refused once, the oldest in front; at most capacity of them."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._seen: OrderedDict[int, None] = OrderedDict()

    def admits(self, item: int, facts: BlockFacts) -> bool:
        """At the second asking, if the first is not too long ago."""
        if item in self._seen:
            del self._seen[item]
            return True
        self._seen[item] = None
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return False


class SizeLimit(Filter):
    """By the length of the prefix that ends with the block."""

    def __init__(self, capacity: int):
        self._most = max(1, capacity // LARGEST_SHARE)

    def admits(self, item: int, facts: BlockFacts) -> bool:
        """When the prefix is short enough."""
        return facts.position < self._most


class Filtered(Policy):
    """A policy behind a filter: asks the filter, passes everything else on."""

    def __init__(self, policy: Policy, gate: Filter):
        super().__init__(policy.capacity)
        self._policy = policy
        self._gate = gate

    def admits(self, item: int, facts: BlockFacts, now: float) -> bool:
        """Both must agree."""
        return self._gate.admits(item, facts) and self._policy.admits(item, facts, now)

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Passed on."""
        self._policy.on_insert(item, facts, now)

    def on_access(self, item: int, now: float) -> None:
        """Passed on."""
        self._policy.on_access(item, now)

    def on_access_all(self, items: Sequence[int], now: float) -> None:
        """Passed on."""
        self._policy.on_access_all(items, now)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Passed on."""
        self._policy.on_remove(item, evicted=evicted)

    def victims(self, now: float) -> Iterator[int]:
        """The policy's."""
        return self._policy.victims(now)

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[int]:
        return iter(self._policy)

    def check(self) -> None:
        """The policy's."""
        self._policy.check()
