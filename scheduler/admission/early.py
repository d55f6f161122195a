"""Early rejection: refuse requests that would miss a limit at the present load (arXiv 2407.00079, 7.2).

    load = max(predicted TTFT / its limit, predicted TBT / its limit)        refuse when it exceeds 1

No prefill is wasted. Its weakness, in the paper: the decode load now is not that at the end of this prefill,
so the loads of the two pools swing against each other. `predictive.py` mends that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.admission.bounded_queue import BoundedQueue
from scheduler.admission.contract import retry_after_s
from scheduler.admission.predicted import mean_tbt_s, relief_s, tbt_now_s, ttft_s
from scheduler.requests import Placement, Rejection, Request

if TYPE_CHECKING:
    from scheduler.state import State


class Early(BoundedQueue):
    """Refuses a request whose predicted TTFT or TBT exceeds its limit, and as a bounded queue does."""

    name = "early-rejection"

    def on_place(
        self, state: State, request: Request, placement: Placement | None, now: float
    ) -> Rejection | None:
        """Compare the predictions with the limits. A request that was held has waited already."""
        if not request.has_limit:
            return None
        ttft = ttft_s(state, request, placement, now)
        whole_s = now - request.arrived_s + ttft
        if whole_s > request.slo_ttft_s:
            reason = _reason("time to first token", whole_s, request.slo_ttft_s)
            return Rejection(request.request_id, reason, retry_after_s(whole_s - request.slo_ttft_s))
        return over_tbt(state, request, self.tbt_s(state, request, placement, ttft, now))

    def tbt_s(
        self, state: State, request: Request, placement: Placement | None, ttft: float, now: float
    ) -> float:
        """Predict TBT with what decodes now: on the chosen instance, or without one on the average."""
        if placement is not None:
            return tbt_now_s(state, request, placement.decode)
        return mean_tbt_s(state, request, state.decode_load.running)


def over_tbt(state: State, request: Request, tbt_s: float) -> Rejection | None:
    """Refuse a request at a predicted time between tokens that exceeds its limit."""
    if tbt_s <= request.slo_tbt_s:
        return None
    reason = _reason("time between tokens", tbt_s, request.slo_tbt_s)
    wait_s = relief_s(state, request, tbt_s, request.slo_tbt_s)
    return Rejection(request.request_id, reason, retry_after_s(wait_s))


def _reason(what: str, predicted_s: float, limit_s: float) -> str:
    return f"the predicted {what} is {_short(predicted_s)}, the limit {_short(limit_s)}; send it again later"


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
