"""How long simulated ranks take: the truth, which the control plane only learns from reports.

Used by `runner.py` and `store_rank.py`. The form in this file draws every time, for worlds of no machine in
particular; that of experiments is in `profiled.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from mooncake_lite.profiles.compute import ComputeCost, PassLoad, PassTerms
from mooncake_lite.simulator.clock import Action, Clock
from store.objects import BlockRef

PREFILL_S_PER_TOKEN = 0.002
STEP_S = 0.02
TRANSFER_S_PER_BLOCK = 0.001
"""Of the order of a small machine's: only their ratios matter."""

WORK_S = 0.05
"""How long a disk takes for an order, at most, unless it is slow."""


class Hardware(Protocol):
    """The ranks' engines, the network between them, and their disks.

    step_s      from the end of a forward pass of a rank to the begin of its next one
    message_s   that a control message takes, at most
    request_s   of a request in the gateway, both ways
    """

    step_s: float
    message_s: float
    request_s: float

    def pass_s(self, rank: int, load: PassLoad) -> float:
        """Return the seconds of a forward pass of a rank."""

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Read blocks of the pool into the pages of a rank.

        least_s   that it takes at least: most of the pass beside which the blocks come
        """

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Write blocks from the pages of a rank into the pool.

        least_s   that it takes at least: the pass that fills the pages
        """

    def copy(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Read blocks of the pool into the segment of a store rank."""

    def load(self, rank: int, nbytes: int, done: Action) -> None:
        """Read from the SSD tier of a store rank."""

    def save(self, rank: int, nbytes: int, done: Action) -> None:
        """Write behind to the SSD tier of a store rank."""

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes of all transfers so far, by what they went over."""

    def count(self, load: PassLoad, passes: int) -> None:
        """Note that so many passes like this one were done."""

    def outside(self) -> dict[str, float]:
        """Return the share of the passes of prompts, and of decode steps, that no measurement covers."""

    def notice_s(self) -> float:
        """Return how long it takes until the end of a process is known."""

    def away_s(self, rank: int) -> float:
        """Return the time that a message between this rank and the conductor needs between two sites."""


class DrawnHardware:
    """Ranks of no machine in particular. Times of prefill and transfers vary by a factor of three."""

    step_s, message_s, request_s = 0.0, 0.002, 0.0

    def __init__(self, clock: Clock, dice: Random) -> None:
        self._clock, self._dice = clock, dice
        self._cost = ComputeCost(PassTerms(0.0, PREFILL_S_PER_TOKEN, 0.0), PassTerms(STEP_S, 0.0, 0.0))

    def pass_s(self, rank: int, load: PassLoad) -> float:
        """Draw the time of a pass. A pass without prompts always takes STEP_S."""
        seconds = self._cost.seconds(load)
        return seconds * self._factor() if load.new_tokens else seconds

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Draw the time of a transfer, in proportion to its blocks."""
        self._clock.after(max(least_s, len(refs) * TRANSFER_S_PER_BLOCK * self._factor()), done)

    write = copy = read

    def load(self, rank: int, nbytes: int, done: Action) -> None:
        """Draw the time of a read."""
        self._clock.after(self._dice.random() * WORK_S, done)

    def save(self, rank: int, nbytes: int, done: Action) -> None:
        """Draw the time of a write."""
        self._clock.after(self._dice.random(), done)

    def bytes_moved(self) -> dict[str, int]:
        """Return nothing: no experiment has this hardware."""
        return {}

    def count(self, load: PassLoad, passes: int) -> None:
        """Count nothing."""

    def outside(self) -> dict[str, float]:
        """Return nothing: no times are measured ones."""
        return {}

    def notice_s(self) -> float:
        """Draw how long it takes: at once, or when its connection is given up."""
        return self._dice.choice((0.01, 0.1, 9.0)) * self._dice.random()

    def away_s(self, rank: int) -> float:
        """Return 0: there are no sites."""
        return 0.0

    def _factor(self) -> float:
        return 0.5 + self._dice.random()
