"""What the plain rungs of attention on CUDA share: the size of their blocks, their constants, their launch.

Used by attention_cuda and attention_tiles_cuda, which hold the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels_numba.checks import NO_WINDOW
from kernels_numba.gpu.backend_cuda import compiled, on_device, on_its_device

THREADS = 64
"""Threads of a block, and keys of a tile. Two warps: small blocks hide each other's waits, and the simulator
pays for every thread."""
MAX_HEAD_DIM = 256
"""The largest head_dim of common models; see TILE_ROWS of attention_tiles_cuda for what it costs."""
MAX_CHANNELS = MAX_HEAD_DIM // THREADS

LOWEST = np.float32(-1e30)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NAN = np.float32(np.nan)


def rung(kernel: Any, grid_of: Callable[[Any, Any, Any], Any]) -> Callable[..., None]:
    """Return the launch of a rung that takes arrays. grid_of: from query, keys and lengths."""

    @on_its_device
    def launch(
        query: Any,
        key_cache: Any,
        value_cache: Any,
        tables: Any,
        new: Any,
        lens: Any,
        scale: float,
        out: Any,
        window: int = NO_WINDOW,
    ) -> None:
        views, stream = on_device(query, key_cache, value_cache, tables, new, lens, out)
        grid = grid_of(query, key_cache, lens)
        compiled(kernel)[grid, THREADS, stream](*views, np.float32(scale), np.int64(window))

    return launch
