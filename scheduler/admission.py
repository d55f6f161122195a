"""Admission: which requests are refused before any work is spent on them.

Asked by `mooncake_lite.control` for each new request, before a policy places it. Pure. Explained in
docs/explain/paper.md, "Overload".
"""

from __future__ import annotations

from scheduler.requests import Rejection, Request
from scheduler.state import State

RETRY_AFTER_LIMITS_S = (1.0, 60.0)


def admit(state: State, request: Request, now: float) -> Rejection | None:
    """Refuse a request if the line is full, or its wait would exceed its limit. None: admitted."""
    name = request.request_id
    if name in state:
        return Rejection(name, f"request id {name} is in use", 0.0)
    if state.num_waiting >= state.max_queue:
        reason = f"{state.num_waiting} requests are waiting, the limit is {state.max_queue}"
        return Rejection(name, reason, _retry_after_s(_turn_s(state)))
    if state.knows_prefill_rate:  # a guess is no reason to refuse
        wait_s = predicted_wait_s(state)
        if wait_s > request.wait_limit_s:
            reason = (
                f"the predicted wait is {round(wait_s, 1):g} s, "
                f"the limit {round(request.wait_limit_s, 1):g} s; "
                "send it again when less is waiting"
            )
            return Rejection(name, reason, _retry_after_s(wait_s - request.wait_limit_s))
    return None


def predicted_wait_s(state: State) -> float:
    """Predict the time until the prefill of a new request could begin, at the measured rate.

    The prefill instances share the uncached tokens of the held line. The request then waits for the instance
    with the fewest pending tokens. The time until a decode slot is free is not predicted.
    """
    if not state.prefills:
        return 0.0
    least = min(one.pending_tokens for one in state.prefills.values())
    return (least + state.held_tokens / len(state.prefills)) * state.prefill_s_per_token


def _turn_s(state: State) -> float:
    """Predict the time until the shortest queue moves by one request, at the measured rate."""
    turns = [one.pending_tokens / (len(one.queue) + 1) for one in state.prefills.values()]
    return min(turns, default=0.0) * state.prefill_s_per_token


def _retry_after_s(wait_s: float) -> float:
    low, high = RETRY_AFTER_LIMITS_S
    return min(high, max(low, wait_s))
