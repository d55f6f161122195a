"""Linear layers of the forward pass: our kernels for a few tokens on a CPU, torch for many and elsewhere.

Used by forward.py. Knows tensors and weights, no attention. Where torch becomes faster is measured when a
model is loaded, once for each shape and format. Explained in docs/model.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as functional

from kernels_numba.linear_layers import MAX_ROWS_OF_X, GgufRows, Linears, dequantize_v0
from mooncake_lite.model.weights import Linear

_SIZES = (0, 1, 2, 4, 8, 16, MAX_ROWS_OF_X)
"""Limits that a projection may get."""
_LAYERS = 6
"""Layers of one shape that are measured in turn: together they and their tensors are more than a core's cache
holds, as in a decode step, where each layer is met once."""
_ROUNDS, _FEWEST, _ENOUGH_S = 4, 3, 0.03
"""Of one comparison: as many rounds, or fewer once they have taken this long and _FEWEST runs are counted."""
_PIECE_VALUES = 1 << 20
"""Values of a weight that are unpacked at a time: 4 MB, which the second or third cache holds."""


class Projection:
    """Linear layers of one input, computed together: q, k and v; gate and up; or a single one.

    limit   the most tokens that go through our kernels; 0, until it is measured: all go through torch, the
            only way on another device or in another dtype
    """

    def __init__(self, linears: list[Linear]) -> None:
        self.linears = linears
        self.limit = 0
        self._biased = any(linear.bias is not None for linear in linears)
        self._kernels: Linears | None = None

    @property
    def kernels(self) -> Linears:
        """Our kernels over these weights: float32 or blocks, on the CPU. Made when first asked for."""
        if self._kernels is None:
            self._kernels = Linears([linear.weight for linear in self.linears])
        return self._kernels

    def __call__(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """(n, in) -> one (n, out) for each layer."""
        return self.by_kernels(hidden) if 0 < hidden.shape[0] <= self.limit else self.by_torch(hidden)

    def by_kernels(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The same with our kernels, for at most MAX_ROWS_OF_X tokens."""
        results = self.kernels(hidden)
        if self._biased:
            for result, linear in zip(results, self.linears):
                if linear.bias is not None:
                    result += linear.bias
        return results

    def by_torch(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The same with torch."""
        return [
            self._unpacked(hidden, index, linear)
            if linear.dense is None
            else functional.linear(hidden, linear.dense, linear.bias)
            for index, linear in enumerate(self.linears)
        ]

    def _unpacked(self, hidden: torch.Tensor, index: int, linear: Linear) -> torch.Tensor:
        """A piece of the weight as float32, torch's product with it, the next piece into the same place."""
        rows, width = shape_of(linear.weight)
        piece = min(rows, max(1, _PIECE_VALUES // width))
        values = _scratch(piece * width)[: piece * width].view(piece, width)
        out = hidden.new_empty(hidden.shape[0], rows)
        for first in range(0, rows, piece):
            part = values[: min(piece, rows - first)]
            self.kernels.dequantized(index, first, part.numpy())
            torch.mm(hidden, part.t(), out=out[:, first : first + piece])
        return out if linear.bias is None else out.add_(linear.bias)


_kept: list[torch.Tensor] = []


def _scratch(values: int) -> torch.Tensor:
    """A place for unpacked weights that is there already: fresh memory costs a page fault each 4 KiB."""
    if not _kept or _kept[0].shape[0] < values:
        _kept[:] = [torch.empty(max(values, _PIECE_VALUES))]
    return _kept[0]


# -------------------------------------------------------------------------------- where torch is faster


@torch.inference_mode()
def measure_limits(projections: Iterable[Projection]) -> None:
    """Give every projection its limit: one for all of the same shapes and formats.

    It is the largest of _SIZES at which our kernels are not slower, found by halving: they win for few tokens
    and torch for many.
    """
    groups: dict[tuple[object, ...], list[Projection]] = {}
    for projection in projections:
        groups.setdefault(tuple(map(_kind, projection.linears)), []).append(projection)
    for alike in groups.values():
        chosen = alike[:: -(-len(alike) // _LAYERS)]
        wins, loses = 0, len(_SIZES)
        while loses - wins > 1:
            middle = (wins + loses) // 2
            if _kernels_win(chosen, _SIZES[middle]):
                wins = middle
            else:
                loses = middle
        for projection in alike:
            projection.limit = _SIZES[wins]


def _kernels_win(projections: list[Projection], tokens: int) -> bool:
    """Whether our kernels take no longer than torch over these layers, by the lower quartile of their runs.

    In a round each way goes through all layers, as a decode step does: its threads are then awake or asleep
    as they are in a step, and what it reads has left the cache since. The first round is not counted. The
    quartile, because other processes start beside this one: with two busy ones on two cores medians chose
    another limit in one run of three, minima even more often, quartiles hardly ever.
    """
    x = torch.ones(tokens, shape_of(projections[0].linears[0].weight)[1])
    ours: list[float] = []
    theirs: list[float] = []
    begin = time.perf_counter()
    for round_ in range(1 + _ROUNDS):
        for taken, run in ((ours, "by_kernels"), (theirs, "by_torch")):
            for projection in projections:
                start = time.perf_counter()
                getattr(projection, run)(x)
                taken.append(time.perf_counter() - start)
        if round_ == 0:
            ours, theirs = [], []
        elif len(ours) >= _FEWEST and time.perf_counter() - begin > _ENOUGH_S:
            break
    return _quartile(ours) <= _quartile(theirs)


def _quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def _kind(linear: Linear) -> tuple[object, ...]:
    """Shape, format, and whether torch has a tensor of it."""
    form = linear.weight.format if isinstance(linear.weight, GgufRows) else "tensor"
    return (*shape_of(linear.weight), form, linear.dense is None)


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
