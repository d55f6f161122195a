"""Shortest remaining processing time: the shortest predicted prefill begins first.

The least mean time in the system on one server (L. Schrage, "A proof of the optimality of the shortest
remaining processing time discipline", Operations Research, 1968). A long prompt may wait forever: see
aged_srpt.py. A prefill that has begun is not interrupted.
"""

from __future__ import annotations

from scheduler.line import Key
from scheduler.queues.contract import Queue
from scheduler.requests import Request


class SRPT(Queue):
    """The request with the fewest predicted prefill seconds begins first."""

    name = "srpt"

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return the predicted seconds of the prefill; of equal ones the first to arrive."""
        return prefill_s, request.arrived_s
