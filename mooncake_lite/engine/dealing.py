"""How the KV of each sequence is dealt out to the members of an instance (context parallel).

Used by `engine.py` and `ranks/computing`. The books of pages: scheduler/instance/dealt_pages.py. Attention:
kernels_numba/attention/attention_dealt.py. Explained in docs/explain/several-ranks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.model.shares import PIECE_TOKENS
from scheduler.instance.dealt_pages import place_in_rows
from scheduler.instance.step import Chunk

if TYPE_CHECKING:
    from kernels_numba.attention.attention_dealt import DealtContexts


@dataclass(frozen=True, slots=True)
class Dealing:
    """The part of one member.

    turn     of this member, of `turns`; unit_tokens: of a unit
    gather   float32 of this member -> those of all, by turn
    """

    turn: int
    turns: int
    unit_tokens: int
    gather: Callable[[np.ndarray], Seq[np.ndarray]]

    def owns(self, token: int) -> bool:
        """Tell whether this member has the KV of a token."""
        return token // self.unit_tokens % self.turns == self.turn

    def slot(self, pages: Seq[int], token: int) -> int:
        """Return the flat cache slot of a token of a sequence; -1 for one of another member."""
        turn, index = place_in_rows(token, PAGE_TOKENS, self.unit_tokens, self.turns)
        return pages[index] * PAGE_TOKENS + token % PAGE_TOKENS if turn == self.turn else -1

    def slots(self, chunk: Chunk) -> list[int]:
        """Return the flat cache slot of each token of a chunk; -1 for those of other members."""
        return [self.slot(chunk.pages, token) for token in range(chunk.start, chunk.end)]

    def contexts(self, tokens: Seq[int]) -> DealtContexts:
        """Return what attention needs to know of contexts with so many tokens."""
        from kernels_numba.attention.attention_dealt import DealtContexts

        lens = np.array(tokens, np.int64)
        return DealtContexts(lens, self.turn, self.turns, self.unit_tokens, PIECE_TOKENS, self.gather)


def singles(chunk: Chunk) -> Seq[Chunk]:
    """Return a chunk for each token of a chunk: attention over dealt contexts takes no others."""
    if len(chunk.token_ids) == 1 or not chunk.prompt:
        return chunk.rows
    assert chunk.score is None, "prompts are computed elsewhere"
    last = len(chunk.token_ids) - 1
    return [
        Chunk(chunk.job, (token,), chunk.start + row, chunk.pages, chunk.draws if row == last else (), True)
        for row, token in enumerate(chunk.token_ids)
    ]
