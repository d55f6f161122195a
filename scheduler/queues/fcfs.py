"""First come, first served: the order of the paper, and the default."""

from __future__ import annotations

from scheduler.line import Key
from scheduler.requests import Request


class FCFS:
    """The request that has arrived first begins first."""

    name = "fcfs"
    trust = 0.0

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return the time of arrival."""
        return (request.arrived_s,)

    def on_leave(self, request: Request, *, started: bool) -> dict[str, Key]:
        """Change no key."""
        return {}
