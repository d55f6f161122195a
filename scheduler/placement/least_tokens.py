"""The first policy: the prefill instance that has the fewest tokens to compute until this prompt is done.

    score(p) = tokens pending on p + tokens of the prompt - leading tokens that p would reuse

These are the leading tokens in DRAM of p's node, or in p's own pages if those are more.

A prefix is worth as many tokens as it saves. It attracts a request until its instance has that many more
tokens pending than another one. docs/explain/paper.md lists the differences to Algorithm 1 (FAST'25).
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

from scheduler.placement.contract import Candidate
from scheduler.prefix_index import Leading
from scheduler.requests import Placement, Rejection, Request, Terms, Wait
from scheduler.state import DecodeInstance, PrefillInstance, State, cached_tokens


class LeastTokens:
    """Chooses the least score, then fewer pending tokens, then the lower number. Decode: most free slots.

    Instances of both duties that are equal so far: the one with more free decode slots.
    """

    name = "least-tokens"

    def choose(self, state: State, request: Request, now: float) -> Placement | Wait | Rejection:
        """Choose the best prefill instance and, independently, the decode instance with most free slots."""
        name = request.request_id
        if not state.prefills or not state.decodes:
            return Rejection(name, "no prefill or no decode instance has joined", 1.0)
        most = max(one.slots for one in state.decodes.values())
        if request.n > most:
            return Rejection(
                name, f"{request.n} answers need as many decode slots, an instance has {most}", 0.0
            )
        candidates = state.open_prefills(request.n)
        if not candidates:
            return Wait(name, "no decode instance has a free slot")
        leading, held = state.index.leading(request.keys), state.pages.leading(request.keys)
        prefill = _best_prefill(state, candidates, request, leading, held)
        decode = _freest(state.decodes_for(prefill.instance))
        terms = _terms(request, leading, held, prefill, decode)
        cached = max(cached_tokens(request, leading), terms.near_tokens)
        return Placement(name, prefill.instance, decode.instance, cached, terms)

    def explain(self, state: State, request: Request) -> list[Candidate]:
        """Recompute the terms of every prefill instance, best first. Empty without a free decode slot."""
        leading, held = state.index.leading(request.keys), state.pages.leading(request.keys)
        pairs = [(p, _freest(state.decodes_for(p.instance))) for p in state.open_prefills(request.n)]
        table = [Candidate(p.instance, _terms(request, leading, held, p, decode)) for p, decode in pairs]
        return sorted(table, key=lambda row: _order(state, state.prefills[row.prefill], row.terms.score))


def _best_prefill(
    state: State, candidates: Collection[PrefillInstance], request: Request, leading: Leading, held: Leading
) -> PrefillInstance:
    """Find the best instance in one pass in ascending order, so the first of equals wins."""
    near, own = leading.by_node.get, held.by_node.get
    block_tokens, most = request.block_tokens, request.num_tokens - 1
    best, best_score = None, 0
    for one in candidates:
        reused = max(near(one.node, 0), own(one.instance, 0)) * block_tokens
        score = one.pending_tokens - (reused if reused < most else most)
        if best is None or score < best_score:
            best, best_score = one, score
        elif score == best_score and _order(state, one, score) < _order(state, best, score):
            best = one
    assert best is not None
    return best


def _order(state: State, prefill: PrefillInstance, score: int) -> tuple[int, int, int, int]:
    """Return what is compared: the least is the best. Free slots count where the instance decodes too."""
    own = state.decodes.get(prefill.instance)
    return score, prefill.pending_tokens, -own.free if own else 0, prefill.instance


def _freest(decodes: Collection[DecodeInstance]) -> DecodeInstance:
    """Return the decode instance with most free slots, the lowest number among equals."""
    return max(decodes, key=attrgetter("free"))


def _terms(
    request: Request, leading: Leading, held: Leading, prefill: PrefillInstance, decode: DecodeInstance
) -> Terms:
    blocks = max(leading.near(prefill.node), held.near(prefill.instance))
    near = min(blocks * request.block_tokens, request.num_tokens - 1)
    score = prefill.pending_tokens + request.num_tokens - near
    return Terms(
        prefill.pending_tokens, request.num_tokens, near, score, decode.slots - decode.free, decode.slots
    )
