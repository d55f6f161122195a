"""First come, first served: the order of the paper, and the default."""

from __future__ import annotations

from scheduler.line import Key
from scheduler.queues.contract import Queue
from scheduler.requests import Request


class FCFS(Queue):
    """The request that has arrived first begins first."""

    name = "fcfs"

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return the time of arrival."""
        return (request.arrived_s,)
