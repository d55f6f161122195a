"""Gives hints to the conductor, and says what became of them.

Used by `endpoints` (a hint by itself) and `answer` (hints in a request's body). Knows no HTTP. The control
plane carries them out (docs/explain/hints.md). Explained in docs/reference/http.md.
"""

from __future__ import annotations

import asyncio
import itertools

from mooncake_lite import messages as m
from mooncake_lite.gateway.answer_types import HintAnswer
from mooncake_lite.gateway.bodies import TIMED
from mooncake_lite.gateway.cluster_view import ClusterView
from mooncake_lite.gateway.problems import Unavailable

ANSWER_LIMIT_S = 10.0
"""Longest wait for the conductor's answer to a hint by itself."""

IN_REQUEST_LIMIT_S = 1.0
"""Longest wait for it in a request: the client waits for the end of an answer that is complete."""

NO_BLOCK = "there is no full block that the pool could have: the prompt is shorter, or keeps no KV"


async def give_hint(cluster: ClusterView, hint: m.HintArrived, limit_s: float) -> HintAnswer:
    """Give a hint; return what became of it.

    Raises Unavailable when the cluster takes no hints, or the conductor does not answer within limit_s.
    """
    if not hint.keys and not hint.session:
        return HintAnswer(hint.verb, "rejected", 0, 0, 0.0, NO_BLOCK)
    told: m.HintAnswered = await cluster.ask(hint.hint_id, hint, limit_s)
    return HintAnswer(hint.verb, told.outcome, told.blocks, told.affected, told.lasts_s, told.reason)


async def give_hints(
    cluster: ClusterView, left: m.RequestArrived, hints: dict[m.Verb, float]
) -> list[HintAnswer]:
    """Give the hints of a request in their order. One without an answer is rejected: the request is not.

    left   the request, with keys and digests of the blocks that it leaves
    """

    async def give(verb: m.Verb, value: float) -> HintAnswer:
        seconds, copies = value if verb in TIMED else None, int(value) if verb == "share" else 1
        session = left.session if left.keys else ""
        about = left.keys, left.digests, session, left.tenant, left.class_id, seconds, copies
        hint = m.HintArrived(f"{left.request_id}/{verb}", left.gateway, verb, *about)
        try:
            return await give_hint(cluster, hint, IN_REQUEST_LIMIT_S)
        except Unavailable as problem:
            return HintAnswer(verb, "rejected", len(hint.keys), 0, 0.0, problem.message)

    return await asyncio.gather(*itertools.starmap(give, hints.items()))
