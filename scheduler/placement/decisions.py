"""The last decisions, kept with what they compared: the answer to "why did my request go there?".

Stands in for `choose` in the conductor, and in `mooncake-lite explain` when that replays a recording. Pure.
Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from scheduler.placement.choose import Compared, compare
from scheduler.placement.contract import Policy
from scheduler.placement.explanation import Explanation, Verdict
from scheduler.requests import Placement, Rejection, Request, Wait
from scheduler.state import State

KEPT = 1000
"""Decisions that are kept. With 100 instances they take 8 MB."""


@dataclass(slots=True)
class _Decision:
    comparison: Compared | None
    outcome: Verdict
    reason: str


class Decisions:
    """Chooses as `choose` does, and keeps the decision about each of the last requests.

    A request that was placed keeps its first placement, also when it is preempted and placed again.
    """

    def __init__(self, policy: Policy, limit: int = KEPT) -> None:
        self._policy, self._limit = policy, limit
        self._kept: OrderedDict[str, _Decision] = OrderedDict()

    def choose(self, state: State, request: Request, now: float) -> Placement | Wait | Rejection:
        """Choose, and keep what was compared."""
        found = compare(self._policy, state, request, now)
        if isinstance(found, Compared):
            self._keep(request.request_id, _Decision(found, "waits", "others wait"))
            return found.placement(request)
        self._keep(request.request_id, _Decision(None, "waits", found.reason))
        return found

    def placed(self, request_id: str) -> None:
        """Note that a request got the place that was chosen last."""
        kept = self._kept.get(request_id)
        if kept is not None and kept.outcome == "waits":
            kept.outcome, kept.reason = "placed", ""

    def refused(self, request_id: str, reason: str) -> None:
        """Note that a request was refused, with or without a comparison."""
        kept = self._kept.get(request_id)
        if kept is None:
            self._keep(request_id, _Decision(None, "refused", reason))
        else:
            kept.outcome, kept.reason = "refused", reason

    def _keep(self, request_id: str, decision: _Decision) -> None:
        kept = self._kept.get(request_id)
        if kept is not None and kept.outcome == "placed":
            return
        self._kept[request_id] = decision
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def explain(self, request_id: str) -> Explanation | None:
        """Return the decision about a request; None: it is not kept."""
        kept = self._kept.get(request_id)
        if kept is None:
            return None
        rows = kept.comparison.candidates() if kept.comparison is not None else []
        return Explanation(request_id, self._policy.name, kept.outcome, kept.reason, rows)

    @property
    def policy(self) -> str:
        """Return the name of the policy."""
        return self._policy.name

    @property
    def request_ids(self) -> list[str]:
        """Return the requests that are kept, the last one last."""
        return list(self._kept)
