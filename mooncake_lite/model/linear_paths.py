"""Which kernels multiply how many rows, for each kind of linear layer: measured.

Used by forward.py. Measured once per machine: path_table.py keeps the results on disk. Explained in
docs/explain/model.md.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import torch

from kernels_numba.matmul.linear_layers import MAX_ROWS_OF_X, GgufRows, measured_region_us, use_region_us
from kernels_numba.runtime import get_num_threads
from mooncake_lite.model.path_table import PathTable
from mooncake_lite.model.projection import Family, Paths, Projection, shape_of
from mooncake_lite.model.weights import Linear

_FIXED_ROWS = (0, 1, 2, 4, 8)
"""Limits that products in fixed point may get: they take a row at a time."""
_TILE_ROWS = (0, 1, 2, 4, 8, 16, MAX_ROWS_OF_X)
_LAYERS = 6
"""Layers of one kind that are measured in turn: together they and their tensors are more than a core's cache
holds, as in a decode step, where each layer is met once."""
_REGION_RUNS = 20
"""Measurements of a parallel region, over a second: another process that starts now pauses within it."""
_ROUNDS, _FEWEST, _ENOUGH_S = 8, 12, 0.1
"""Of one comparison: as many rounds, or fewer once they have taken this long and _FEWEST runs are counted."""


def choose_paths(projections: Iterable[Projection], table: PathTable) -> None:
    """Give every projection its paths: those that the table of this machine names for its kind of layer.

    Our kernels get the cost of a parallel region from the table as well. What the table lacks is measured and
    added to it.
    """
    workers = get_num_threads()
    use_region_us(
        workers, table.region_us(lambda: min(measured_region_us(workers) for _ in range(_REGION_RUNS)))
    )
    groups: dict[str, list[Projection]] = {}
    for projection in projections:
        groups.setdefault(" + ".join(map(_kind, projection.linears)), []).append(projection)
    found = table.update(groups.keys(), lambda kind: measured_paths(groups[kind]))
    for kind, alike in groups.items():
        for projection in alike:
            projection.paths = found[kind]


@torch.inference_mode()
def measured_paths(alike: Sequence[Projection]) -> Paths:
    """The fastest kernels by number of rows, over some of these layers of one kind.

    Each limit is found by halving: fixed point wins for the fewest rows, torch for many.
    """
    chosen = alike[:: -(-len(alike) // _LAYERS)]
    fixed = 0
    if chosen[0].kernels.has_fixed:
        fixed = _last(_FIXED_ROWS, lambda rows: _wins(chosen, rows, "fixed", "tiles"))
    tiles = _last(_TILE_ROWS, lambda rows: _wins(chosen, rows, Paths(fixed, rows).family(rows), "torch"))
    return Paths(min(fixed, tiles), tiles)


def _last(limits: Sequence[int], holds: Callable[[int], bool]) -> int:
    """The largest of `limits` for which `holds`: it is true up to some limit, and for the first one."""
    return limits[bisect_left(limits, True, 1, key=lambda limit: not holds(limit)) - 1]


def _wins(projections: Sequence[Projection], rows: int, ours: Family, theirs: Family) -> bool:
    """Whether one family takes no longer than another over these layers, by the lower quartile of their runs.

    In a round each way goes through all layers, as a decode step does: its threads are then awake or asleep
    as they are in a step, and what it reads has left the cache since. The first round is not counted. The
    quartile, because other processes start beside this one: with two busy ones on two cores medians chose
    another limit in one run of three, minima even more often, quartiles hardly ever.
    """
    x = torch.ones(rows, shape_of(projections[0].linears[0].weight)[1])
    taken: dict[Family, list[float]] = {ours: [], theirs: []}
    begin = time.perf_counter()
    for round_ in range(1 + _ROUNDS):
        for family, seconds in taken.items():
            for projection in projections:
                start = time.perf_counter()
                projection.by(family, x)
                seconds.append(time.perf_counter() - start)
        if round_ == 0:
            taken = {ours: [], theirs: []}
        elif len(taken[ours]) >= _FEWEST and time.perf_counter() - begin > _ENOUGH_S:
            break
    return _quartile(taken[ours]) <= _quartile(taken[theirs])


def _quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def _kind(linear: Linear) -> str:
    """Shape, format, and whether torch has a tensor of it, as the table names them."""
    form = linear.weight.format if isinstance(linear.weight, GgufRows) else "float32"
    rows, width = shape_of(linear.weight)
    tensor = "" if linear.dense is None or form == "float32" else " and float32"
    return f"{rows}x{width} {form}{tensor}"
