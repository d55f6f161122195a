"""Linear layers of the forward pass: our kernels for a few tokens on a CPU, torch for many and elsewhere.

Used by forward.py. Knows tensors and weights, no attention. Where torch becomes faster is measured when a
model is loaded, once for each shape and format. Explained in docs/model.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as functional

from kernels_numba.linear_layers import MAX_ROWS_OF_X, GgufRows, Linears, dequantize_v0
from mooncake_lite.model.weights import Linear

_TRIED = (MAX_ROWS_OF_X, 16, 8, 4)
"""Batch sizes at which a model's layers are measured, the largest first."""
_RUNS = 3
_PIECE_VALUES = 1 << 20
"""Values of a weight that are unpacked at a time: 4 MB, which the second or third cache holds."""

Limits = dict[tuple[object, ...], int]
"""Shape and format of a projection -> the most tokens that go through our kernels."""


class Projection:
    """Linear layers of one input, computed together: q, k and v; gate and up; or a single one.

    linears   weights (out, in): tensors, or GgufRows with the bytes of the file
    limits    what was measured before for projections alike, and is added to; None: tensors go through torch,
              the only way on another device or in another dtype, and for float32 the faster one
    """

    def __init__(self, linears: list[Linear], limits: Limits | None) -> None:
        self.linears = linears
        self.limit = 0
        self._small: Linears | None = None
        self._single = len(linears) == 1 and linears[0].bias is None
        self._biased = any(linear.bias is not None for linear in linears)
        if limits is None:
            return
        self._small = Linears([linear.weight for linear in linears])
        alike = tuple((kind_of(linear.weight), *shape_of(linear.weight)) for linear in linears)
        if alike not in limits:
            limits[alike] = self._measured_limit()
        self.limit = limits[alike]

    def __call__(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """(n, in) -> one (n, out) for each layer."""
        if self._small is None or not 0 < hidden.shape[0] <= self.limit:
            return self._large(hidden)
        results = self._small(hidden)
        if self._biased:
            for result, linear in zip(results, self.linears):
                if linear.bias is not None:
                    result += linear.bias
        return results

    def _large(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [
            self._unpacked(hidden, i, linear)
            if isinstance(linear.weight, GgufRows)
            else functional.linear(hidden, linear.weight, linear.bias)
            for i, linear in enumerate(self.linears)
        ]

    def _unpacked(self, hidden: torch.Tensor, index: int, linear: Linear) -> torch.Tensor:
        """A piece of the weight as float32, torch's product with it, the next piece into the same place."""
        assert self._small is not None
        rows, width = shape_of(linear.weight)
        piece = min(rows, max(1, _PIECE_VALUES // width))
        values = _scratch(piece * width)[: piece * width].view(piece, width)
        out = hidden.new_empty(hidden.shape[0], rows)
        for first in range(0, rows, piece):
            part = values[: min(piece, rows - first)]
            self._small.dequantized(index, first, part.numpy())
            torch.mm(hidden, part.t(), out=out[:, first : first + piece])
        return out if linear.bias is None else out.add_(linear.bias)

    def _measured_limit(self) -> int:
        """The largest batch of _TRIED at which our kernels are not slower, 0 if there is none."""
        small = self._small
        assert small is not None
        for tokens in _TRIED:
            x = torch.ones(tokens, small.width)
            ours, theirs = _best_seconds(lambda x=x: small(x), lambda x=x: self._large(x))  # type: ignore[misc]
            if ours <= theirs:
                return tokens
        return 0


def _best_seconds(*actions: Callable[[], object]) -> list[float]:
    """The best of a few runs of each, in turn, the first of which counts not."""
    best = [float("inf")] * len(actions)
    for run in range(1 + _RUNS):
        for i, action in enumerate(actions):
            start = time.perf_counter()
            action()
            if run:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


_kept: list[torch.Tensor] = []


def _scratch(values: int) -> torch.Tensor:
    """A place for unpacked weights that is there already: fresh memory costs a page fault each 4 KiB."""
    if not _kept or _kept[0].shape[0] < values:
        _kept[:] = [torch.empty(max(values, _PIECE_VALUES))]
    return _kept[0]


def kind_of(weight: torch.Tensor | GgufRows) -> str:
    """The format's name."""
    return weight.format if isinstance(weight, GgufRows) else "float32"


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
