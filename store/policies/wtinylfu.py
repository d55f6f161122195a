"""W-TinyLFU: a small window for new items, and a contest for a place in the main space.

New items enter the window, an LRU of one per cent of the space. The item that falls out of it is a candidate
for the main space. When that is full, the candidate competes with the main space's own victim, and the one
that was referenced more often lately stays. A sketch counts references, also to items that are not there. The
main space has two LRU lists: probation, and protected (80 %) for items that were hit in it.

    new -> | window 1 % | --candidate--> | probation 20 % | --hit--> | protected 80 % |
                             contest:     ^ victim                          |
                             the rarer is evicted    <-- coldest, when too long

G. Einziger, R. Friedman and B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions
on Storage, 2017. Without its doorkeeper, and with a window of constant size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from store.policies.contract import BlockFacts, Policy
from store.policies.sketch import FrequencySketch


class WTinyLFU(Policy):
    """Three ordered dictionaries, the coldest in front, and the sketch.

    _candidate  the item that fell out of the window last, while it is in probation and has won no contest
    """

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._sketch = FrequencySketch(capacity)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._window_places = max(1, capacity // 100)
        self._protected_places = (capacity - self._window_places) * 8 // 10
        self._candidate: int | None = None

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert an item into the window. The item that falls out of it is the candidate."""
        self._sketch.add(item)
        self._window[item] = None
        if len(self._window) > self._window_places:
            self._candidate, _ = self._window.popitem(last=False)
            self._probation[self._candidate] = None

    def on_access(self, item: int, now: float) -> None:
        """Make an item the newest of its list. One in probation moves into protected.

        The coldest of protected moves back when that list is too long.
        """
        self._sketch.add(item)
        if item in self._window:
            self._window.move_to_end(item)
        elif item in self._protected:
            self._protected.move_to_end(item)
        else:
            del self._probation[item]
            self._protected[item] = None
            if item == self._candidate:
                self._candidate = None
            if len(self._protected) > self._protected_places:
                demoted, _ = self._protected.popitem(last=False)
                self._probation[demoted] = None

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Take an item out of its list. An eviction ends the contest: a candidate that is left has won."""
        if item in self._window:
            del self._window[item]
        elif item in self._probation:
            del self._probation[item]
        else:
            del self._protected[item]
        if evicted or item == self._candidate:
            self._candidate = None

    def victims(self, now: float) -> Iterator[int]:
        """Yield the main victims; the candidate precedes the first one with as many references or more."""
        candidate, count = self._candidate, self._sketch.count
        strength = -1 if candidate is None else count(candidate)
        waiting = candidate is not None
        for victim in chain(self._probation, self._protected):
            if victim == candidate:
                continue
            if waiting and count(victim) >= strength:
                waiting = False
                yield candidate  # type: ignore[misc]
            yield victim
        if waiting:
            yield candidate  # type: ignore[misc]
        yield from self._window

    def __len__(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        return chain(self._window, self._probation, self._protected)

    def check(self) -> None:
        """Assert that no item is in two lists, and that window and protected are within their bounds."""
        assert len(set(self)) == len(self)
        assert len(self._window) <= self._window_places
        assert len(self._protected) <= self._protected_places
        assert self._candidate is None or self._candidate in self._probation
