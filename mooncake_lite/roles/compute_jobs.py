"""Jobs: turns messages of the conductor into jobs of the planner.

Used by the compute role. The planner holds places and sampling without looking into them.
"""

from __future__ import annotations

from mooncake_lite.messages import Answer, BlockRef, Decode, Prefill
from scheduler.instance import DECODE, PREFILL, Job


def blocks_to_load(message: Prefill | Decode) -> list[BlockRef]:
    """Return the places of the KV of the first tokens, in order."""
    if isinstance(message, Prefill):
        return message.load
    return message.blocks if message.tail is None else [*message.blocks, message.tail]


def blocks_to_store(message: Prefill) -> list[BlockRef]:
    """Return the places for the KV of the tokens after the loaded ones, in order."""
    return message.store if message.tail is None else [*message.store, message.tail]


def _answers(message: Prefill | Decode) -> list[Answer]:
    return message.answers if isinstance(message, Decode) else []


def job_of(message: Prefill | Decode, max_len: int) -> Job:
    """Turn a message into a job. max_len: longest prompt and answer together, in tokens."""
    prefill = isinstance(message, Prefill)
    return Job(
        message.request_id,
        message.attempt,
        frozenset({PREFILL if prefill else DECODE}),
        message.token_ids,
        message.answered,
        message.max_tokens,
        max_len,
        frozenset(message.stop_ids),
        message.sampling,
        n=message.n if isinstance(message, Prefill) else 1,
        branch=message.branch,
        answers=[(answer.branch, answer.token_ids) for answer in _answers(message)],
        load=blocks_to_load(message),
        store=blocks_to_store(message) if isinstance(message, Prefill) else (),
        salt=message.salt or None,
        keys=message.keys,
        offers=isinstance(message, Decode) and bool(message.salt),
    )
