"""Staging memory: the part of a rank's segment through which blocks travel between pool and pages.

Used by `runner.py`. `scheduler.instance.staging` decides what each half and slot is used for.
"""

from __future__ import annotations

import numpy as np

from mooncake_lite.engine.contract import ComputeEngine
from store.layout import BlockLayout


class StagingBlocks:
    """The end of a rank's segment, as blocks: two halves for groups of blocks, then single slots.

    blocks        (count, *block_shape)
    half_blocks   blocks per half
    num_slots     single slots after the halves
    """

    def __init__(self, segment: np.ndarray, layout: BlockLayout, engine: ComputeEngine) -> None:
        self.layout = layout
        count = len(segment) // layout.nbytes
        used = segment[: count * layout.nbytes]
        self.blocks = used.view(engine.block_dtype).reshape(count, *engine.block_shape)
        self.half_blocks = max(2, (count - 2) * 3 // 8)
        self.num_slots = count - 2 * self.half_blocks

    def half(self, number: int, count: int) -> np.ndarray:
        """Return the first `count` blocks of half 0 or 1, (count, *block_shape)."""
        start = number * self.half_blocks
        return self.blocks[start : start + count]

    def part(self, number: int, count: int, layers: slice, second: int = 0) -> np.ndarray:
        """Return memory of half 0 or 1 for some layers of `count` blocks: (count, len(layers), ...).

        second   1: in the second part of the half
        """
        nbytes, shape = self.layout.layer_nbytes, self.blocks.shape[2:]
        size = layers.stop - layers.start
        half = self.half(number, self.half_blocks).reshape(-1).view(np.uint8)
        start = self.half_blocks * self.layout.layers // 2 * second * nbytes
        room = half[start : start + count * size * nbytes]
        return room.view(self.blocks.dtype).reshape(count, size, *shape)

    def slot(self, number: int) -> np.ndarray:
        """Return the block of a slot, (1, *block_shape)."""
        start = 2 * self.half_blocks + number
        return self.blocks[start : start + 1]
