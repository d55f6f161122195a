"""Prefix sharing inside a rank: TTFT of a prompt whose first tokens another prompt had before it.

Run by `bench.ideas`: by hash and by radix tree, each beside no sharing. A known prefix that ends within a
block shows the difference: the hash shares whole blocks of 64 tokens, the tree whole pages of 16.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mooncake_lite.bench.engine_sides import in_turns, random_prompts
from mooncake_lite.bench.ideas_rank import Rank
from mooncake_lite.bench.result import Other, Row
from mooncake_lite.model import Model


def run(model: Model, tokens: int, known: Sequence[int], runs: int) -> list[Row]:
    """Measure prompts of `tokens` tokens, the first of which are known: so many in each case."""
    return [row for prefix in known for row in _case(model, tokens, prefix, runs)]


def _case(model: Model, tokens: int, known: int, runs: int) -> list[Row]:
    first, other = random_prompts(2, tokens, model.config.vocab_size)
    second = first[:known] + other[known:]

    def ttft_ms(sharing: str) -> float:
        rank = Rank(model, 2 * tokens, sharing)
        rank.ask([first], 1)
        return 1e3 * rank.ask([second], 1).ttft_s

    off, by_hash, by_radix = in_turns(
        runs, lambda: ttft_ms("off"), lambda: ttft_ms("hash"), lambda: ttft_ms("radix")
    )
    without = Other("off", statistics.median(off))
    where = f"TTFT of {tokens} tokens, {known} of them in pages"
    return [
        Row(f"prefix sharing, {form}: {where}", "ms", statistics.median(found), without, None, runs)
        for form, found in (("hash", by_hash), ("radix", by_radix))
    ]
