"""The order of eviction: the object whose lease ended longest ago comes first, soft-pinned objects last.

Used by `books`. Readers extend leases by a store into the table, and the master gets no message about it. So
a heap keeps the *earliest* end of each lease. When an object reaches the top of the heap, the table tells
the true end, and an object whose lease ends later goes back in. Of a million objects only a few are looked
at. Pure. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator

from store.distributed.entries import Entry

_Item = tuple[int, int, Entry]

SLACK = 64
"""Forgotten entries that are always tolerated, so that small heaps are not rebuilt all the time."""


class EvictionOrder:
    """Objects that may be evicted some day.

    lease_until    (entry, now) -> when its lease ends, in ns

    _cold    heap of (lease ends at the earliest, put, entry)
    _soft    heap of (soft pin ends, put, entry)

    An entry without a slot (word 0) is gone. The heap drops it at the top, or when half of all are gone.
    """

    def __init__(self, lease_until: Callable[[Entry, int], int]):
        self._lease_until = lease_until
        self._cold: list[_Item] = []
        self._soft: list[_Item] = []
        self._most = SLACK

    def add(self, entry: Entry, now_ns: int) -> None:
        """Add a visible object. Hard-pinned objects are never evicted and not kept here."""
        if entry.wish.hard_pin:
            return
        if len(self._cold) + len(self._soft) >= self._most:
            self._forget_gone()
        if entry.soft_until_ns > now_ns:
            heapq.heappush(self._soft, (entry.soft_until_ns, entry.put, entry))
        else:
            heapq.heappush(self._cold, (self._lease_until(entry, now_ns), entry.put, entry))

    def coldest(self, now_ns: int) -> Generator[Entry]:
        """Yield objects without a lease, in the order of eviction; those not removed by then stay."""
        seen: list[Entry] = []
        try:
            while self._soft and self._soft[0][0] <= now_ns:
                self.add(heapq.heappop(self._soft)[2], now_ns)
            while self._cold and self._cold[0][0] <= now_ns:
                _, put, entry = self._cold[0]
                until = self._lease_until(entry, now_ns) if entry.word else 0
                if until > self._cold[0][0]:
                    heapq.heapreplace(self._cold, (until, put, entry))
                    continue
                heapq.heappop(self._cold)
                if entry.word:
                    seen.append(entry)
                    if not entry.tasks:
                        yield entry
            yield from self._soft_pinned(now_ns)
        finally:
            for entry in seen:
                if entry.word:
                    self.add(entry, now_ns)

    def _soft_pinned(self, now_ns: int) -> Iterator[Entry]:
        """Yield soft-pinned objects, for when no others are left."""
        there = [entry for _, _, entry in self._soft if entry.word and not entry.tasks]
        unleased = [
            (until, entry.put, entry)
            for entry in there
            if (until := self._lease_until(entry, now_ns)) <= now_ns
        ]
        for _, _, entry in sorted(unleased):
            yield entry

    def _forget_gone(self) -> None:
        self._cold = [item for item in self._cold if item[2].word]
        self._soft = [item for item in self._soft if item[2].word]
        heapq.heapify(self._cold)
        heapq.heapify(self._soft)
        self._most = 2 * (len(self._cold) + len(self._soft)) + SLACK

    def check(self, entries: dict[str, Entry]) -> None:
        """Assert that every object is kept once, unless it is pinned hard (tests)."""
        kept = [entry.put for _, _, entry in self._cold + self._soft if entry.word]
        assert sorted(kept) == sorted(one.put for one in entries.values() if not one.wish.hard_pin)
