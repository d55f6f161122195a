"""How long modelled ranks take: the truth, which the control plane only learns from reports.

Used by the models of ranks. The form in this file draws every time, for runs with faults; that of experiments
is in `profiled.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_lite.simulator.clock import Action, Clock
from store.objects import BlockRef

PREFILL_S_PER_TOKEN = 0.002
STEP_S = 0.02
TRANSFER_S_PER_BLOCK = 0.001

Seconds = NDArray[np.floating[Any]]


class Hardware(Protocol):
    """The ranks' engines and the network between them."""

    def prefill_s(self, rank: int, num_tokens: int, cached: int) -> float:
        """Return the seconds in which a rank computes a prompt, of which `cached` tokens are in its pages."""

    def step_ends_s(self, rank: int, batch: int, context_tokens: int, steps: int) -> Seconds:
        """Return when each of the next decode steps ends: (steps,) seconds from now, ascending.

        batch            sequences that the rank decodes
        context_tokens   of all of them together, before the first step
        """

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Read blocks of the pool into the pages of a rank, or into its segment."""

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Write blocks from the pages of a rank into the pool."""


class DrawnHardware:
    """Ranks of no machine in particular. Times of prefill and transfers vary by a factor of three."""

    def __init__(self, clock: Clock, dice: Random) -> None:
        self._clock, self._dice = clock, dice

    def prefill_s(self, rank: int, num_tokens: int, cached: int) -> float:
        """Draw the time of a prompt, in proportion to its computed tokens."""
        return (num_tokens - cached) * PREFILL_S_PER_TOKEN * self._factor()

    def step_ends_s(self, rank: int, batch: int, context_tokens: int, steps: int) -> Seconds:
        """Return multiples of STEP_S, whatever is decoded."""
        return STEP_S * np.arange(1, steps + 1)

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Draw the time of a transfer, in proportion to its blocks."""
        self._clock.after(len(refs) * TRANSFER_S_PER_BLOCK * self._factor(), done)

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """As `read`."""
        self.read(rank, refs, done)

    def _factor(self) -> float:
        return 0.5 + self._dice.random()
