"""Moving KV between pages and pool blocks on the CPU, beside a copy of contiguous memory with all threads.

Run by `bench.kernels`. Bytes are those of the uncompressed KV, whatever a codec makes of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch

from kernels_numba import gather_blocks, scatter_blocks
from mooncake_lite.bench.result import Action, Row, compare, gigabytes_per_second

LAYERS, KV_HEADS, PAGE, BLOCK, DIM = 30, 3, 16, 64, 64
"""SmolLM2's KV: a block has 2.9 MB."""


@numba.njit(parallel=True)
def copy_all(target: np.ndarray, source: np.ndarray) -> None:
    """Copy with all threads; both (n,) of one dtype."""
    for i in numba.prange(source.size):
        target[i] = source[i]


def run(quick: bool) -> list[Row]:
    """Measure; in some seconds when quick."""
    runs, blocks = (5, 24) if quick else (11, 48)
    return movers(blocks, runs, "none") + movers(blocks, runs, "int8")
