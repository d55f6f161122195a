"""The contract between an eviction policy and its caller.

Every policy in this folder subclasses `Policy`. The directory calls it for the live pool, and the replay of
mooncake_lite/simulator/ calls it for a trace. Pure: no I/O, no clock of its own, nothing random.
Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec


class BlockFacts(msgspec.Struct, frozen=True, gc=False):
    """Facts about a block that a policy may use, besides its name.

    nbytes     size
    cost_s     seconds that computing it again would take; 0: unknown
    class_id   service class, 0 the highest; only `class_shares` asks for it
    parent     the item before it in its prefix, None for a first block
    position   blocks before it in its prefix
    """

    nbytes: int = 1
    cost_s: float = 0.0
    class_id: int = 0
    parent: int | None = None
    position: int = 0


class Policy(ABC):
    """The order in which the blocks of one segment are evicted.

    An item is an integer that names a block forever: a pool uses the block's key, a trace its hash id. A
    block that was evicted comes back under the same name, which is all that a ghost list needs: inserting an
    item that the policy remembers *is* the ghost hit.

        reference to an item that is known         on_access(item)
        reference to one that is not   admits(item)?  yes: on_insert(item)   no: it is not kept
        space is needed                for item in victims_for(class): the first that may be evicted:
                                       on_remove(evicted=True)
        a higher class uses it         on_class(item, facts), then on_access(item)
        it is removed otherwise        on_remove(evicted=False)

    The caller may evict before or after it inserts the new item. The directory evicts before, because bytes
    need a place to be written to. The replay evicts after, as the paper's table requires, and there the new
    item may be the victim. A policy must work in both orders.

    `now` is seconds of any clock that does not go backwards. A policy is built with its capacity: the number
    of items that its segment can hold. Between an insertion and the eviction that follows there may be one
    item more. The keyed blocks of a pool have one size.
    """

    def __init__(self, capacity: int):
        """Begin without items. capacity: in blocks, at least 1 (ValueError)."""
        if capacity < 1:
            raise ValueError(f"a policy for {capacity} blocks")
        self.capacity = capacity

    def admits(self, item: int, facts: BlockFacts, now: float) -> bool:
        """Tell whether to keep an unknown item. Asked once for each reference to one."""
        return True

    @abstractmethod
    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an unknown item."""

    @abstractmethod
    def on_access(self, item: int, now: float) -> None:
        """Note a hit on a known item."""

    def on_access_all(self, items: Sequence[int], now: float) -> None:
        """Note hits on known items, in this order. Override it if that is faster than one by one."""
        for item in items:
            self.on_access(item, now)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Restore the loop of on_access_all in a class that overrides on_access alone.

        Otherwise a parent's faster on_access_all would never call the override.
        """
        super().__init_subclass__(**kwargs)
        if "on_access" in vars(cls) and "on_access_all" not in vars(cls):
            cls.on_access_all = Policy.on_access_all  # type: ignore[method-assign]

    def on_class(self, item: int, facts: BlockFacts, now: float) -> None:  # noqa: B027
        """Count a known item for a higher class, facts.class_id. An on_access follows."""

    @abstractmethod
    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Remove a known item. Raises KeyError for an unknown one.

        evicted: it was a victim, and may be remembered as a ghost; else it was deleted, and is forgotten.
        """

    @abstractmethod
    def victims(self, now: float) -> Iterator[int]:
        """Yield known items, each once, in the order of eviction.

        A caller that asks for the next item says that this one may not be evicted now: it is leased, or not
        yet on SSD. All items come before the iterator ends. The caller inserts, accesses and removes no item
        while it iterates.

        Lazy: the first victim costs O(log n) at most, counted over many evictions, and nothing is copied.
        The iteration may tidy up (move a hand, clear a bit, promote). But a second iteration without an event
        in between must offer the same first item that may be evicted.
        """

    def victims_for(self, class_id: int, now: float) -> Iterator[int]:
        """Yield the victims that may be evicted for a block of this class, in order: here all of them.

        Where `spared` is above 0, evicting one of them may protect the rest: ask again after each eviction.
        """
        return self.victims(now)

    def spared(self, class_id: int, besides: Sequence[int] = ()) -> int:
        """Count the known items, without those of `besides`, never evicted for a block of this class."""
        return 0

    def coldness(self, item: int, last_use_s: float) -> tuple[bool, float]:
        """Return how a known item compares with the victims of other segments; the least is evicted first."""
        return False, last_use_s

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of known items."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield the known items in no particular order. Changes nothing."""

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants (tests)."""
