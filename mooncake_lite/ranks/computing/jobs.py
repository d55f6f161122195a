"""Jobs: turns orders of the conductor, with the bodies of their requests, into jobs of the planner.

Used by the compute role. The planner holds places and sampling without looking into them.
"""

from __future__ import annotations

from mooncake_lite.messages import (
    BlockRef,
    PrefetchTokens,
    Start,
    StartDecode,
    StartOrder,
    StartPrefill,
    StartServe,
)
from scheduler.instance import DECODE, PREFETCH, PREFILL, Job

DUTIES: dict[type[StartOrder], frozenset[str]] = {
    StartPrefill: frozenset({PREFILL}),
    StartDecode: frozenset({DECODE}),
    StartServe: frozenset({PREFILL, DECODE}),
}


def blocks_to_load(order: StartOrder) -> list[BlockRef]:
    """Return the places of the KV of the first tokens, in order."""
    if isinstance(order, StartDecode):
        return order.blocks if order.tail is None else [*order.blocks, order.tail]
    return order.load


def blocks_to_store(order: StartPrefill) -> list[BlockRef]:
    """Return the places for the KV of the tokens after the loaded ones, in order."""
    return order.store if order.tail is None else [*order.store, order.tail]


def job_of(start: Start, max_len: int) -> Job:
    """Turn an order into a job. max_len: longest prompt and answer together, in tokens.

    Logprobs of the prompt that were sent before a preemption are not sent again.
    """
    order, body = start.order, start.body
    decodes_only, prefills_only = isinstance(order, StartDecode), isinstance(order, StartPrefill)
    return Job(
        order.request_id,
        order.attempt,
        DUTIES[type(order)],
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
        reads=isinstance(order, StartDecode) or order.reads,
        store=blocks_to_store(order) if isinstance(order, StartPrefill) else (),
        salt=body.salt or None,
        keys=body.keys,
        offers=not prefills_only and body.offers,
        scored=not decodes_only and body.answered == 0 and body.sampling.prompt_logprobs >= 0,
    )


def prefetch_of(message: PrefetchTokens) -> Job:
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
