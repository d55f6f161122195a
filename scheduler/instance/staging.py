"""Staging accounting: two halves for blocks on their way, and single slots for blocks that decode fills.

Used by the planner, which owns the numbers; the runner owns the bytes. Each half is one resource: one group
of blocks occupies it, from before its first byte until after its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from scheduler.instance.task import Task

HALVES = 2
"""Two, so that one is filled by a transfer while the other is copied into pages."""


@dataclass(slots=True)
class HalfUse:
    """The group of blocks that occupies a half.

    kind    reading: blocks of the pool are on their way into it; landed: they wait to be put into pages
            writing: its blocks are on their way to the pool
    task    that owns the blocks; None: the task was cancelled, and only the transfer has to end
    first   number of the first block within job.load or Task.out
    count   number of blocks
    pages   that are copied into it, and may have no other user any more: a sequence that finds its tokens in
            the prefix cache leaves its own pages
    """

    kind: Literal["reading", "landed", "writing"]
    task: Task | None
    first: int
    count: int
    pages: Sequence[int] = ()


@dataclass(slots=True)
class Staging:
    """The staging memory of one rank.

    half_blocks   blocks per half
    num_slots     single slots, numbered from 0
    halves        use of each half, None when it is free
    free_slots    numbers of the free slots; the last one is taken first
    """

    half_blocks: int
    num_slots: int
    halves: list[HalfUse | None] = field(default_factory=lambda: [None] * HALVES)
    free_from: list[float] = field(default_factory=lambda: [0.0] * HALVES)
    free_slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free_slots = list(range(self.num_slots))

    def free_halves(self, now: float) -> list[int]:
        """Return the numbers of the halves that may be used."""
        return [n for n, use in enumerate(self.halves) if use is None and self.free_from[n] <= now]

    def free(self, half: int, free_from: float = 0.0) -> None:
        """End the use of a half. Late bytes may come into it until `free_from`."""
        self.halves[half] = None
        self.free_from[half] = free_from

    def of(self, task: Task | None) -> list[int]:
        """Return the halves that a task occupies."""
        return [n for n, use in enumerate(self.halves) if use is not None and use.task is task]

    def is_reading(self, task: Task) -> bool:
        """Tell whether a group of a task is on its way into a half."""
        return any(use is not None and use.kind == "reading" and use.task is task for use in self.halves)

    def occupy(self, half: int, use: HalfUse) -> None:
        """Give a free half to a group of blocks."""
        assert self.halves[half] is None, f"staging half {half} is in use"
        self.halves[half] = use

    def take_slots(self, slots: list[int]) -> None:
        """Take free slots, in the order in which a step chose them."""
        for slot in slots:
            assert self.free_slots[-1:] == [slot], f"slot {slot} is not the next free slot"
            self.free_slots.pop()
