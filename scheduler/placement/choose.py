"""Choosing the instances of a request: a policy ranks the prefill instances, and a decode instance follows.

Asked by `mooncake_lite.control` when a request arrives and whenever capacity frees. A choice is a function of
(state, request, now) alone, and changes no answer of the books. It may change how fast they answer: a walk
over a prefix index splits and joins runs of blocks, and factors of the costs are kept for the next call.
`compare` keeps what was compared, and gives the terms of every candidate when they are asked for. Explained
in docs/explain/conductor.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler.placement.contract import Policy, Ranked
from scheduler.placement.explanation import Candidate
from scheduler.placement.view import View
from scheduler.requests import Placement, Rejection, Request, Terms, Wait
from scheduler.state import State

TIE_S = 1e-9
"""Added to the time of a decode instance for each of its sequences: of equally fast ones, the one with the
fewest is chosen. Any value works that is far below every real difference.
"""


def choose(policy: Policy, state: State, request: Request, now: float) -> Placement | Wait | Rejection:
    """Choose the least score among the instances with a free decode slot.

    Of instances with equal scores, the one that decodes the fewest sequences itself is chosen, and then the
    one with the lowest number. `Wait`: there is no place now. `Rejection`: there will be none.
    """
    found = compare(policy, state, request, now)
    return found.placement(request) if isinstance(found, Compared) else found


def explain(policy: Policy, state: State, request: Request, now: float) -> list[Candidate]:
    """Compute the terms of every instance that `choose` compares, the choice first. For people and tests."""
    found = compare(policy, state, request, now)
    return found.candidates() if isinstance(found, Compared) else []


def compare(policy: Policy, state: State, request: Request, now: float) -> Compared | Wait | Rejection:
    """Rank the instances for a request."""
    name = request.request_id
    if not state.prefills or not state.decodes:
        return Rejection(name, "no prefill or no decode instance has joined", 1.0)
    rows = state.open_prefills(request.n)
    if not len(rows):
        most = max(one.slots for one in state.decodes.values())
        if request.n > most:
            reason = f"{request.n} answers need as many decode slots, an instance has {most}"
            return Rejection(name, reason, 0.0)
        return Wait(name, "no decode instance has a free slot")
    view = View(state, request, now, rows)
    return Compared(view, policy.rank(view))


def other_decode(state: State, request_id: str, *, must: bool = False) -> tuple[int, float] | None:
    """Find a better decode instance than the one that a request has, and its time between tokens there.

    must   its own instance is lost, so that any other one with free slots is better

    None: it stays, because its own instance keeps its limit, no other one with free slots does, or the times
    of steps are a guess. It never waits for slots: it has had those of its instance since it was placed.
    """
    request, own = state.request_of(request_id), state.decodes[state.placement_of(request_id).decode]
    columns, costs = state.decode_columns, state.costs
    own_s = float(costs.step_s(own.instance, columns.batch[own.row], columns.context[own.row]))
    if not must and (not costs.is_step_measured or own_s <= request.slo_tbt_s):
        return None
    slots = own.taken[request_id]
    tbt_s = costs.tbt_s(columns.instance, columns.batch, columns.context, request.context, slots)
    tbt_s = np.where(columns.free >= slots, tbt_s, np.inf)
    tbt_s[own.row] = np.inf
    row = int(tbt_s.argmin())
    is_better = tbt_s[row] < np.inf if must else tbt_s[row] <= request.slo_tbt_s
    return (int(columns.instance[row]), float(tbt_s[row])) if is_better else None


class Compared:
    """The figures that one decision compared: columns of its own, which no later change of the books alters.

    Rows of terms are made on demand. A comparison of n instances keeps about 100 n bytes.
    """

    def __init__(self, view: View, ranked: Ranked) -> None:
        state, request = view.state, view.request
        decodes = state.decode_columns
        self._rows, self._ranked = view.rows, ranked
        self._prefills, self._decodes = state.prefill_columns, decodes.instance
        self._near, self._best, self._queue_s = view.near, view.best, view.queue_s
        self._in_pages, self._message_s = view.in_pages, state.costs.message_s
        self._block_s = state.costs.mean_load_s("dram", state.block_nbytes)
        self._batch, load = decodes.batch.copy(), (decodes.batch, decodes.context)
        self._tbt_s = state.costs.tbt_s(decodes.instance, *load, request.context, request.n)
        tbt_s = self._tbt_s + TIE_S * self._batch
        self._fastest = int(np.where(decodes.free >= request.n, tbt_s, np.inf).argmin())

    def placement(self, request: Request) -> Placement:
        """Return the choice for the request that was compared."""
        score = self._ranked.score[self._rows]
        least = self._rows[score == score[score.argmin()]]
        if len(least) > 1 and self._prefills.num_both:
            least = self._order(least)
        row = int(least[0])
        one = self._candidate(row)
        cached = request.cached_tokens(one.terms.reused_blocks)
        return Placement(request.request_id, one.prefill, one.decode, one.fetch, cached, one.terms)

    def candidates(self) -> list[Candidate]:
        """Return every instance that was compared, the choice first."""
        return [self._candidate(row) for row in self._order(self._rows).tolist()]

    def _order(self, rows: np.ndarray) -> np.ndarray:
        """Sort rows: the least score first, then the fewest sequences to decode, then the lowest number."""
        own = self._prefills.decode_row[rows]
        decoding = np.where(own < 0, 0.0, self._batch[own])
        return rows[np.lexsort((decoding, self._ranked.score[rows]))]

    def _decode_of(self, row: int) -> int:
        """Return the row of the decode instance that follows. An instance of both duties does both."""
        own = int(self._prefills.decode_row[row])
        own = int(_at(self._ranked.decode, row)) if own < 0 else own
        return self._fastest if own < 0 else own

    def _loaded(self, row: int) -> float:
        """Return the blocks that an instance reads from DRAM of its node."""
        reused = min(self._near[row], _at(self._ranked.reused, row))
        return max(0, reused - _at(self._in_pages, row))

    def _candidate(self, row: int) -> Candidate:
        """Return a row with its terms."""
        decode, ranked = self._decode_of(row), self._ranked
        terms = Terms(
            score=float(ranked.score[row]),
            queue_s=float(self._queue_s[row]),
            transfer_s=float(_at(ranked.transfer_s, row)),
            prefill_s=float(ranked.prefill_s[row]),
            near_blocks=int(self._near[row]),
            reused_blocks=int(_at(ranked.reused, row)),
            best_blocks=int(self._best),
            decode_batch=int(self._batch[decode]),
            tbt_s=float(self._tbt_s[decode]),
            start_s=self._message_s + float(self._loaded(row) * self._block_s),
        )
        fetch = bool(_at(ranked.fetch, row))
        return Candidate(int(self._prefills.instance[row]), int(self._decodes[decode]), fetch, terms)


def _at(values: np.ndarray, row: int) -> Any:
    """Return the value of a row of a column, or the one value of all."""
    return values[row] if values.ndim else values[()]
