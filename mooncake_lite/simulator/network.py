"""A network whose senders share their bandwidth equally among their transfers.

Used by `profiled.py`. `scheduler.costs.TransferCost` predicts how long a transfer takes when it begins.
Here other transfers that begin or end meanwhile change that. Explained in docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_lite.simulator.clock import Action, Clock


@dataclass(slots=True, eq=False)
class _Flow:
    """A transfer. end: the value of its sender's meter at which all its bytes have been sent."""

    end: float
    done: Action


class Sender:
    """One node's outgoing link.

    _meter     bytes that each transfer would have got, had it been there from the beginning
    _read_s    when the meter was read
    _alarm     number of the latest alarm; an earlier one changes nothing
    """

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._flows: list[_Flow] = []
        self._meter = self._read_s = 0.0
        self._alarm = 0

    def send(self, nbytes: int, done: Action) -> None:
        """Send bytes, and call `done` when all have left."""
        self._read_meter()
        self._flows.append(_Flow(self._meter + nbytes, done))
        self._set_alarm()

    def _read_meter(self) -> None:
        now = self._clock.now
        if self._flows:
            self._meter += (now - self._read_s) * self._bytes_per_s / len(self._flows)
        self._read_s = now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._flows:
            number = self._alarm
            left = min(flow.end for flow in self._flows) - self._meter
            seconds = max(0.0, left) * len(self._flows) / self._bytes_per_s
            self._clock.after(seconds, lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        """End the transfers that had the least left to send."""
        if number != self._alarm:
            return
        self._read_meter()
        least = min(flow.end for flow in self._flows)
        ended = [flow for flow in self._flows if flow.end <= least]
        self._flows = [flow for flow in self._flows if flow.end > least]
        self._set_alarm()
        for flow in ended:
            flow.done()


class Network:
    """The nodes' links, and copies within a node.

    near_bytes_per_s   of a copy within a node; such copies do not slow each other
    far_bytes_per_s    of one sender
    latency_s          of any transfer between nodes
    """

    def __init__(
        self, clock: Clock, near_bytes_per_s: float, far_bytes_per_s: float, latency_s: float
    ) -> None:
        self._clock = clock
        self._near_bytes_per_s, self._far_bytes_per_s = near_bytes_per_s, far_bytes_per_s
        self._latency_s = latency_s
        self._senders: dict[int, Sender] = {}

    def move(self, parts: Mapping[tuple[int, int], int], done: Action) -> None:
        """Move bytes, and call `done` when the last have arrived.

        parts   (sending node, receiving node) -> bytes
        """
        left = sum(nbytes > 0 for nbytes in parts.values())
        if not left:
            self._clock.after(0.0, done)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        for (sender, receiver), nbytes in parts.items():
            if nbytes and sender == receiver:
                self._clock.after(nbytes / self._near_bytes_per_s, one_done)
            elif nbytes:
                self._far(sender).send(nbytes, lambda: self._clock.after(self._latency_s, one_done))

    def _far(self, sender: int) -> Sender:
        if sender not in self._senders:
            self._senders[sender] = Sender(self._clock, self._far_bytes_per_s)
        return self._senders[sender]
