"""The matrix of ways in which an answer can come about, and a small set of cells that covers all pairs.

Used by the tests of the matrix and by docs/tools/make_equality.py. It computes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "mode": ("pooled", "split", "colocated"),
    "source": ("none", "rank", "DRAM", "HDF5"),
    "chunk": ("16", "64", "whole"),
    "preemption": ("recompute", "swap"),
    "sharing": ("off", "hash", "radix"),
    "sampling": ("greedy", "sampled", "nucleus", "n=3"),
    "moves": ("blocks", "layers", "stages", "heads", "turns"),
    "drafts": ("off", "on"),
}
"""The values of each dimension.

mode         which ranks compute: prefill and decode ranks with a pool or without one, or ranks that do both
source       where the beginning of a prompt comes from: nowhere (it is computed), pages of the rank, the
             pool's DRAM, its HDF5 files
chunk        most tokens of a forward pass; whole: prompts are not cut
preemption   what happens to a sequence when pages run out
sharing      how a rank shares pages between prompts
sampling     how tokens are chosen
moves        KV goes to and from the pool by whole blocks, or by layers beside the passes, or each stage of a
             pipeline moves its layers, each of two tensor parallel members its heads, or each of two context
             parallel decode ranks the blocks that it has
drafts       the running batch computes drafts beside its tokens, most of them right
"""

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two values, each with its dimension."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of each dimension."""

    mode: str
    source: str
    chunk: str
    preemption: str
    sharing: str
    sampling: str
    moves: str
    drafts: str = "off"

    @property
    def name(self) -> str:
        """Return the values, for the name of a test."""
        return " ".join(getattr(self, dimension) for dimension in DIMENSIONS)

    @property
    def possible(self) -> bool:
        """Tell whether such a cluster exists: blocks and swapped KV need a pool, pages need sharing."""
        if self.mode == "split" and (self.source in ("DRAM", "HDF5") or self.preemption == "swap"):
            return False
        if self.moves in ("layers", "stages") and self.mode == "colocated":
            return False  # its ranks decode: they would wait
        if self.moves == "turns" and (self.mode == "colocated" or self.drafts == "on"):
            return False  # ranks that deal out contexts compute one token of a sequence at a time
        if self.moves == "stages" and self.chunk == "whole":
            return False
        return self.source != "rank" or self.sharing != "off"

    @property
    def in_process(self) -> bool:
        """Tell whether the cell can be tested without a cluster: all but HDF5 files."""
        return self.source != "HDF5"

    def pairs(self) -> Iterator[Pair]:
        """Yield each two of the values."""
        values = [(dimension, getattr(self, dimension)) for dimension in DIMENSIONS]
        return itertools.combinations(values, 2)


def cells() -> list[Cell]:
    """Return all cells that are possible."""
    return [cell for values in itertools.product(*DIMENSIONS.values()) if (cell := Cell(*values)).possible]


def covering(of: list[Cell]) -> list[Cell]:
    """Choose cells that have all pairs of values between them that `of` has.

    Greedy: always the first cell with the most pairs that are still missing.
    """
    missing = {pair for cell in of for pair in cell.pairs()}
    chosen = []
    while missing:
        best = max(of, key=lambda cell: len(missing.intersection(cell.pairs())))
        missing.difference_update(best.pairs())
        chosen.append(best)
    return chosen


IN_PROCESS = [cell for cell in cells() if cell.in_process]
"""Cells that `make soak` tests in one process, all of them."""

CHOSEN = covering(IN_PROCESS)
"""Cells that `make test` tests."""

CLUSTERS = [
    (mode, chunk, preemption, sharing)
    for mode, chunk, preemption, sharing in itertools.product(
        *(DIMENSIONS[name] for name in ("mode", "chunk", "preemption", "sharing"))
    )
    if Cell(mode, "none", chunk, preemption, sharing, "greedy", "blocks").possible
]
"""Clusters that `make soak` starts. Each is asked from every source that it has, with every sampling."""
