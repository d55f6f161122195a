"""The loop of the steward: tells the conductor who is lost, and starts conductor and gateway again.

It decides nothing about ranks or requests. Explained in docs/explain/failures.md.
"""

from __future__ import annotations

import sys
import time

from mooncake_lite import messages as m
from mooncake_lite.launch.rank_process import STOP_EXTRA_S
from mooncake_lite.ranks.steward.children import Child
from mooncake_lite.ranks.steward.losses import Loss, LossQueue
from transport.channel import Spoke
from transport.engine import TransferEngine
from transport.membership import Monitor
from transport.world import World

LAST_WORD_S = 0.05
"""A Stop may still be on its way when the conductor has ended: it crosses a socket of this host."""

TICK_S = 0.1
"""Longest wait for a message, which a loss ends. Any value works that costs little CPU."""


class Steward:
    """Keeps conductor and gateway alive.

    spoke    to the conductor, under the name "steward"
    stop     why the cluster ends; None while it does not
    """

    def __init__(
        self,
        spoke: Spoke,
        monitor: Monitor,
        world: World,
        transfers: TransferEngine,
        losses: LossQueue,
        conductor: Child,
        gateway: Child,
    ) -> None:
        self._spoke, self._monitor, self._transfers, self._losses = spoke, monitor, transfers, losses
        self._conductor, self._gateway = conductor, gateway
        self._world, self._failed = world, set[int]()
        self.stop: m.Stop | None = None
        self._was_ready = False
        self._lost: list[m.RankLost] = []
        monitor.watch_pid(gateway.name, gateway.pid)
        self._greet()

    def run(self) -> m.Stop:
        """Serve until the cluster ends. Returns the Stop, once the conductor has ended too."""
        while self.stop is None:
            self.turn(TICK_S)
        until = time.monotonic() + self.stop.grace_s + 2 * STOP_EXTRA_S
        while self._conductor.runs and time.monotonic() < until:
            self.turn(TICK_S / 2)
        return self.stop

    def turn(self, wait_s: float) -> None:
        """Read messages and losses. Waits wait_s at most."""
        self._read(wait_s)
        if self.stop is None and not self._world.one_node:
            self._ask_mpi()
        while (loss := self._losses.take()) is not None:
            self._on_lost(loss)

    def _read(self, wait_s: float) -> None:
        for message in self._spoke.receive(wait_s):
            match message:
                case m.Conducting():
                    self._monitor.term = message.term
                case m.Readiness():
                    self._was_ready = self._was_ready or message.ready
                    self._monitor.starting = not self._was_ready
                case m.EndRank():
                    reason = message.reason.removeprefix("failed: ")
                    self._monitor.end(f"rank-{message.rank}", f"failed: {reason}")
                case m.Stop():
                    self.stop = self.stop or message

    def _ask_mpi(self) -> None:
        """Report ranks of other hosts that MPI knows to have failed: much sooner than their silence does."""
        for rank in set(self._world.failed_ranks()) - self._failed:
            self._failed.add(rank)
            if rank not in self._world.node_ranks:  # the monitor sees the ends of those
                self._monitor.end(f"rank-{rank}", "MPI reports that it failed")

    def _on_lost(self, loss: Loss) -> None:
        """Pass on the loss of a rank, and replace a conductor or gateway. When all is to end, they may."""
        if loss.name.startswith("rank-"):
            self._on_rank_lost(loss)
        elif self.stop is None and loss.name == self._conductor.name:
            self._read(LAST_WORD_S)
            if self.stop is None:
                self._on_conductor_lost(self._conductor.end_of(loss.reason))
        elif self.stop is None and loss.name == self._gateway.name:
            self._on_gateway_lost(self._gateway.end_of(loss.reason))

    def _on_rank_lost(self, loss: Loss) -> None:
        why = loss.reason if loss.reason.startswith("failed: ") else f"died: {loss.reason}"
        lost = m.RankLost(int(loss.name.removeprefix("rank-")), 0, why, loss.ended)
        if lost.rank:
            self._lost.append(lost)
            self._transfers.mark_lost(lost.rank, why)
        self._spoke.send(lost)

    def _on_conductor_lost(self, reason: str) -> None:
        if not (self._was_ready and self._conductor.may_start_again):
            self.stop = m.Stop(reason, 0.0, True)
            return
        print(f"mooncake-lite: {reason}; the next one takes over", file=sys.stderr, flush=True)
        self._conductor.start(term=self._conductor.number + 1, lost=self._lost)
        self._spoke.renew()
        self._greet()

    def _greet(self) -> None:
        """Speak to a new conductor, and watch it."""
        self._monitor.watch_pid(self._conductor.name, self._conductor.pid)
        self._spoke.send(m.StewardHello())

    def _on_gateway_lost(self, reason: str) -> None:
        name, again = self._gateway.name, self._gateway.may_start_again
        if again:
            print(f"mooncake-lite: {reason}; the next one starts", file=sys.stderr, flush=True)
            self._gateway.start()
            self._monitor.watch_pid(self._gateway.name, self._gateway.pid)
        self._spoke.send(m.GatewayLost(name, reason, not again))
