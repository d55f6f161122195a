"""Early rejection by prediction: of the decode load when this prefill would end (arXiv 2407.00079, 7.4).

    t = now + predicted TTFT
    sequences at t = those that decode now or whose prefill ends by t, without those begun before t - t_d
    refuse when the mean predicted TBT of the decode instances at t exceeds the limit

t_d, how long a request decodes, is the mean length of answers (`scheduler.decode_load`) times TBT. TBT grows
with the sequences, and these grow with t_d, so TBT is a fixed point. It is within the limit if, and only if,
it is within the limit with the t_d that belongs to the limit. The search begins there, and goes down. While
steps take longer than the limit it begins with their present time: what runs now ends later than planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.admission.early import Early
from scheduler.admission.predicted import mean_tbt_terms
from scheduler.requests import Placement, Request

if TYPE_CHECKING:
    from scheduler.state import State

STEPS = 3
"""Steps of the search for the fixed point. The first one decides; the others bring a low TBT nearer to it."""


class Predictive(Early):
    """Refuses a request whose predicted TTFT, or TBT at the end of its prefill, exceeds its limit."""

    name = "predictive"

    def tbt_s(
        self, state: State, request: Request, placement: Placement | None, ttft: float, now: float
    ) -> float:
        """Predict the mean TBT of the decode instances when the first token comes, `ttft` from now.

        TBT is the first of the `mean_tbt_terms`, plus the second for each other sequence. The others are
        those that `decode_load` predicts for that time, plus `held.sequences` for a new request: requests
        that are held begin before it. For one that is held itself (`request.request_id in state.held`), none
        are added. The others are at most the `decode_slots` that the request's own `n` leaves, and at
        least 0.

        Predicting the load needs a TBT, which depends on the load. The search begins at the larger of
        `slo_tbt_s` and TBT with those that decode now (`running`), also where these exceed the slots. Each
        step predicts the load with the TBT that the step before found. The search ends with the first step
        that finds no lower TBT, and after STEPS steps at the latest. Returns what the last step found.
        """
        # labs:begin 7e
        alone_s, other_s = mean_tbt_terms(state, request)
        load, at = state.decode_load, now + ttft
        held = 0 if request.request_id in state.held else state.held.sequences
        most = state.decode_slots - request.n
        tbt_s = max(request.slo_tbt_s, alone_s + other_s * load.running)
        for _ in range(STEPS):
            others = load.sequences(at, now, tbt_s) + held
            found_s = alone_s + other_s * max(0, min(others, most))
            if found_s >= tbt_s:
                return found_s
            tbt_s = found_s
        return tbt_s
        # labs:end 7e
