"""Bounded queue: refuse requests that would wait too long, by number and by time.

It looks at no limit on latency but the one after which the client gives up. All other forms but `none` begin
with it, so that no line grows without bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.admission.contract import Admission, retry_after_s
from scheduler.admission.predicted import begins_s, predicted_wait_s
from scheduler.requests import Rejection, Request

if TYPE_CHECKING:
    from scheduler.state import State


class BoundedQueue(Admission):
    """Refuses a request if `max_queue` others wait, or if its predicted wait exceeds its limit."""

    name = "bounded-queue"

    def on_arrival(self, state: State, request: Request, now: float) -> Rejection | None:
        """Refuse a request if the line is full, or its wait would exceed its limit."""
        refused = super().on_arrival(state, request, now)
        if refused is not None:
            return refused
        name = request.request_id
        if state.num_waiting >= state.max_queue:
            reason = f"{state.num_waiting} requests are waiting, the limit is {state.max_queue}"
            return Rejection(name, reason, retry_after_s(begins_s(state, request, now)))
        if state.costs.is_measured:  # a guess is no reason to refuse
            wait_s = predicted_wait_s(state, now)
            if wait_s > request.wait_limit_s:
                reason = (
                    f"the predicted wait is {round(wait_s, 1):g} s, "
                    f"the limit {round(request.wait_limit_s, 1):g} s; "
                    "send it again when less is waiting"
                )
                return Rejection(name, reason, retry_after_s(wait_s - request.wait_limit_s))
        return None
