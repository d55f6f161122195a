"""A rank that is not the first of its instance, in virtual time: it joins, and it may die.

Used by `world.py`. What it computes and moves is part of the first rank's runner (runner.py).
"""

from __future__ import annotations

from mooncake_lite.ranks.computing.machine import NewTerm
from mooncake_lite.simulator.surroundings import Surroundings


class StageModel:
    """One rank. term: number of the latest conductor that it knows."""

    def __init__(self, number: int, world: Surroundings) -> None:
        self.number, self.term, self._world = number, 0, world

    def on(self, news: NewTerm) -> None:
        """Join a new conductor."""
        self.term = news.number
        self._world.answer(self._world.shape.hello(self.number, self.term))
