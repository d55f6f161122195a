"""How long simulated ranks take: the truth, which the control plane only learns from reports.

Used by `runner.py` and `store_rank.py`. The form in this file draws every time, for runs with faults; that of
experiments is in `profiled.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from mooncake_lite.profiles.compute import ComputeCost, PassLoad, Terms
from mooncake_lite.simulator.clock import Action, Clock
from store.objects import BlockRef

PREFILL_S_PER_TOKEN = 0.002
STEP_S = 0.02
TRANSFER_S_PER_BLOCK = 0.001
"""Times of the fault world: of the order of a small machine's. Only their ratios matter there, and no
profile is needed."""


class Hardware(Protocol):
    """The ranks' engines and the network between them."""

    def pass_s(self, rank: int, load: PassLoad) -> float:
        """Return the seconds of a forward pass of a rank."""

    def stream(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Read blocks of the pool into the pages of a rank, by layers beside a pass."""

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Read blocks of the pool into the pages of a rank, or into its segment."""

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Write blocks from the pages of a rank into the pool."""

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes of all transfers so far, by what they went over."""


class DrawnHardware:
    """Ranks of no machine in particular. Times of prefill and transfers vary by a factor of three."""

    def __init__(self, clock: Clock, dice: Random) -> None:
        self._clock, self._dice = clock, dice
        self._cost = ComputeCost(Terms(0.0, PREFILL_S_PER_TOKEN, 0.0), Terms(STEP_S, 0.0, 0.0))

    def pass_s(self, rank: int, load: PassLoad) -> float:
        """Draw the time of a pass. A pass without prompts always takes STEP_S."""
        seconds = self._cost.seconds(load)
        return seconds * self._factor() if load.new_tokens else seconds

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Draw the time of a transfer, in proportion to its blocks."""
        self._clock.after(len(refs) * TRANSFER_S_PER_BLOCK * self._factor(), done)

    stream = write = read

    def bytes_moved(self) -> dict[str, int]:
        """Return nothing: nobody asks in runs with faults."""
        return {}

    def _factor(self) -> float:
        return 0.5 + self._dice.random()
