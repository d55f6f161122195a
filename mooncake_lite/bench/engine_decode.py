"""Decode: one token after the other, of one sequence and of several, without the prefill.

Run by `bench.engine`. A decode step reads all weights once, whatever the number of sequences: that is its
limit. The step is also compared with our own linear kernels, called in turn with nothing between.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mooncake_lite.bench.engine_limits import in_turn_seconds, linear_inputs, read_seconds, weight_words
from mooncake_lite.bench.engine_ours import Ours
from mooncake_lite.bench.engine_sides import Answer, Bound, Side, decode_seconds, random_prompts, rows
from mooncake_lite.bench.result import Other, Row, milliseconds


def run(ours: Ours, peers: Sequence[Side], batch: int, tokens: int, new: int, runs: int) -> list[Row]:
    """Measure `batch` sequences of `tokens` tokens, each answered with `new` tokens."""
    prompts = random_prompts(batch, tokens, ours.model.config.vocab_size)
    words, layers = weight_words(ours.model), linear_inputs(ours.model, batch)
    nbytes = sum(each.nbytes for each in words)
    linears: list[float] = []

    def rate(answer: Answer) -> float:
        return batch * (new - 1) / decode_seconds(answer, prompts, new)

    def reading() -> float:
        linears.append(milliseconds(in_turn_seconds(layers)))  # in the same rounds as all else
        return batch / read_seconds(words)

    what = f"{batch} sequence{'s' * (batch > 1)} of {tokens} + {new} tokens"
    bound = Bound(f"reading the weights once ({nbytes / 1e6:.0f} MB)", reading)
    found = rows(f"decode, {what}", "tokens/s", runs, rate, ours.answer, peers, bound)
    step = Other("its linear layers in turn, our kernels", statistics.median(linears))
    return [*found, Row(f"decode step, {what}", "ms", 1e3 * batch / found[0].ours, None, step, runs)]
