"""Throughput, TTFT and TPOT of whole requests over batch sizes and prompt lengths.

Run by `bench.engine`. All requests of a batch are there at the start. Our TTFT and TPOT are means over the
requests, as clients see them: our prompts are computed in passes of 2,048 tokens, so an early request has its
first token soon and then waits for others' prompts. transformers computes all prompts of a batch at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from mooncake_lite.bench.engine_limits import prefill_limit, read_seconds, weight_words
from mooncake_lite.bench.engine_ours import Ours
from mooncake_lite.bench.engine_peers import Peers
from mooncake_lite.bench.engine_sides import Answer, Prompts, in_turns, random_prompts
from mooncake_lite.bench.result import Other, Row

MOST_PROMPT_TOKENS = 4096
"""Of a batch that is measured several times; a larger one takes minutes, and is measured once."""


class Figures(NamedTuple):
    """What one batch came to. The median of several is taken field by field."""

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


def run(ours: Ours, peers: Peers, cells: Sequence[tuple[int, int]], new: int, runs: int) -> list[Row]:
    """Measure each (batch size, prompt length), answered with `new` tokens."""
    return [row for batch, tokens in cells for row in _cell(ours, peers, batch, tokens, new, runs)]


def _cell(ours: Ours, peers: Peers, batch: int, tokens: int, new: int, runs: int) -> list[Row]:
    """Measure one batch: beside `generate` in all figures, beside the others in throughput."""
    runs = runs if batch * tokens <= MOST_PROMPT_TOKENS else 1
    prompts = random_prompts(batch, tokens, ours.model.config.vocab_size)
    sides = [peers.generate, peers.generate_batch, *([peers.llama] if batch == 1 else [])]
    there = [side for side in sides if side.answer is not None]
    actions = [lambda side=side: of_peer(side.answer, prompts, new, side is peers.generate) for side in there]
    mine, *theirs = in_turns(runs, lambda: of_times(ours.token_times(prompts, new)), *actions)
    limit, own = _limit(ours, batch, tokens, new), _median(mine)
    found = dict(zip((side.name for side in there), map(_median, theirs)))
    where = f"{batch} x {tokens} + {new} tokens"
    rows = []
    for side in sides:
        peer = found.get(side.name)
        whole = side is peers.generate
        for field, name, unit in _COLUMNS if whole else _COLUMNS[:1]:
            is_noise = peer is not None and peer[field] <= 0  # TPOT is a difference of two runs
            beside = Other(side.name, peer[field]) if peer and not is_noise else None
            bound = Other(_LIMITS[field], limit[field])
            rows.append(Row(f"{name}, {where}", unit, own[field], beside, bound, runs, side.note))
    return rows


_COLUMNS = ((0, "throughput", "tokens/s"), (1, "TTFT", "ms"), (2, "TPOT", "ms"))
_LIMITS = (
    "the arithmetic of the prompts, then the weights read once a step",
    "the arithmetic of the prompts, one after the other (mean)",
    "reading the weights once",
)


def of_times(times: list[list[float]]) -> Figures:
    """Return the figures of a batch whose tokens came at these seconds; at least two tokens each."""
    total = max(each[-1] for each in times)
    ttft_s = statistics.fmean(each[0] for each in times)
    tpot_s = statistics.fmean((each[-1] - each[0]) / (len(each) - 1) for each in times)
    return Figures(sum(map(len, times)) / total, 1e3 * ttft_s, 1e3 * tpot_s)


def of_peer(answer: Answer, prompts: Prompts, new: int, gaps: bool) -> Figures:
    """Return the figures of a peer that says only when all is done.

    gaps   whether a second run, with one new token, tells its TTFT; else only the throughput is known
    """
    total = answer(prompts, new)
    first = answer(prompts, 1) if gaps else 0.0
    return Figures(len(prompts) * new / total, 1e3 * first, 1e3 * (total - first) / (new - 1))


def _limit(ours: Ours, batch: int, tokens: int, new: int) -> Figures:
    prompt_s = tokens / prefill_limit(ours.model, tokens)()
    step_s = read_seconds(weight_words(ours.model))
    total = batch * prompt_s + (new - 1) * step_s
    return Figures(batch * new / total, 1e3 * prompt_s * (batch + 1) / 2, 1e3 * step_s)


def _median(figures: list[Figures]) -> Figures:
    return Figures(*map(statistics.median, zip(*figures)))
