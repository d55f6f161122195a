"""The order of eviction: the object whose lease ended longest ago comes first, soft-pinned objects last.

Used by `books`. Readers extend leases by a store into the table, and the master gets no message about it. So
objects are ranked by the *earliest* end of their leases. When an object comes first, the table tells the true
end, and an object whose lease ends later is ranked anew. Of a million objects only a few are looked at. Pure.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from store.mooncake_store.master.entries import Entry
from store.ranking import Ranking


class EvictionOrder:
    """Objects that may be evicted some day.

    lease_until    (entry, now) -> when its lease ends, in ns

    _cold    by (lease ends at the earliest, put)
    _soft    by (soft pin ends, put)
    """

    def __init__(self, lease_until: Callable[[Entry, int], int]):
        self._lease_until = lease_until
        self._cold: Ranking[Entry] = Ranking()
        self._soft: Ranking[Entry] = Ranking()

    def add(self, entry: Entry, now_ns: int) -> None:
        """Add a visible object. Hard-pinned objects are never evicted and not kept here."""
        if entry.soft_until_ns > now_ns and not entry.wish.hard_pin:
            self._soft.rank(entry, (entry.soft_until_ns, entry.put))
        elif not entry.wish.hard_pin:
            self._cold.rank(entry, (self._lease_until(entry, now_ns), entry.put))

    def discard(self, entry: Entry) -> None:
        """Forget an object that is no longer visible, if it is kept here."""
        self._cold.discard(entry)
        self._soft.discard(entry)

    def coldest(self, now_ns: int) -> Generator[Entry]:
        """Yield objects without a lease, in the order of eviction; those not removed by then stay."""
        seen: list[Entry] = []
        cold, soft = self._cold, self._soft
        try:
            while soft and soft.key(entry := soft.first())[0] <= now_ns:
                soft.remove(entry)
                self.add(entry, now_ns)
            while cold and (until := cold.key(entry := cold.first())[0]) <= now_ns:
                if (true_ns := self._lease_until(entry, now_ns)) > until:
                    cold.rank(entry, (true_ns, entry.put))
                    continue
                cold.remove(entry)
                seen.append(entry)
                if not entry.tasks:
                    yield entry
            ends = {entry: self._lease_until(entry, now_ns) for entry in soft if not entry.tasks}
            unleased = [entry for entry, until in ends.items() if until <= now_ns]
            yield from sorted(unleased, key=lambda entry: (ends[entry], entry.put))
        finally:
            for entry in seen:
                if entry.word:
                    self.add(entry, now_ns)

    def check(self, entries: dict[str, Entry]) -> None:
        """Assert that every object is kept once, unless it is pinned hard (tests)."""
        kept = [entry.put for entry in (*self._cold, *self._soft)]
        assert sorted(kept) == sorted(one.put for one in entries.values() if not one.wish.hard_pin)
