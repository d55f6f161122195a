"""Start-time fair queueing between service classes, and between the tenants of a class.

    start  S = max(v, finish of the flow's request before)      v: start of the request that began last
    finish F = S + predicted prefill seconds / rate of the flow
    the least S begins first

A flow is a tenant of a class; its rate is the class's weight over the number of tenants of the class that
wait. The bound (P. Goyal, H. Vin and H. Cheng, "Start-time fair queueing", IEEE/ACM Transactions on
Networking, 1997): while two flows f and g both wait on one server, the seconds W that each got satisfy
|W_f / r_f - W_g / r_g| <= l_f / r_f + l_g / r_g, with l the largest request of each. W counts predicted
seconds, so the bound does not depend on how well they are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.line import FIRST, Key
from scheduler.requests import Request

MOST_FLOWS = 10_000
"""Flows that are remembered; those whose finish is past are forgotten when there are more."""


class FairShares:
    """The request with the least start tag begins first.

    _finish   flow -> finish tag of its last request
    _waiting  class -> tenants with requests that wait -> how many
    """

    name = "fair"
    trust = 0.0

    def __init__(self, weights: Sequence[float] = (1.0,)) -> None:
        """weights: of the service classes, by class_id."""
        self._weights = weights
        self._virtual = 0.0
        self._finish: dict[tuple[int, str], float] = {}
        self._waiting: dict[int, dict[str, int]] = {}

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return the start tag; of equal ones the first to arrive."""
        flow = request.class_id, request.tenant
        tenants = self._waiting.setdefault(request.class_id, {})
        tenants[request.tenant] = tenants.get(request.tenant, 0) + 1
        rate = self._weights[request.class_id] / len(tenants)
        start = max(self._virtual, self._finish.get(flow, 0.0))
        self._finish[flow] = start + prefill_s / rate
        if len(self._finish) > MOST_FLOWS:
            self._finish = {flow: at for flow, at in self._finish.items() if at > self._virtual}
        return start, request.arrived_s

    def on_leave(self, request: Request, key: Key, *, started: bool) -> None:
        """Move the virtual time to the start tag of a request that begins."""
        if key == FIRST:
            return
        tenants = self._waiting[request.class_id]
        tenants[request.tenant] -= 1
        if not tenants[request.tenant]:
            del tenants[request.tenant]
        if started:
            self._virtual = max(self._virtual, key[0])
