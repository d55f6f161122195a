"""Which block goes first when room runs out: the `Policy` verbs, and LRU, the paper's default.

Called by a segment of the directory (and by the simulator, with its own clock). Pure: time is an
argument, ids are integers. Knows nothing of leases or tiers: it only orders; what may not go now is
skipped by the caller. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class Policy(Protocol):
    """The verbs of every eviction policy."""

    def on_insert(self, item: int, nbytes: int, now: float, *, cost_s: float, class_id: int) -> None:
        """A new item; it is not yet known."""

    def on_access(self, item: int, now: float) -> None:
        """A known item was hit."""

    def on_remove(self, item: int) -> None:
        """A known item has gone, evicted or not."""

    def victims(self, now: float) -> Iterator[int]:
        """All known items, first the one to evict first. Nothing is inserted or removed meanwhile."""

    def __len__(self) -> int:
        """Known items."""


class LRU:
    """Least recently used first. One ordered dictionary, coldest in front."""

    def __init__(self) -> None:
        # Not a dict: after many removals in front, finding its first entry takes a scan.
        self._order: OrderedDict[int, None] = OrderedDict()

    def on_insert(self, item: int, nbytes: int, now: float, *, cost_s: float, class_id: int) -> None:
        """A new item is the newest one."""
        self._order[item] = None

    def on_access(self, item: int, now: float) -> None:
        """An item that was used is the newest one again."""
        self._order.move_to_end(item)

    def on_remove(self, item: int) -> None:
        """Forget an item. Raises KeyError for one that is not known."""
        del self._order[item]

    def victims(self, now: float) -> Iterator[int]:
        """All items, the least recently used first; nothing is removed."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
