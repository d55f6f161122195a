"""LRU caches of all sizes at once: what each would have of the prompts of a trace.

Used by `workload stats`. Pure. `reuse.cached_tokens` plays one size, and is what this is compared with in the
tests. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from mooncake_lite.workloads.traces import Trace


@dataclass(frozen=True, slots=True)
class LruCurve:
    """Which size of a cache has how many tokens of all prompts.

    blocks   (n,) int64, ascending: sizes, each of which has more than the one before
    tokens   (n,) int64: of all prompts that a cache of this size has
    """

    blocks: np.ndarray
    tokens: np.ndarray

    def tokens_at(self, blocks: float) -> int:
        """Return the tokens that a cache of so many blocks has."""
        place = int(np.searchsorted(self.blocks, blocks, side="right"))
        return int(self.tokens[place - 1]) if place else 0

    def blocks_for(self, share: float) -> int:
        """Return the blocks of the smallest cache that has this share of what one without a limit has."""
        return int(self.blocks[np.searchsorted(self.tokens, share * self.tokens[-1])])

    @property
    def knee(self) -> int:
        """Return the size whose share of all hits is furthest above its share of the size that has them all.

        Beyond it a block adds less than the mean block does. It is the knee that Kneedle finds without
        smoothing (Satopaa et al. 2011, "Finding a 'kneedle' in a haystack").
        """
        above = self.tokens / self.tokens[-1] - self.blocks / self.blocks[-1]
        return int(self.blocks[np.argmax(above)])


def lru_curve(trace: Trace) -> LruCurve:
    """Return the curve of a trace; one without any reuse has no sizes.

    A block is there in caches from its stack distance on (Mattson et al. 1970, "Evaluation techniques for
    storage hierarchies"). LRU keeps what was used last, so a cache has a block if it has room for the blocks
    that were used since. Each of those has one last use. The other uses since then are counted by a binary
    indexed tree (Bennett and Kruskal 1975, "LRU stack processing"). A block is of use with all before it.
    """
    size, last_use, gains = trace.block_tokens, dict[int, int](), Counter[int]()
    prompts = [one.hash_ids[: one.input_length // size] for one in trace.requests]
    answers = trace.answers or [()] * len(prompts)
    past = [0] * (1 + sum(map(len, prompts)) + sum(map(len, answers)))  # uses that others followed, as a tree
    uses = num_past = 0
    for request, ids, answer in zip(trace.requests, prompts, answers):
        distance = 0
        for number, one in enumerate(ids, 1):
            if one not in last_use:
                break
            place, before = last_use[one], 0
            while place:
                before += past[place]
                place &= place - 1
            distance = max(distance, uses - last_use[one] + 1 - (num_past - before))
            gains[distance] += size - (number * size == request.input_length)  # the last token is computed
        for one in reversed([*ids, *answer]):  # as in cached_tokens
            uses += 1
            place = last_use.get(one, len(past))
            num_past += place < len(past)
            while place < len(past):
                past[place] += 1
                place += place & -place
            last_use[one] = uses
    blocks = sorted(gains)
    return LruCurve(np.array(blocks, int), np.cumsum([gains[one] for one in blocks], dtype=int))
