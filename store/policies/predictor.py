"""Predictions of the next use of a block, learned while serving from similar blocks.

Used by `store.policies.learned`, whose bound holds for any predictions. Pure; time is counted in references.
Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

REMEMBERED = 4
"""Items per block of the capacity whose history is kept, present or not."""
MOST_USES = 4
"""Uses are told apart up to this."""

Kind = tuple[int, int]


class Predictor(Protocol):
    """Predicts the next use of an item, at each reference."""

    def next_use(self, item: int, reference: int) -> float:
        """Note reference number `reference`, to this item; predict the number of the next one to it."""


class ReusePredictor:
    """Predicts by kind: blocks of one kind were used as often, and came back after about as long a time.

        _history  item -> (uses, last reference, kind), the one used longest ago in front
        _kinds    kind -> [seen, came back, sum of gaps]; kind: (uses, bits of the last gap)

    A kind of which one in three came back, after 100 references on average, is predicted to come back after
    100 / (1/3) = 300 references. Kinds begin with one imagined block that came back after `capacity`
    references, so that nothing is certain before it was seen.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._history: OrderedDict[int, tuple[int, int, Kind]] = OrderedDict()
        self._kinds: dict[Kind, list[int]] = {}

    def next_use(self, item: int, reference: int) -> float:
        """Learn from this reference, then predict the next one."""
        uses, gap = 0, 0
        if item in self._history:
            uses, last, kind = self._history.pop(item)
            gap = reference - last
            counts = self._kinds[kind]
            counts[1] += 1
            counts[2] += gap
        kind = (min(uses + 1, MOST_USES), gap.bit_length())
        self._history[item] = (uses + 1, reference, kind)
        if len(self._history) > REMEMBERED * self._capacity:
            self._history.popitem(last=False)
        counts = self._kinds.setdefault(kind, [1, 1, self._capacity])
        counts[0] += 1
        seen, came_back, gaps = counts
        return reference + gaps / came_back * (seen / came_back)
