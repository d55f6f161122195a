"""Probabilistic shedding: the nearer the predicted load is to the limit, the more requests are refused.

    load = max(predicted TTFT / its limit, predicted TBT / its limit)
    P(refuse) = 0 up to START, rising evenly to 1 at a load of 1

A threshold refuses nothing and then everything; this refuses some requests early. Random early detection
does the same to packets (S. Floyd and V. Jacobson, IEEE/ACM Transactions on Networking, 1993). A hash of the
request's id draws, so that a replay refuses the same requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from scheduler.admission.contract import retry_after_s
from scheduler.admission.predicted import relief_s, ttft_s
from scheduler.admission.predictive import Predictive
from scheduler.requests import Placement, Rejection, Request

if TYPE_CHECKING:
    from scheduler.state import State

START = 0.7
"""Load up to which no request is refused. Lower values refuse earlier, and swing less; 1 is a threshold."""


class Shed(Predictive):
    """Refuses a request with a probability that grows with the predicted load."""

    name = "shed"

    def on_place(
        self, state: State, request: Request, placement: Placement | None, now: float
    ) -> Rejection | None:
        """Refuse at random, by a hash of the request's id."""
        ttft = ttft_s(state, request, placement, now)
        tbt = self.tbt_s(state, request, placement, ttft, now)
        whole_s = now - request.arrived_s + ttft
        load = max(whole_s / request.slo_ttft_s, tbt / request.slo_tbt_s)
        chance = (load - START) / (1.0 - START)
        if xxh3_64_intdigest(request.request_id.encode()) / 2**64 >= chance:
            return None
        reason = f"the predicted load is {load:.0%} of the limits, and a share of requests is refused"
        wait_s = whole_s - START * request.slo_ttft_s
        if tbt > START * request.slo_tbt_s:
            wait_s = max(wait_s, relief_s(state, request, tbt, START * request.slo_tbt_s))
        return Rejection(request.request_id, reason, retry_after_s(wait_s))
