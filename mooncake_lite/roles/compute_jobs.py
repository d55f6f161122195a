"""Jobs: turns messages of the conductor into jobs of the planner.

Used by the compute role. The planner holds places and sampling without looking into them.
"""

from __future__ import annotations

from mooncake_lite.messages import BlockRef, Decode, Prefill, Serve
from scheduler.instance import DECODE, PREFILL, Job

Asks = Prefill | Decode | Serve
"""What the conductor can ask a rank to do for a request."""

DUTIES: dict[type[Asks], frozenset[str]] = {
    Prefill: frozenset({PREFILL}),
    Decode: frozenset({DECODE}),
    Serve: frozenset({PREFILL, DECODE}),
}


def blocks_to_load(message: Asks) -> list[BlockRef]:
    """Return the places of the KV of the first tokens, in order."""
    if isinstance(message, Decode):
        return message.blocks if message.tail is None else [*message.blocks, message.tail]
    return message.load


def blocks_to_store(message: Prefill) -> list[BlockRef]:
    """Return the places for the KV of the tokens after the loaded ones, in order."""
    return message.store if message.tail is None else [*message.store, message.tail]


def _scored(message: Asks) -> bool:
    """Tell whether the logprobs of the prompt are wanted, and have not been sent before a preemption."""
    fresh = not isinstance(message, Decode) and message.answered == 0
    return fresh and message.sampling.prompt_logprobs >= 0


def _answers(message: Asks) -> list[tuple[int, list[int]]]:
    answers = message.answers if isinstance(message, Decode) else []
    return [(answer.branch, answer.token_ids) for answer in answers]


def job_of(message: Asks, max_len: int) -> Job:
    """Turn a message into a job. max_len: longest prompt and answer together, in tokens."""
    return Job(
        message.request_id,
        message.attempt,
        DUTIES[type(message)],
        message.token_ids,
        message.answered,
        message.max_tokens,
        max_len,
        frozenset(message.stop_ids),
        message.sampling,
        n=1 if isinstance(message, Decode) else message.n,
        branch=message.branch,
        answers=_answers(message),
        load=blocks_to_load(message),
        store=blocks_to_store(message) if isinstance(message, Prefill) else (),
        salt=message.salt or None,
        keys=message.keys,
        offers=not isinstance(message, Prefill) and message.offers and bool(message.salt),
        scored=_scored(message),
    )
