"""Prefill: the first token of one long prompt, beside the peers and torch's matrix products.

Run by `bench.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_lite.bench.engine_limits import prefill_limit
from mooncake_lite.bench.engine_ours import Ours
from mooncake_lite.bench.engine_sides import Answer, Bound, Side, random_prompts, rows
from mooncake_lite.bench.result import Row


def run(ours: Ours, peers: Sequence[Side], tokens: int, runs: int) -> list[Row]:
    """Measure a prompt of `tokens` tokens that is answered with one token."""
    prompts = random_prompts(1, tokens, ours.model.config.vocab_size)

    def rate(answer: Answer) -> float:
        return tokens / answer(prompts, 1)

    bound = Bound(
        "the model's matrix products in torch, causal attention counted", prefill_limit(ours.model, tokens)
    )
    return rows(f"prefill of {tokens:,} tokens, float32", "tokens/s", runs, rate, ours.answer, peers, bound)
