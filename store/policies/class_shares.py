"""Shares: service classes protect part of a segment. A wrapper around a policy for each class.

Each class has a share of the segment's blocks, and the shares leave a common rest. A class may hold more than
its share while no other class needs the space. When space is needed for a block of class c, the victim is the
first of these:

    1. a block of a class that holds more than its share, the lowest such class first
    2. a block of class c itself

Within a class the inner policy decides.

    class 0  | ======== share ======== |              at its share: evicted for class 0 alone
    class 1  | == share == | borrowed  |              2nd: the classes below it have nothing to give
    class 2  | borrowed             |                 1st: its share is 0, and it is the lowest class

Guarantee: no eviction for a class removes a block of another class that holds at most its share. So a class
that has filled its share keeps it, whatever the others do. A class that lent its share takes it back with its
own insertions.

Each class has an inner policy of its own. One order for all classes would have to step over every protected
block at each eviction, and policies that learn from these steps (SIEVE's hand, S3-FIFO's queues) would take
them for second looks. An inner policy is built for the whole segment, because its class may borrow all of it.
A block counts for the highest class that has used it: it then leaves one inner policy and is new to another.
Policies that look at parents (leaves-first) see those of the same class only.

A guaranteed minimum, and more while others need less, is how virtual machines share memory: C. Waldspurger,
"Memory Resource Management in VMware ESX Server", OSDI 2002. Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from store.policies.contract import BlockFacts, Policy

ROUNDING = 1e-6
"""Added to a share in blocks: 0.29 of 100 blocks are 29, although the product is less in floating point.

Any value works that is larger than the rounding error and far smaller than one block.
"""


class ClassShares(Policy):
    """Blocks by class.

    _policies  class -> the policy that orders its items
    _shares    class -> items that it keeps
    _class     item -> its class

    Invariant: an item is known to the policy of its class and to no other.
    """

    def __init__(self, capacity: int, make: Callable[[int], Policy], shares: Sequence[float]):
        """Build the inner policies. make: from a capacity. shares: of each class, the highest first, 0 to 1.

        Raises ValueError for a negative share, and for shares above 1 in sum.
        """
        super().__init__(capacity)
        if any(share < 0 for share in shares) or sum(shares) > 1 + ROUNDING:
            raise ValueError(f"shares {list(shares)}: none may be negative, and the sum may be 1 at most")
        self._policies = [make(capacity) for _ in shares]
        self._shares = [int(share * capacity + ROUNDING) for share in shares]
        self._class: dict[int, int] = {}

    def admits(self, item: int, facts: BlockFacts, now: float) -> bool:
        """Ask the policy of the class."""
        return self._policies[facts.class_id].admits(item, facts, now)

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item into its class."""
        self._class[item] = facts.class_id
        self._policies[facts.class_id].on_insert(item, facts, now)

    def on_access(self, item: int, now: float) -> None:
        """Note a hit within the class of an item."""
        self._policies[self._class[item]].on_access(item, now)

    def on_access_all(self, items: Sequence[int], now: float) -> None:
        """Note hits within each class, in their order."""
        by_class: dict[int, list[int]] = {}
        for item in items:
            by_class.setdefault(self._class[item], []).append(item)
        for class_id, mine in by_class.items():
            self._policies[class_id].on_access_all(mine, now)

    def on_class(self, item: int, facts: BlockFacts, now: float) -> None:
        """Move an item: its old class forgets it, and it is new in the other class."""
        self._policies[self._class[item]].on_remove(item, evicted=False)
        self.on_insert(item, facts, now)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Remove an item from its class, which may remember it as a ghost."""
        self._policies[self._class.pop(item)].on_remove(item, evicted=evicted)

    def victims(self, now: float) -> Iterator[int]:
        """Yield all items: those of classes above their shares, then the others; low classes first."""
        lowest_first = range(len(self._policies) - 1, -1, -1)
        for class_id in sorted(lowest_first, key=self._is_protected):
            yield from self._policies[class_id].victims(now)

    def victims_for(self, class_id: int, now: float) -> Iterator[int]:
        """Yield items of classes above their shares, the lowest first, then those of the class itself."""
        for other in range(len(self._policies) - 1, -1, -1):
            if not self._is_protected(other):
                yield from self._policies[other].victims(now)
        if self._is_protected(class_id):
            yield from self._policies[class_id].victims(now)

    def spared(self, class_id: int, besides: Sequence[int] = ()) -> int:
        """Count the items that other classes hold within their shares."""
        counted = Counter(self._class[item] for item in besides)
        held = (min(len(policy), share) for policy, share in zip(self._policies, self._shares))
        return sum(max(0, n - counted[other]) for other, n in enumerate(held) if other != class_id)

    def _is_protected(self, class_id: int) -> bool:
        """Tell whether a class holds at most its share."""
        return len(self._policies[class_id]) <= self._shares[class_id]

    def held(self) -> list[int]:
        """Count the items of each class, the highest first."""
        return [len(policy) for policy in self._policies]

    def __len__(self) -> int:
        return len(self._class)

    def __iter__(self) -> Iterator[int]:
        return iter(self._class)

    def check(self) -> None:
        """Assert the invariant, those of the inner policies, and that the shares fit into the segment."""
        for class_id, policy in enumerate(self._policies):
            policy.check()
            assert sorted(policy) == sorted(item for item, own in self._class.items() if own == class_id)
        assert sum(self._shares) <= self.capacity
