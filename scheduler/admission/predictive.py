"""Early rejection by prediction: of the decode load when this prefill would end (arXiv 2407.00079, 7.4).

    t = now + predicted TTFT
    sequences at t = those that decode now or whose prefill ends by t, without those begun before t - t_d
    refuse when the mean predicted TBT of the decode instances at t exceeds the limit

t_d, how long a request decodes, is learned (`scheduler.decode_load`).
"""

from __future__ import annotations

from scheduler.admission.early import Early
from scheduler.admission.predicted import mean_tbt_s
from scheduler.requests import Placement, Request
from scheduler.state import State


class Predictive(Early):
    """Refuses a request whose predicted TTFT, or TBT at the end of its prefill, exceeds its limit."""

    name = "predictive"

    def tbt_s(
        self, state: State, request: Request, placement: Placement | None, ttft: float, now: float
    ) -> float:
        """Predict TBT when the first token comes. Requests that are held begin before."""
        others = state.decode_load.sequences(now + ttft, now) + state.held.sequences
        return mean_tbt_s(state, request, max(0, min(others, state.decode_slots - request.n)))
