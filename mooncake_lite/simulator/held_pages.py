"""Which blocks a modelled rank that prefills has in its own pages, as it tells the control plane.

Used by `compute_ranks.py`. The reports are hints; at the end of a run the world compares the control plane's
index of pages with what ranks hold. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mooncake_lite.control.events import InstanceReport
from mooncake_lite.simulator.surroundings import Surroundings

LATE = 0.3
"""Share of changes that are told later than at once, perhaps together with others."""


class HeldPages:
    """The blocks in one rank's pages.

    keys     of the blocks, those that were used longest ago first
    _told    those that the control plane was told of
    """

    def __init__(self, number: int, world: Surroundings) -> None:
        self.keys: OrderedDict[int, None] = OrderedDict()
        self._told: dict[int, None] = {}
        self._number = number
        self._world = world

    def leading(self, keys: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt are here."""
        return next((number for number, key in enumerate(keys) if key not in self.keys), len(keys))

    def use(self, keys: Sequence[int]) -> None:
        """Bring the blocks of a prompt into pages. The end of the oldest prompt is evicted first."""
        for key in reversed(keys):
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > self._world.shape.page_blocks:
            self.keys.popitem(last=False)
        self._changed()

    def forget(self) -> None:
        """Drop all blocks."""
        self.keys.clear()
        self._changed()

    def _changed(self) -> None:
        if self._world.dice.random() < LATE:
            self._world.clock.after(self._world.dice.random(), self._report)
        else:
            self._report()

    def _report(self) -> None:
        """Tell what has changed since the last report."""
        stored = [key for key in self.keys if key not in self._told]
        removed = [key for key in self._told if key not in self.keys]
        self._told = dict(self.keys)
        if stored or removed:
            self._world.answer(InstanceReport(self._number, 0, stored, removed))
