"""The loop of a computing rank: reads messages and a clock, and gives steps to a runner.

`machine.py` decides everything; `engine.Runner` carries steps out. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from mooncake_lite.engine.contract import OnMoved
from mooncake_lite.ranks.computing.connections import Connections
from mooncake_lite.ranks.computing.machine import ComputingRank, Told
from scheduler.instance import Late, Result, Step, TransferEnded

IDLE_WAIT_S = 0.2
"""Longest wait for a message, shorter than the interval of metrics reports (`metrics.REPORT_EVERY_S`)."""


class StepRunner(Protocol):
    """Carries out steps: engine.Runner, or one that stands in for it or around it."""

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Do the parts of a step, without waiting for transfers to end. Calls moved with those of halves that
        end while it computes."""


class Loop:
    """The loop of a rank that computes.

    rank          the machine; rank.state.duties says what it serves
    connections   to the conductor and the gateways
    runner        carries steps out
    """

    def __init__(self, rank: ComputingRank, connections: Connections, runner: StepRunner) -> None:
        self.rank = rank
        self.connections = connections
        self.runner = runner

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.connections.stopping:
            self.turn(0.0 if self.rank.state.busy else IDLE_WAIT_S)

    def turn(self, wait_s: float) -> None:
        """Read, decide, compute, tell. Waits wait_s at most for messages."""
        for order in self.connections.receive(wait_s):  # read
            self._tell(self.rank.on(order, time.monotonic()))
        step = self.rank.step(time.monotonic())  # decide
        result = self.runner.run(step, self._moved)  # compute
        self._tell(self.rank.ended(result, time.monotonic()))  # tell

    def _moved(self, halves: Sequence[TransferEnded], late: Sequence[Late] = ()) -> None:
        self._tell(self.rank.moved(halves, late, time.monotonic()))

    def _tell(self, told: Iterable[Told]) -> None:
        for message, gateway, _ in told:
            if gateway:
                self.connections.to_gateway(gateway, message)
            else:
                self.connections.tell(message)
