"""Earliest deadline first: the request whose limit on TTFT comes first begins first.

Meets all deadlines of one server that any order meets (C. Liu and J. Layland, Journal of the ACM, 1973);
under overload it serves those that are late already, so it wants an admission that refuses.
"""

from __future__ import annotations

from scheduler.line import Key
from scheduler.queues.contract import Queue
from scheduler.requests import Request


class EarliestDeadline(Queue):
    """The request with the least arrival + limit on TTFT begins first; those without a limit come last."""

    name = "deadline"

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return the deadline; of equal ones the first to arrive."""
        return request.arrived_s + request.slo_ttft_s, request.arrived_s
