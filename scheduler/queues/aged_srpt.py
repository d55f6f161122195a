"""Aged SRPT: the shortest predicted prefill first, but no request waits forever.

    key = S + a * arrival        S predicted prefill seconds, a ageing

A request that arrives more than S / a after this one has a larger key, whatever its own S: it cannot pass.
The order does not change while requests wait, because all of them age alike. a = 0 is SRPT, a large a FCFS.
"""

from __future__ import annotations

from scheduler.line import Key
from scheduler.queues.contract import Queue
from scheduler.requests import Request

AGEING = 0.1
"""Seconds of prefill that a second of waiting is worth: no request passes a prefill of 3 s after 30 s."""


class AgedSRPT(Queue):
    """The request with the least S + a * arrival begins first."""

    name = "aged-srpt"

    def __init__(self, ageing: float = AGEING) -> None:
        self._ageing = ageing

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return S + a * arrival."""
        return prefill_s + self._ageing * request.arrived_s, request.arrived_s
