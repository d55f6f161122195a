"""A computing rank in virtual time: the live rank, driven as `mooncake_lite.ranks.computing.loop` drives it.

Used by `world.py`. What the rank does is decided by the machine that serves; only its runner is modelled.
Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from mooncake_lite.ranks.computing.machine import ComputingRank, NewTerm, Order, Told
from mooncake_lite.simulator.runner import VirtualRunner
from mooncake_lite.simulator.surroundings import Surroundings
from scheduler.instance import Step


class SimulatedRank:
    """One rank.

    rank      the machine
    step_s    seconds that the forward pass under way computes, in a leap their mean; 0 without one
    most      forward passes that one step may stand for
    _inbox    orders that have come since the step under way began
    _alarm    number of the latest alarm for the end of a step; an earlier one changes nothing
    """

    def __init__(
        self, rank: ComputingRank, runner: Callable[..., VirtualRunner], world: Surroundings, most: int
    ) -> None:
        """runner: makes its runner, as VirtualRunner."""
        self.rank, self.number = rank, rank.number
        self.most, self._alarm = most, 0
        self.step_s = 0.0
        self._world = world
        self._runner = runner(self.number, world, self._wake, self._set_alarm)
        self._inbox: list[Order] = []
        self._runs = self._leaps = False

    def on(self, order: Order) -> None:
        """Take an order. The rank looks at it before its next step."""
        self._inbox.append(order)
        self._wake()

    @property
    def term(self) -> int:
        """Return the number of the latest conductor that it knows of, or is about to."""
        news = [order.number for order in self._inbox if isinstance(order, NewTerm)]
        return max([self.rank.term, *news])

    def _wake(self) -> None:
        """Let the rank look at what has come. A leap under way ends with its present pass."""
        if self.number in self._world.dead:
            return
        if not self._runs:
            self._turns()
        elif self._leaps:
            self._leaps = False
            self._set_alarm(self._runner.cut())
        elif any(told := self._runner.moved()):
            self._tell(self.rank.moved(*told, self._world.clock.now))

    def _set_alarm(self, time: float) -> None:
        """End the step under way at this time."""
        self._alarm += 1
        self._world.clock.at(time, partial(self._end, self._alarm))

    def _turns(self) -> None:
        """Read, decide, compute, tell, until a step takes time, or there is nothing left but to wait."""
        clock, rank = self._world.clock, self.rank
        self._runs = True
        while True:
            inbox, self._inbox = self._inbox, []
            for order in inbox:
                self._tell(rank.on(order, clock.now))
            step = rank.step(clock.now, self.most)
            computed_at = self._runner.begin(step)
            if step.chunks:
                self.step_s, self._leaps = (computed_at - clock.now) / step.steps, step.steps > 1
                return
            result = self._runner.end()
            self._tell(rank.ended(result, clock.now))
            changed = step.admit or step.preempt or step.lands or step.saves
            if not (changed or result.halves or result.puts or result.late or self._inbox):
                break
        self._runs = False
        self._wait(step)

    def _end(self, alarm: int) -> None:
        """End a step that took time, and go on."""
        if alarm != self._alarm or self.number in self._world.dead or self._runner.is_stuck:
            return
        self.step_s, self._leaps = 0.0, False
        self._tell(self.rank.ended(self._runner.end(), self._world.clock.now))
        self._turns()

    def _wait(self, step: Step) -> None:
        """Look again when the rank has to act without a message."""
        deadline = self.rank.state.next_deadline(step.now)
        if deadline < inf:
            self._world.clock.at(deadline, self._wake)

    def _tell(self, told: Iterable[Told]) -> None:
        for message, gateway, times_s in told:
            if gateway:
                self._world.tokens(self.number, message, times_s or (self._world.clock.now,))
            else:
                self._world.answer(message)
