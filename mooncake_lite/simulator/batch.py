"""The batch of a modelled rank: all sequences that it decodes get one token in each step.

Used by `decode_rank.py`. Many steps pass in one event: until the first sequence has all that it wants, or
another one comes or goes. Explained in docs/explain/control.md.

    stretch   begins |-----|-----|-----|--...--|     steps of one set of sequences
                           ^ a sequence joins here: the step under way ends, and a new stretch begins
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.hardware import Hardware, Seconds
from mooncake_lite.simulator.workload import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in a batch.

    left      steps until `reached` is called
    reached   may join the batch again
    """

    request: Request
    left: int
    reached: Callable[[], None]


@dataclass(slots=True)
class Steps:
    """Sums over decode steps, as DecodeEnded reports them."""

    steps: int = 0
    sequences: int = 0
    context_tokens: int = 0
    seconds: float = 0.0


class Batch:
    """The sequences that one rank decodes.

    _running   those of the stretch; _joining: those that begin with the next one
    _ends_s    when the steps of the stretch end, counted from _began_s; None: nothing is decoded
    _stretch   number of the stretch, or of its end; an earlier alarm changes nothing
    _unsent    sums over the steps since the last `take_steps`
    """

    def __init__(self, rank: int, clock: Clock, hardware: Hardware) -> None:
        self._rank, self._clock, self._hardware = rank, clock, hardware
        self._running: list[Sequence] = []
        self._joining: list[Sequence] = []
        self._ends_s: Seconds | None = None
        self._began_s = 0.0
        self._context = self._size = 0
        self._stretch = 0
        self._is_settling = False
        self._unsent = Steps()

    @property
    def step_s(self) -> float:
        """Return the seconds of the step under way; 0 without one."""
        return 0.0 if self._ends_s is None else float(self._ends_s[0])

    def take_steps(self) -> Steps:
        """Return the sums since the last call."""
        taken, self._unsent = self._unsent, Steps()
        return taken

    def join(self, sequence: Sequence) -> None:
        """Decode a sequence from the next step on."""
        self._joining.append(sequence)
        self._change()

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence, if it is here. It gets no token of the stretch under way."""
        for sequences in (self._running, self._joining):
            if sequence in sequences:
                sequences.remove(sequence)
                self._change()

    def _change(self) -> None:
        """End the stretch with the step under way; without one, begin."""
        if self._is_settling:
            return
        if self._ends_s is None:
            self._begin()
            return
        under_way = int(self._ends_s.searchsorted(self._clock.now - self._began_s))
        if under_way + 1 < len(self._ends_s):
            self._ends_s = self._ends_s[: under_way + 1]
            self._set_alarm()

    def _begin(self) -> None:
        """Begin a stretch that lasts until the first sequence has all its steps."""
        self._running += self._joining
        self._joining.clear()
        if not self._running:
            return
        self._began_s, self._size = self._clock.now, len(self._running)
        self._context = sum(one.request.text.num_tokens for one in self._running)
        steps = min(one.left for one in self._running)
        self._ends_s = self._hardware.step_ends_s(self._rank, self._size, self._context, steps)
        self._set_alarm()

    def _set_alarm(self) -> None:
        assert self._ends_s is not None
        self._stretch += 1
        number = self._stretch
        self._clock.at(self._began_s + float(self._ends_s[-1]), lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        """Give the tokens of a stretch to its sequences, and begin the next one."""
        if number != self._stretch or self._ends_s is None:
            return
        ends_s, self._ends_s = self._began_s + self._ends_s, None
        self._count(len(ends_s), float(ends_s[-1]) - self._began_s)
        for one in self._running:
            one.left -= len(ends_s)
            one.request.generate(ends_s)
        reached = [one for one in self._running if not one.left]
        self._running = [one for one in self._running if one.left]
        self._is_settling = True
        for one in reached:
            one.reached()
        self._is_settling = False
        self._begin()

    def _count(self, steps: int, seconds: float) -> None:
        sums = self._unsent
        sums.steps += steps
        sums.sequences += steps * self._size
        sums.context_tokens += steps * self._context + self._size * (steps * (steps - 1) // 2)
        sums.seconds += seconds
