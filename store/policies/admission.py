"""Admission: a filter in front of any policy decides which blocks it keeps. Named `lru+second-hit`.

    reference to a block that is not there --> filter --yes--> policy
                                                 `-----no----> its request uses it, and it is not kept

second-hit  admits a block at its second reference, so a block that is used once displaces no other. Known
            from content delivery: B. Maggs and R. Sitaraman, "Algorithmic Nuggets in Content Delivery", ACM
            SIGCOMM CCR 2015. Names, not a Bloom filter: exact, and as many as the pool has blocks.
size        admits at most a tenth of the pool of one prompt, and not the blocks after that, so that no single
            giant displaces all others. The threshold rule of web caches, for prefixes: the size of a block is
            that of the prefix it ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from store.policies.contract import BlockFacts, Policy

LARGEST_SHARE = 10
"""`size` admits a prefix of at most one in this many blocks of the pool.

Any value of this order works: it only has to keep one prompt from filling the pool.
"""


class Filter(ABC):
    """Decides which blocks a policy admits. Built with the capacity of the pool, in blocks."""

    @abstractmethod
    def admits(self, item: int, facts: BlockFacts) -> bool:
        """Tell whether the policy should keep a block that is not there."""


class SecondHit(Filter):
    """Admits an item at its second reference.

    _seen   items that were refused once, the oldest in front; at most capacity of them
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._seen: OrderedDict[int, None] = OrderedDict()

    def admits(self, item: int, facts: BlockFacts) -> bool:
        """Admit an item whose first reference is still remembered."""
        if item in self._seen:
            del self._seen[item]
            return True
        self._seen[item] = None
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return False


class SizeLimit(Filter):
    """Admits a block by the length of the prefix that it ends."""

    def __init__(self, capacity: int):
        self._most = max(1, capacity // LARGEST_SHARE)

    def admits(self, item: int, facts: BlockFacts) -> bool:
        """Admit a block whose prefix is short enough."""
        return facts.position < self._most


class Filtered(Policy):
    """A policy behind a filter. The filter decides on admission; the policy does all else."""

    def __init__(self, policy: Policy, gate: Filter):
        super().__init__(policy.capacity)
        self._policy = policy
        self._gate = gate

    def admits(self, item: int, facts: BlockFacts, now: float) -> bool:
        """Admit an item that both the filter and the policy admit."""
        return self._gate.admits(item, facts) and self._policy.admits(item, facts, now)

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Pass an insertion on to the policy."""
        self._policy.on_insert(item, facts, now)

    def on_access(self, item: int, now: float) -> None:
        """Pass a hit on to the policy."""
        self._policy.on_access(item, now)

    def on_access_all(self, items: Sequence[int], now: float) -> None:
        """Pass hits on to the policy."""
        self._policy.on_access_all(items, now)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Pass a removal on to the policy."""
        self._policy.on_remove(item, evicted=evicted)

    def victims(self, now: float) -> Iterator[int]:
        """Yield the victims of the policy."""
        return self._policy.victims(now)

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[int]:
        return iter(self._policy)

    def check(self) -> None:
        """Assert the invariants of the policy."""
        self._policy.check()
