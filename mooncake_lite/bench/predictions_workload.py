"""Requests for `predictions`: prompts of mixed length, two thirds of which begin as others do.

Made from a seed. Knows tokens and times, no cluster.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mooncake_lite.bench.open_loop import Ask

MAX_TOKENS = 1024
"""Of a prompt, at most; 64 at least."""

DOCUMENTS = 16
"""Beginnings that prompts share, of 64 to 768 tokens."""

SHARING = 2 / 3
NEW_TOKENS = (8, 32)
TRACED = {"x-mooncake-lite-trace": "1"}


@dataclass(frozen=True, slots=True)
class Workload:
    """vocab_size: of the model. Requests of another seed share no prefix with these."""

    vocab_size: int
    seed: int

    def asks(self, count: int, every_s: float = 0.0) -> list[Ask]:
        """Make requests that arrive as a Poisson process, one every `every_s` seconds in the mean."""
        chosen = random.Random(f"requests {self.seed}")
        documents = [self._tokens(chosen, 64, 768) for _ in range(DOCUMENTS)]
        asks, at_s = [], 0.0
        for _ in range(count):
            prompt = self._tokens(chosen, 64, MAX_TOKENS)
            if chosen.random() < SHARING:
                prompt = (chosen.choice(documents) + self._tokens(chosen, 16, 256))[:MAX_TOKENS]
            asks.append(Ask(at_s, prompt, chosen.randint(*NEW_TOKENS), TRACED))
            at_s += chosen.expovariate(1.0) * every_s
        return asks

    def _tokens(self, chosen: random.Random, least: int, most: int) -> list[int]:
        """Draw tokens. The first eighth of the ids is left out: control tokens and single bytes are there."""
        ids = range(self.vocab_size // 8, self.vocab_size)
        return chosen.choices(ids, k=chosen.randint(least, most))
