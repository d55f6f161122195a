"""Limits of the work that one rank does at once. Plain data, the same for the whole life of a rank."""

from __future__ import annotations

from dataclasses import dataclass

ROW_COSTS = ((1, 1.0), (2, 1.75), (3, 2.0), (4, 2.05), (5, 2.5), (8, 2.8), (9, 3.4), (16, 4.4), (32, 8.0))
"""Measured on two threads with the default model, between steps of one row (docs/explain/speculation.md)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a forward pass of one rank.

    tokens      most tokens; the running batch may exceed it, because each of its sequences has one, or more
                with drafts
    sequences   most sequences that are loaded, prefilled or decoded
    prefills    most prompts that are computed at once
    chunked     whether a prompt may be cut into chunks; otherwise each is computed in one pass, however long
    overlaps    whether blocks are stored while prompts are computed: those of a prompt behind its chunks, and
                its last ones beside the next prompt; otherwise prompts wait for stores
    layers      layers of a block, if prefixes come in by layers ahead of the computation, and the blocks of a
                prompt's last chunk leave by layers behind it; 0: they move whole, before and after it
    least       fewest blocks that move by layers: each layer is a transfer of its own
    late        a pass ends before its tokens are drawn: the rank is the first stage of a pipeline. They come
                as `step.Late`
    even        context at which attention costs as much as all else, if chunks shrink with their context, so
                that each takes the same time; 0: all have the same size
    row_costs   (rows, time of a pass of the running batch with so many rows, in any unit), ascending. They
                decide how many drafts there are. The last one has the most rows of a pass with drafts
    """

    tokens: int
    sequences: int = 1 << 30
    prefills: int = 1
    chunked: bool = True
    overlaps: bool = True
    layers: int = 0
    least: int = 1
    late: bool = False
    even: int = 0
    row_costs: tuple[tuple[int, float], ...] = ROW_COSTS

    def __post_init__(self) -> None:
        assert min(self.tokens, self.sequences, self.prefills) >= 1, f"{self} has no room for a prompt"
