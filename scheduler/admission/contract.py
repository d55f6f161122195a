"""The contract of admission: a form refuses requests so that the others are served in time.

Asked by `mooncake_lite.control` for each new request: before a policy looks for a place, and with the place
that was found. A request that was held is asked about again when it gets a place. The paper's section on
overload is arXiv 2407.00079, 7. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.requests import Placement, Rejection, Request

if TYPE_CHECKING:
    from scheduler.state import State

RETRY_AFTER_LIMITS_S = (1.0, 60.0)
"""Least and most Retry-After: no client asks again at once, and none waits long because of one prediction."""


class Admission:
    """Refuses only a request id that is in use. Every form extends it, and answers from the arguments alone.

    withholds   the first token waits until `on_decode` has let the request pass
    """

    name = "none"
    withholds = False

    def on_arrival(self, state: State, request: Request, now: float) -> Rejection | None:
        """Refuse a new request before a place is looked for. None: go on."""
        name = request.request_id
        return Rejection(name, f"request id {name} is in use", 0.0) if name in state else None

    def on_place(
        self, state: State, request: Request, placement: Placement | None, now: float
    ) -> Rejection | None:
        """Refuse a request without tokens, knowing its place. It is new, or was held until now.

        No placement: it is new and would be held, without a decode slot.
        """
        return None

    def on_decode(self, state: State, request: Request, now: float) -> Rejection | None:
        """Refuse a request whose prefill has ended, if `withholds`. It has slots of a decode instance."""
        return None


def retry_after_s(wait_s: float) -> float:
    """Return when it is worth trying again, in seconds: at least 1, at most 60."""
    low, high = RETRY_AFTER_LIMITS_S
    return round(min(high, max(low, wait_s)), 3)
