"""Items in the order of a key that may change: a heap that tolerates outdated entries.

Used by eviction policies that evict the item with the smallest key, and by the directory's books for segments
and leases. Pure. Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

SPARE = 64
"""Outdated entries that are always tolerated, so that a small heap is not rebuilt all the time."""


class Ranking(Generic[Item]):
    """Smallest key first; among equal keys, the one that was ranked longest ago.

        _entry  item -> (key, number, item), its newest entry; numbers grow
        _heap   heap of entries; one that is not `_entry[item]` itself is outdated

    Invariant: every entry of _entry is in _heap, and _heap is at most SPARE + 2 * len entries long.
    """

    def __init__(self) -> None:
        self._entry: dict[Item, tuple[Any, int, Item]] = {}
        self._heap: list[tuple[Any, int, Item]] = []
        self._number = 0

    def rank(self, item: Item, key: Any) -> None:
        """Rank an item, new or known, by this key. O(log n), counted over many calls."""
        self._number += 1
        entry = (key, self._number, item)
        self._entry[item] = entry
        heappush(self._heap, entry)
        self._tidy()

    def remove(self, item: Item) -> None:
        """Forget an item. Raises KeyError for one that is not known."""
        del self._entry[item]
        self._tidy()

    def discard(self, item: Item) -> None:
        """Forget an item that may not be known."""
        if item in self._entry:
            self.remove(item)

    def key(self, item: Item) -> Any:
        """Return the key of an item. Raises KeyError for one that is not known."""
        return self._entry[item][0]

    def first(self) -> Item:
        """Return the item with the smallest key. Raises IndexError when there is none."""
        heap, entry = self._heap, self._entry
        while entry.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][2]

    def ascending(self) -> Iterator[Item]:
        """Yield all items, smallest key first, without sorting them all. Nothing may change meanwhile.

        The heap is walked as a tree whose nodes wait in a second, small heap:

                 1
               /   \\        asked for 3 items: 1, then of {2, 5} the 2,
              2     5        then of {5, 4, 3} the 3
             / \\
            4   3
        """
        if not self._entry:
            return
        yield self.first()
        heap = self._heap
        waiting = [(heap[0], 0)]
        while waiting:
            entry, place = heappop(waiting)
            if place and self._entry.get(entry[2]) is entry:
                yield entry[2]
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(waiting, (heap[child], child))

    def _tidy(self) -> None:
        if len(self._heap) > SPARE + 2 * len(self._entry):
            self._heap = list(self._entry.values())
            heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, item: Item) -> bool:
        return item in self._entry

    def __iter__(self) -> Iterator[Item]:
        return iter(self._entry)

    def check(self) -> None:
        """Assert the invariant (tests)."""
        assert len(self._heap) <= SPARE + 2 * len(self._entry)
        held = {id(entry) for entry in self._heap}
        for item, entry in self._entry.items():
            assert entry[2] == item
            assert id(entry) in held
        order = [self._entry[item] for item in self.ascending()]
        assert order == sorted(self._entry.values())
