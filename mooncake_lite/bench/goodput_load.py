"""A load for `goodput`: requests at random times, and how many of them were served within their limits.

Made from a seed: every form of admission gets the same requests at the same times. Knows no cluster.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_lite.bench.open_loop import Ask, Reply

PROMPT_TOKENS, NEW_TOKENS = (128, 384), (32, 96)
"""Least and most tokens; each number between is as likely."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive as a Poisson process.

    rate       requests per second
    warm_s     seconds before the window: the books fill, and no request of that time counts
    window_s   seconds of the window
    """

    rate: float
    warm_s: float
    window_s: float

    def asks(self, vocab_size: int, seed: int) -> list[Ask]:
        """Make the requests. No two share a prefix."""
        chosen, at_s = random.Random(f"load {self.rate:g} {seed}"), 0.0
        ids, asks = range(vocab_size // 8, vocab_size), []
        while (at_s := at_s + chosen.expovariate(self.rate)) < self.warm_s + self.window_s:
            prompt = chosen.choices(ids, k=chosen.randint(*PROMPT_TOKENS))
            asks.append(Ask(at_s, prompt, chosen.randint(*NEW_TOKENS)))
        return asks


class Served(NamedTuple):
    """What became of the requests of a window.

    offered     requests; refused: of these, with 429
    good        served within both limits
    window_s    seconds
    refusal_s   median seconds until a refusal; None without any
    """

    offered: int
    refused: int
    good: int
    window_s: float
    refusal_s: float | None

    @property
    def goodput(self) -> float:
        """Return requests per second that were served within both limits."""
        return self.good / self.window_s

    @property
    def good_share(self) -> float:
        """Return the share of the offered requests that were served within both limits."""
        return self.good / max(1, self.offered)


def served(replies: Sequence[Reply], load: Load, slo_ttft_s: float, slo_tpot_s: float) -> Served:
    """Count the requests that were sent in the window."""
    inside = [one for one in replies if one.ask.at_s >= load.warm_s]
    good = [
        one for one in inside if one.status == 200 and one.ttft_s <= slo_ttft_s and one.tpot_s <= slo_tpot_s
    ]
    refusals_s = [one.ttft_s for one in inside if one.status == 429]
    usual_s = statistics.median(refusals_s) if refusals_s else None
    return Served(len(inside), len(refusals_s), len(good), load.window_s, usual_s)
