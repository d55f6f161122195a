"""Start-time fair queueing between service classes, and between the tenants of a class.

    start  S = max(v, finish of the flow's request before)      v: start of the request that began last
    finish F = S + predicted prefill seconds / rate of the flow
    the least S begins first

A flow is a tenant of a class; its rate is the class's weight over the number of tenants of the class that
wait. The bound (P. Goyal, H. Vin and H. Cheng, "Start-time fair queueing", IEEE/ACM Transactions on
Networking, 1997): while two flows f and g both wait on one server, the seconds W that each got satisfy
|W_f / r_f - W_g / r_g| <= l_f / r_f + l_g / r_g, with l the largest request of each. W counts predicted
seconds, so the bound does not depend on how well they are predicted.

A request that ends while it waits got no service. The later ones of its flow get the tags that they would
have without it. The bound still holds: the new tag of the next one is at least the old tag of the one that
ended, and on one server no request that waits has a tag below v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.line import Key
from scheduler.queues.contract import Queue
from scheduler.requests import Request

MOST_FLOWS = 10_000
"""Most flows that are remembered; beyond it, those without requests whose finish is past are forgotten.

Any value works that exceeds the flows that wait at one time: to forget a past finish changes no tag.
"""


@dataclass(slots=True)
class _Tagged:
    """One request: v at its arrival, its seconds over the rate of its flow, and its start tag."""

    request: Request
    virtual: float
    length: float
    start: float
    begun: bool = False

    @property
    def finish(self) -> float:
        return self.start + self.length


@dataclass(slots=True)
class _Flow:
    """The requests of a flow in the order of their arrival, from the first one that waits.

    With several servers, some of them may have begun before it.

    finish   finish tag of the request before the first one here
    """

    finish: float = 0.0
    requests: dict[str, _Tagged] = field(default_factory=dict)

    def last_finish(self) -> float:
        """Return the finish tag of the last request."""
        return self.requests[next(reversed(self.requests))].finish if self.requests else self.finish

    def begin(self, request_id: str) -> None:
        """Note that a request begins. Drops those at the front that have begun."""
        self.requests[request_id].begun = True
        while self.requests and (first := next(iter(self.requests.values()))).begun:
            self.finish = first.finish
            del self.requests[first.request.request_id]

    def end(self, request_id: str) -> dict[str, Key]:
        """Drop a request that waits. Returns the new keys of the others that wait."""
        del self.requests[request_id]
        finish, changed = self.finish, dict[str, Key]()
        for name, one in self.requests.items():
            start = max(one.virtual, finish)
            if start != one.start and not one.begun:
                changed[name] = (start, one.request.arrived_s)
            one.start = start
            finish = one.finish
        return changed


class FairShares(Queue):
    """The request with the least start tag begins first.

    _waiting  class -> tenants with requests that wait -> how many
    """

    name = "fair"

    def __init__(self, weights: Sequence[float] = (1.0,)) -> None:
        """weights: of the service classes, by class_id."""
        self._weights = weights
        self._virtual = 0.0
        self._flows: dict[tuple[int, str], _Flow] = {}
        self._waiting: dict[int, dict[str, int]] = {}

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return the start tag; of equal ones the first to arrive."""
        tenants = self._waiting.setdefault(request.class_id, {})
        tenants[request.tenant] = tenants.get(request.tenant, 0) + 1
        rate = self._weights[request.class_id] / len(tenants)
        flow = self._flows.setdefault((request.class_id, request.tenant), _Flow())
        start = max(self._virtual, flow.last_finish())
        flow.requests[request.request_id] = _Tagged(request, self._virtual, prefill_s / rate, start)
        if len(self._flows) > MOST_FLOWS:
            self._flows = {
                name: one for name, one in self._flows.items() if one.requests or one.finish > self._virtual
            }
        return start, request.arrived_s

    def on_leave(self, request: Request, *, started: bool) -> dict[str, Key]:
        """Move v to the start tag of a request that begins; tag the others anew if it ended before."""
        flow = self._flows.get((request.class_id, request.tenant))
        if flow is None or request.request_id not in flow.requests:
            return {}  # it had begun before, and was first in its line
        tagged = flow.requests[request.request_id]
        if tagged.begun:
            return {}
        tenants = self._waiting[request.class_id]
        tenants[request.tenant] -= 1
        if not tenants[request.tenant]:
            del tenants[request.tenant]
        if not started:
            return flow.end(request.request_id)
        self._virtual = max(self._virtual, tagged.start)
        flow.begin(request.request_id)
        return {}
