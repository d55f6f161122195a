"""THE contract of eviction: what a policy is told, what it is asked, and what both sides may rely on.

Every policy in this folder subclasses `Policy`. The directory calls it for the live pool, the replay of
mooncake_lite/simulator/ for a trace: the same objects. Pure: no I/O, no clock of its own, nothing random.
Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec


class BlockFacts(msgspec.Struct, frozen=True, gc=False):
    """What a policy may know of a block beside its name.

    nbytes     size
    cost_s     seconds that computing it again would take; 0 when nobody has measured
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
    """The order in which the blocks of one segment go.

    An item is an integer that names a block for good: a pool uses the block's key, a trace its hash id. What
    was evicted and comes back comes back under the same name, and that is all a ghost list needs: inserting
    an item that the policy remembers *is* the ghost hit.

        reference to an item that is known         on_access(item)
        reference to one that is not   admits(item)?  yes: on_insert(item)   no: it stays outside
        room is needed                 for item in victims_for(class): the first that may go:
                                       on_remove(evicted=True)
        a higher class uses it         on_class(item, facts), then on_access(item)
        it is gone for another reason              on_remove(evicted=False)

    Whether room is made before or after the new item is inserted is the caller's choice: the directory does
    it before, because bytes need a place to be written to; the replay after, as the paper's table wants it,
    and there the new item may be the victim. A policy must do the right thing in both orders.

    `now` is seconds of any clock that does not go backwards. A policy is built with its capacity, in blocks:
    how many items its segment can hold; between an insertion and the eviction that follows there may be one
    more. The keyed blocks of a pool have one size.
    """

    def __init__(self, capacity: int):
        """capacity: blocks, at least 1 (ValueError)."""
        if capacity < 1:
            raise ValueError(f"a policy for {capacity} blocks")
        self.capacity = capacity

    def admits(self, item: int, facts: BlockFacts, now: float) -> bool:
        """Whether an item that is not known should come in. Asked once for each such reference."""
        return True

    @abstractmethod
    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """An item has come in; it was not known."""

    @abstractmethod
    def on_access(self, item: int, now: float) -> None:
        """A known item was hit."""

    def on_access_all(self, items: Sequence[int], now: float) -> None:
        """Known items were hit, in this order. Override it where that can be faster than one by one."""
        for item in items:
            self.on_access(item, now)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Who overrides on_access alone must hear of every item, whatever its parent made of many."""
        super().__init_subclass__(**kwargs)
        if "on_access" in vars(cls) and "on_access_all" not in vars(cls):
            cls.on_access_all = Policy.on_access_all  # type: ignore[method-assign]

    def on_class(self, item: int, facts: BlockFacts, now: float) -> None:  # noqa: B027
        """A known item counts for a higher class from now on, facts.class_id. An on_access follows."""

    @abstractmethod
    def on_remove(self, item: int, *, evicted: bool) -> None:
        """A known item has gone. Raises KeyError for one that is not known.

        evicted: it was a victim, and may be remembered as a ghost; else it was deleted, and is forgotten.
        """

    @abstractmethod
    def victims(self, now: float) -> Iterator[int]:
        """Known items, each once, first the one to evict first.

        Going on to the next one says that this one may not go now: it is leased, or not yet on SSD. All are
        named before the iterator ends. No item is inserted, accessed or removed while somebody iterates.

        Lazy: the first victim costs O(log n) at most, counted over many evictions, and nothing is copied.
        Asking may tidy up (move a hand, clear a bit, promote), as long as whoever asks again, with no event
        between, is offered the same first item that may go.
        """

    def victims_for(self, class_id: int, now: float) -> Iterator[int]:
        """The victims that may be evicted for a block of this class, in their order: here all of them.

        Where `spared` is above 0, evicting one of them may protect the rest: ask again after each eviction.
        """
        return self.victims(now)

    def spared(self, class_id: int, besides: Sequence[int] = ()) -> int:
        """How many known items, without those of `besides`, are never evicted for a block of this class."""
        return 0

    @abstractmethod
    def __len__(self) -> int:
        """Known items."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Known items in no particular order. Changes nothing."""

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants (tests)."""
