"""Jobs: turns orders of the conductor, with the bodies of their requests, into jobs of the planner.

Used by the compute role. The planner holds places and sampling without looking into them.
"""

from __future__ import annotations

from mooncake_lite import messages as m
from scheduler.instance import DECODE, PREFETCH, PREFILL, Job

DUTIES_OF_ORDERS: dict[type[m.StartOrder], frozenset[str]] = {
    m.StartPrefill: frozenset({PREFILL}),
    m.StartDecode: frozenset({DECODE}),
    m.StartServe: frozenset({PREFILL, DECODE}),
}


def blocks_to_load(order: m.StartOrder) -> list[m.BlockRef]:
    """Return the places of the KV of the first tokens, in order."""
    if isinstance(order, m.StartDecode):
        return order.blocks if order.tail is None else [*order.blocks, order.tail]
    return order.load


def blocks_to_store(order: m.StartPrefill) -> list[m.BlockRef]:
    """Return the places for the KV of the tokens after the loaded ones, in order."""
    return order.store if order.tail is None else [*order.store, order.tail]


def job_of(start: m.Start, max_len: int) -> Job:
    """Turn an order into a job. max_len: longest prompt and answer together, in tokens.

    Logprobs of the prompt that were sent before a preemption are not sent again.
    """
    order, body = start.order, start.body
    decodes_only, prefills_only = isinstance(order, m.StartDecode), isinstance(order, m.StartPrefill)
    return Job(
        order.request_id,
        order.attempt,
        DUTIES_OF_ORDERS[type(order)],
        body.token_ids,
        body.answered,
        body.max_tokens,
        max_len,
        frozenset(body.stop_ids),
        body.sampling,
        n=1 if decodes_only else body.n,
        branch=body.branch,
        answers=[(answer.branch, answer.token_ids) for answer in body.answers],
        load=blocks_to_load(order),
        reads=isinstance(order, m.StartDecode) or order.reads,
        store=blocks_to_store(order) if isinstance(order, m.StartPrefill) else (),
        salt=body.salt or None,
        keys=body.keys,
        offers=not prefills_only and body.offers,
        scored=not decodes_only and body.answered == 0 and body.sampling.prompt_logprobs >= 0,
        speculates=body.speculates,
        predicted=body.predicted,
    )


def prefetch_of(message: m.PrefetchTokens) -> Job:
    """Turn a hint into a job. Its branch is no answer's: a number below 0, another one for more blocks."""
    order, ids = message.order, message.token_ids
    return Job(
        order.request_id,
        order.attempt,
        frozenset({PREFETCH}),
        ids,
        0,
        0,
        len(ids),
        branch=-len(order.blocks),
        load=order.blocks,
        salt=message.salt or None,
        keys=message.keys,
    )
