"""The loop of a computing rank: reads messages and a clock, and gives steps to a runner.

`machine.py` decides everything; `engine.Runner` carries steps out. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mooncake_lite.engine.contract import OnMoved
from mooncake_lite.messages import GatewayAt, MarkLost
from mooncake_lite.ranks.computing.gateway_link import GatewayLink
from mooncake_lite.ranks.computing.machine import ComputingRank, NewTerm, Order, Told
from mooncake_lite.ranks.conductor_link import ConductorLink
from scheduler.instance import DECODE, Late, Result, Step, TransferEnded

IDLE_WAIT_S = 0.2
"""Longest wait for a message, shorter than the interval of metrics reports (`metrics.REPORT_EVERY_S`)."""


class StepRunner(Protocol):
    """Carries out steps: engine.Runner, or one that stands in for it or around it."""

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Do the parts of a step, without waiting for transfers to end. Calls moved with those of halves that
        end while it computes."""


class Loop:
    """The loop of a rank that computes.

    rank      the machine; rank.state.duties says what it serves
    runner    carries steps out
    """

    def __init__(
        self, rank: ComputingRank, conductor: ConductorLink, gateway: GatewayLink, runner: StepRunner
    ) -> None:
        self.rank, self.runner = rank, runner
        self._conductor, self._gateway = conductor, gateway

    def run(self) -> None:
        """Serve until told to stop, or until the conductor is gone."""
        while not self._conductor.stopping:
            self.turn(0.0 if self.rank.state.busy else IDLE_WAIT_S)

    def turn(self, wait_s: float) -> None:
        """Read, decide, compute, tell. Waits wait_s at most for messages."""
        for order in self._read(wait_s):
            self._tell(self.rank.on(order, time.monotonic()))
        step = self.rank.step(time.monotonic())  # decide
        result = self.runner.run(step, self._moved)  # compute
        self._tell(self.rank.ended(result, time.monotonic()))  # tell

    def close(self, limit_s: float, leave: Callable[[], object] | None = None) -> int:
        """Deliver tokens. Returns the number of dropped blocks: none, it has nothing to save.

        leave   tells the other ranks of its instance to end
        """
        if leave is not None:
            leave()
        self._gateway.close()
        return 0

    def _read(self, wait_s: float) -> list[Order]:
        """Return the conductor's orders about the rank's work. Waits wait_s at most."""
        self._conductor.report_when_due(self._values, self.rank.reused)
        orders: list[Order] = []
        if term := self._conductor.new_term():
            orders.append(NewTerm(term))
            wait_s = 0.0
        for message in self._conductor.receive(wait_s):
            if isinstance(message, GatewayAt):
                self._gateway.meet(message)
            elif not isinstance(message, MarkLost):
                orders.append(message)
        return orders

    def _moved(self, halves: Sequence[TransferEnded], late: Sequence[Late] = ()) -> None:
        self._tell(self.rank.moved(halves, late, time.monotonic()))

    def _tell(self, told: Iterable[Told]) -> None:
        for message, gateway, _ in told:
            if not gateway:
                self._conductor.send(message)
            elif not self._gateway.send(gateway, message):
                self.rank.counters["token_messages_dropped_total"] += 1

    def _values(self) -> dict[str, float]:
        """Return what the rank has counted, and what the planner's books hold now."""
        state = self.rank.state
        used = len(state.pages.held)
        values: dict[str, float] = {
            **self.rank.counters,
            "kv_cache_usage_perc": used / state.pages.num_pages,
            "kv_cache_pages_used": used,
            "kv_cache_pages": state.pages.num_pages,
        }
        if DECODE in state.duties:
            values["decode_requests_running"] = len(state.running)
            values["decode_requests_waiting"] = state.num_waiting
            values["decode_puts_dropped_total"] = state.dropped_puts
        return values
