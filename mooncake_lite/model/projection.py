"""Linear layers of the forward pass: our kernels for a few tokens on a CPU, torch for many and elsewhere.

Used by forward.py. Knows tensors and weights, no attention. Which kernels multiply how many rows is measured
once per machine (linear_paths.py). Explained in docs/explain/model.md and docs/explain/batch-invariance.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as functional

from kernels_numba.matmul.linear_layers import MAX_ROWS_OF_X, GgufRows, Linears, dequantize_v0
from mooncake_lite.model.weights import Linear

Family: TypeAlias = Literal["fixed", "tiles", "torch"]

_PIECE_VALUES = 1 << 20
"""Values of a weight that are unpacked at a time: 4 MB, which the second or third cache holds."""
SUM_TERMS = 512
"""Terms that torch sums at a time where bits must not depend on the rows or the threads. Its matrix product
(MKL) cuts sums of 1,536 terms in ways that depend on both, and sums of 576 in none."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Which kernels multiply how many rows of x.

    fixed   the most rows for products in fixed point, a row at a time (linear_tiles_fixed.py)
    tiles   the most rows for tiles of sums in registers (linear_tiles.py); torch multiplies more
    """

    fixed: int = 0
    tiles: int = 0

    def family(self, rows: int) -> Family:
        """The kernels for so many rows."""
        if 0 < rows <= self.fixed:
            return "fixed"
        return "tiles" if 0 < rows <= self.tiles else "torch"


INVARIANT = Paths(fixed=0, tiles=MAX_ROWS_OF_X)
"""One family for 1 to 32 rows: what a row comes to does not depend on how many there are."""


def invariant_pieces(query_lens: Seq[int], singles: int) -> list[int]:
    """How many rows are multiplied at a time, so that no sequence changes the bits of another.

        query_lens   new tokens of each sequence; of the first `singles` sequences one

    Those of one token go in pieces that one family of kernels takes; each other sequence by itself.
    """
    whole, rest = divmod(singles, MAX_ROWS_OF_X)
    return [MAX_ROWS_OF_X] * whole + [rest] * (rest > 0) + [n for n in query_lens[singles:] if n]


class Projection:
    """Linear layers of one input, computed together: q, k and v; gate and up; or a single one.

    paths       which kernels multiply; torch alone until it is set: the only way on another device or in
                another dtype
    invariant   torch's sums are cut as well (SUM_TERMS)
    """

    def __init__(self, linears: list[Linear]) -> None:
        self.linears = linears
        self.paths = Paths()
        self.invariant = False
        self._biased = any(linear.bias is not None for linear in linears)
        self._kernels: Linears | None = None

    @property
    def kernels(self) -> Linears:
        """Our kernels over these weights: float32 or blocks, on the CPU. Made when first asked for."""
        if self._kernels is None:
            self._kernels = Linears([linear.weight for linear in self.linears])
        return self._kernels

    def __call__(self, hidden: torch.Tensor, pieces: Seq[int] = ()) -> list[torch.Tensor]:
        """(n, in) -> one (n, out) for each layer; `pieces`: rows that are multiplied together, empty: all."""
        if len(pieces) <= 1:
            return self.by(self.paths.family(hidden.shape[0]), hidden)
        parts = [self.by(self.paths.family(part.shape[0]), part) for part in hidden.split(list(pieces))]
        return [torch.cat(results) for results in zip(*parts)]

    def by(self, family: Family, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The same with one family of kernels; ours take at most MAX_ROWS_OF_X rows."""
        if family == "torch":
            return self._by_torch(hidden)
        results = self.kernels(hidden, fixed=family == "fixed")
        if self._biased:
            for result, linear in zip(results, self.linears):
                if linear.bias is not None:
                    result += linear.bias
        return results

    def _by_torch(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The same with torch."""
        return [
            self._in_parts(hidden, index, linear)
            if linear.dense is None or self.invariant
            else functional.linear(hidden, linear.dense, linear.bias)
            for index, linear in enumerate(self.linears)
        ]

    def _in_parts(self, hidden: torch.Tensor, index: int, linear: Linear) -> torch.Tensor:
        """torch's product with the tensor; or with a piece of the weight as float32, then with the next piece
        in the same place."""
        rows, width = shape_of(linear.weight)
        out = hidden.new_empty(hidden.shape[0], rows)
        if linear.dense is not None:
            self._multiply(hidden, linear.dense, out)
        else:
            piece = min(rows, max(1, _PIECE_VALUES // width))
            values = _scratch(piece * width)[: piece * width].view(piece, width)
            for first in range(0, rows, piece):
                part = values[: min(piece, rows - first)]
                self.kernels.dequantized(index, first, part.numpy())
                self._multiply(hidden, part, out[:, first : first + piece])
        return out if linear.bias is None else out.add_(linear.bias)

    def _multiply(self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """out = hidden @ weight.T."""
        terms = SUM_TERMS if self.invariant else weight.shape[1]
        torch.mm(hidden[:, :terms], weight[:, :terms].t(), out=out)
        for first in range(terms, weight.shape[1], terms):
            span = slice(first, first + terms)
            out.addmm_(hidden[:, span], weight[:, span].t())


_kept: list[torch.Tensor] = []


def _scratch(values: int) -> torch.Tensor:
    """A place for unpacked weights that is there already: fresh memory costs a page fault each 4 KiB."""
    if not _kept or _kept[0].shape[0] < values:
        _kept[:] = [torch.empty(max(values, _PIECE_VALUES))]
    return _kept[0]


def shape_of(weight: torch.Tensor | GgufRows) -> tuple[int, int]:
    """(out, in)."""
    if isinstance(weight, GgufRows):
        return weight.blocks.shape[0], weight.width
    return weight.shape[0], weight.shape[1]


def embedded(token_ids: torch.Tensor, weight: torch.Tensor | GgufRows) -> torch.Tensor:
    """The rows of the embedding: (n,) int64 -> (n, hidden)."""
    if isinstance(weight, GgufRows):
        rows = GgufRows(weight.format, np.asarray(weight.blocks)[token_ids.numpy()])
        return torch.from_numpy(dequantize_v0(rows))
    return functional.embedding(token_ids, weight)
