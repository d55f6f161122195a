"""Several answers to one prompt: one prefill and shared pages, beside as many requests that share nothing.

Run by `bench.ideas`. Both sides draw the same tokens: a request is given the number of its answer.
"""

from __future__ import annotations

import statistics

from mooncake_lite.bench.engine_sides import in_turns, random_prompts
from mooncake_lite.bench.ideas_rank import Answered, Rank
from mooncake_lite.bench.result import Other, Row
from mooncake_lite.model import Model


def run(model: Model, tokens: int, n: int, new: int, runs: int) -> list[Row]:
    """Measure n answers of `new` tokens to a prompt of `tokens` tokens."""
    (prompt,) = random_prompts(1, tokens, model.config.vocab_size)
    rank = Rank(model, n * (tokens + new + 16), "off")
    together, apart = in_turns(
        runs, lambda: rank.ask([prompt], new, n=n), lambda: separately(rank, prompt, n, new)
    )
    other = f"{n} requests"

    def row(what: str, unit: str, ours: list[float], theirs: list[float]) -> Row:
        name = f"n = {n}: {what}, {tokens} + {new} tokens"
        return Row(name, unit, statistics.median(ours), Other(other, statistics.median(theirs)), None, runs)

    def figures(found: list[Answered]) -> list[list[float]]:
        return [
            [float(each.pages) for each in found],
            [1e3 * each.ttft_s for each in found],
            [1e3 * each.total_s for each in found],
        ]

    names = (("most pages in use at once", "pages"), ("first tokens of all", "ms"), ("all answers", "ms"))
    sides = zip(names, figures(together), figures(apart))
    return [row(*name, ours, theirs) for name, ours, theirs in sides]


def separately(rank: Rank, prompt: list[int], n: int, new: int) -> Answered:
    """Ask for the same answers, each in a request of its own."""
    return rank.run([rank.job(str(branch), prompt, new, branch=branch) for branch in range(n)])
