"""The first policy: the prefill instance that has the fewest tokens to compute until this prompt is done.

    score(p) = tokens pending on p + tokens of the prompt - leading tokens in DRAM of p's node

A prefix is worth as many tokens as it saves. It attracts a request until its instance has that many more
tokens pending than another one. docs/explain/paper.md lists the differences to Algorithm 1 (FAST'25).
"""

from __future__ import annotations

from operator import attrgetter

from scheduler.placement.contract import Candidate
from scheduler.prefix_index import Leading
from scheduler.requests import Placement, Rejection, Request, Terms, Wait
from scheduler.state import DecodeInstance, PrefillInstance, State, cached_tokens


class LeastTokens:
    """Chooses the least score, then fewer pending tokens, then the lower number. Decode: most free slots."""

    name = "least-tokens"

    def choose(self, state: State, request: Request, now: float) -> Placement | Wait | Rejection:
        """Choose the best prefill instance and, independently, the decode instance with most free slots."""
        name = request.request_id
        if not state.prefills or not state.decodes:
            return Rejection(name, "no prefill or no decode instance has joined", 1.0)
        if not state.has_decode_place:
            return Wait(name, "no decode instance has a free slot")
        leading = state.index.leading(request.keys)
        prefill = _best_prefill(state, request, leading)
        decode = _freest_decode(state)
        terms = _terms(request, leading, prefill, decode)
        return Placement(name, prefill.instance, decode.instance, cached_tokens(request, leading), terms)

    def explain(self, state: State, request: Request) -> list[Candidate]:
        """Recompute the terms of every prefill instance, best first. Empty without a free decode slot."""
        if not state.prefills or not state.has_decode_place:
            return []
        leading = state.index.leading(request.keys)
        decode = _freest_decode(state)
        table = [Candidate(p.instance, _terms(request, leading, p, decode)) for p in state.prefills.values()]
        return sorted(table, key=lambda row: (row.terms.score, row.terms.pending_tokens, row.prefill))


def _best_prefill(state: State, request: Request, leading: Leading) -> PrefillInstance:
    """Find the best instance in one pass in ascending order, so the first of equals wins."""
    near, block_tokens, most = leading.by_node.get, request.block_tokens, request.num_tokens - 1
    best, best_score = None, 0
    for one in state.prefills.values():
        reused = near(one.node, 0) * block_tokens
        score = one.pending_tokens - (reused if reused < most else most)
        if (
            best is None
            or score < best_score
            or (score == best_score and one.pending_tokens < best.pending_tokens)
        ):
            best, best_score = one, score
    assert best is not None
    return best


def _freest_decode(state: State) -> DecodeInstance:
    """Return the decode instance with most free slots, the lowest number among equals."""
    return max(state.decodes.values(), key=attrgetter("free"))


def _terms(request: Request, leading: Leading, prefill: PrefillInstance, decode: DecodeInstance) -> Terms:
    near = min(leading.near(prefill.node) * request.block_tokens, request.num_tokens - 1)
    score = prefill.pending_tokens + request.num_tokens - near
    return Terms(
        prefill.pending_tokens, request.num_tokens, near, score, decode.slots - decode.free, decode.slots
    )
