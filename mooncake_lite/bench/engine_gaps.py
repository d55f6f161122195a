"""The longest wait of a running answer while a long prompt is computed on the same rank.

Run by `bench.engine`: with chunked prefill, beside the whole prompt in one pass.
"""

from __future__ import annotations

import statistics
from itertools import pairwise

from mooncake_lite.bench.engine_ours import Ours
from mooncake_lite.bench.engine_sides import in_turns, random_prompts
from mooncake_lite.bench.result import Other, Row
from scheduler.instance import Limits

CHUNK_TOKENS = 256
"""Of one pass with chunked prefill, the running answer's token included."""

SHORT_TOKENS = 32
"""Of the prompt whose answer is running."""


def run(ours: Ours, tokens: int, runs: int) -> list[Row]:
    """Measure the gap beside a prompt of `tokens` tokens."""
    steps = -(-tokens // (CHUNK_TOKENS - 1)) + 2
    vocab = ours.model.config.vocab_size
    prompts = random_prompts(1, SHORT_TOKENS, vocab) + random_prompts(1, tokens, vocab)

    def gap_ms(chunked: bool) -> float:
        times = ours.token_times(prompts, steps, Limits(CHUNK_TOKENS, chunked=chunked))
        return 1e3 * longest_gap_s(times[0])

    cut, whole = in_turns(runs, lambda: gap_ms(chunked=True), lambda: gap_ms(chunked=False))
    name = f"longest gap of an answer beside a prompt of {tokens:,} tokens, chunks of {CHUNK_TOKENS}"
    peer = Other("the prompt in one pass", statistics.median(whole))
    return [Row(name, "ms", statistics.median(cut), peer, None, runs)]


def longest_gap_s(times: list[float]) -> float:
    """Return the longest time between two tokens."""
    return max(after - before for before, after in pairwise(times))
