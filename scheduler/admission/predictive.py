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

from scheduler.admission.early import Early
from scheduler.admission.predicted import mean_tbt_terms
from scheduler.requests import Placement, Request
from scheduler.state import State

STEPS = 3
"""Steps of the search for the fixed point. The first one decides; the others bring a low TBT nearer to it."""


class Predictive(Early):
    """Refuses a request whose predicted TTFT, or TBT at the end of its prefill, exceeds its limit."""

    name = "predictive"

    def tbt_s(
        self, state: State, request: Request, placement: Placement | None, ttft: float, now: float
    ) -> float:
        """Predict TBT when the first token comes. Requests that are held begin before one that is new."""
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
