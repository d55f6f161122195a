"""Bounded queue: refuse what would wait too long, by number and by time.

It looks at no limit on latency but the one after which the client gives up. All other forms but `none` begin
with it, so that no line grows without bound.
"""

from __future__ import annotations

import numpy as np

from scheduler.admission.contract import AdmitAll, retry_after_s
from scheduler.requests import Rejection, Request
from scheduler.state import State


class BoundedQueue(AdmitAll):
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
            return Rejection(name, reason, retry_after_s(turn_s(state, now)))
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


def predicted_wait_s(state: State, now: float) -> float:
    """Predict the time until the prefill of a new request could begin.

    The prefill instances share the held line. The request then waits for the instance that is free first. The
    time until a decode slot is free is not predicted.
    """
    if not state.prefills:
        return 0.0
    held_s = state.costs.held_s(state.held.prefill_s) / len(state.prefills)
    return float(state.queue_s(now).min()) + held_s


def turn_s(state: State, now: float) -> float:
    """Predict the time until the shortest queue moves by one request."""
    if not state.prefills:
        return 0.0
    waiting = np.array([len(one.queue) + 1 for one in state.prefills.values()])
    return float((state.queue_s(now) / waiting).min())
