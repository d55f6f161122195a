"""Check after prefill: the paper's baseline (arXiv 2407.00079, 7.2). A refusal then wastes a prefill.

On arrival only the time to the first token is looked at. The decode load is looked at when the prefill has
ended; until then the first token is withheld, so that the request can still be refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.admission.early import Early, over_tbt
from scheduler.admission.predicted import tbt_step_s
from scheduler.requests import Placement, Rejection, Request

if TYPE_CHECKING:
    from scheduler.state import State


class AfterPrefill(Early):
    """Refuses on arrival by TTFT, and after the prefill by TBT."""

    name = "after-prefill"
    withholds = True

    def tbt_s(
        self, state: State, request: Request, placement: Placement | None, ttft: float, now: float
    ) -> float:
        """Predict nothing: the decode load is looked at later."""
        return 0.0

    def on_decode(self, state: State, request: Request, now: float) -> Rejection | None:
        """Compare with its limit the TBT of what the decode instance has now, this request included."""
        return over_tbt(state, request, tbt_step_s(state, state.placement_of(request.request_id).decode))
