"""A row of x in fixed point, as linear_tiles_fixed.py multiplies it; explained there.

Called by linear_tiles.py, once a call and row of x. A block of 32 values has a scale, a power of two, and
each value is an integer of three signed bytes, its *limbs*: (65536 * high + 256 * middle + low) * scale.
What lies in memory, with STEP values to a step of the kernels (the last step begins earlier where it would
end behind the row; what the step before has is 0 there):

    scales   float32, a block: as many as the blocks of TILE_ROWS rows of weights, and the row's repeated
    sums     float32, a block: the sum of its values; likewise
    there    int32, a block: -1, and 0 behind the last block of the row
    limbs    a step: 2 vectors of bytes high, 2 middle, 2 low, then 2 of int32, which take back what each
             weight of a pair_of_bytes has too much: 128
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import numpy as np

from kernels_numba.intrinsics.linear_vectors import keep, store_float
from kernels_numba.intrinsics.numerics import bits_to_float, copy_bytes
from kernels_numba.intrinsics.vectors_codes import (
    LANES,
    PAIR_BLOCKS,
    SIZE,
    WIDTH_BYTES,
    corrections,
    largest_bits,
    load_codes,
    put_at,
    put_limbs,
)
from kernels_numba.matmul.linear_blocks import TILE_ROWS
from kernels_numba.runtime import PART, njit, register_jitable

BLOCK = 32
STEP = PAIR_BLOCKS * BLOCK
"""Values of a step: a pair of vectors of bytes."""
STEP_BYTES = 8 * SIZE
"""Of the limbs of a step."""
NIBBLES, BYTES, PLAIN_BYTES = range(3)
"""How weights lie in a pair: pair_of_nibbles, pair_of_bytes; the last where blocks have no scales."""
LAYOUTS = 3
MIN_WIDTH = LANES * BLOCK
"""Narrower rows have fewer scales than are read at once."""
LEAST, MOST = -64, 99
"""Exponents of the largest value of a block. Within them no scale and no product with a float16 leaves the
normal float32; with others, and where there is a NaN or an infinity, the float32 kernels take the call."""
_HIGHEST_MANTISSA = 0x7EFEFE
"""Of a value that is at most 0x7f7f7f, the largest integer of three signed bytes, at an exponent of 22."""


@register_jitable(forceinline=True)
def places(width):
    """(steps of a row, where `sums`, `there` and `limbs` begin, in bytes)."""
    steps = (width + STEP - 1) // STEP
    blocks = (steps * PAIR_BLOCKS + LANES - 1) // LANES * LANES
    tile = 4 * TILE_ROWS * blocks
    return steps, tile, 2 * tile, 2 * tile + 4 * blocks


@njit(**PART)
def fixed_bytes(width):
    """Of a row of x; a multiple of the bytes of a cache line."""
    steps, _, _, limbs = places(width)
    return limbs + (steps * STEP_BYTES + 63) // 64 * 64


@register_jitable(forceinline=True)
def _put_pair(limbs, layout, block, loose):
    """A block's limbs, three times 32 bytes at `loose`, to where the pair of a layout has its weights."""
    for limb in range(3):
        for part in range(4):  # eight values each
            if layout == NIBBLES:
                vector, at = part // 2, 16 * block + 8 * (part % 2)
            else:
                half = PAIR_BLOCKS // 2
                vector, at = part % 2, 32 * (block % half) + 16 * (part // 2) + 8 * (block // half)
            copy_bytes(limbs + (2 * limb + vector) * SIZE + at, loose + 32 * limb + 8 * part, 8)


@register_jitable(forceinline=True)
def _put_corrections(limbs):
    """What the weights of a pair_of_bytes have too much."""
    high = (load_codes(limbs), load_codes(limbs + SIZE))
    middle = (load_codes(limbs + 2 * SIZE), load_codes(limbs + 3 * SIZE))
    low = (load_codes(limbs + 4 * SIZE), load_codes(limbs + 5 * SIZE))
    upper, last = corrections(high, middle, low)
    put_at(limbs + 6 * SIZE, upper)
    put_at(limbs + 7 * SIZE, last)


@njit(**PART)
def _to_fixed(x, width, to, layout):
    """A row of x, from its address, to fixed_bytes(width) at `to`; False where that cannot hold it.

    width   at least MIN_WIDTH, and a multiple of BLOCK unless the layout is PLAIN_BYTES
    """
    steps, sums, there, limbs = places(width)
    blocks = width // BLOCK
    loose = np.empty(3 * BLOCK, np.int8)
    last = np.zeros(STEP, np.float32)
    before = (steps - 1) * STEP
    copy_bytes(last.ctypes.data + 4 * (steps * STEP - width), x + 4 * before, 4 * (width - before))
    holds = True
    for step in range(steps):
        source = np.int64(last.ctypes.data) if step == steps - 1 else x + 4 * step * STEP
        pair = to + limbs + step * STEP_BYTES
        for i in range(PAIR_BLOCKS):
            values = source + 4 * BLOCK * i
            most = largest_bits(values)
            exponent = (most >> 23) - 127 if most else 0
            holds = holds and LEAST <= exponent <= MOST
            power = 22 - exponent - (1 if (most & 0x7FFFFF) > _HIGHEST_MANTISSA else 0)
            total = put_limbs(values, bits_to_float(np.uint32((127 + power) << 23)), loose.ctypes.data)
            scale = bits_to_float(np.uint32((127 - power) << 23))
            _put_pair(pair, layout, i, loose.ctypes.data)
            block = step * PAIR_BLOCKS + i
            if layout == PLAIN_BYTES:
                store_float(to + 4 * block, scale)
                continue
            if step == steps - 1:
                block = blocks - PAIR_BLOCKS + i
            if block >= step * PAIR_BLOCKS:
                for at in range(block, TILE_ROWS * blocks, blocks):
                    store_float(to + 4 * at, scale)
                    store_float(to + sums + 4 * at, np.float32(total) * scale)
        if layout != NIBBLES:
            _put_corrections(pair)
    for block in range((blocks + LANES - 1) // LANES * LANES):
        bits = np.uint32(0xFFFFFFFF) if block < blocks else np.uint32(0)
        store_float(to + there + 4 * block, bits_to_float(bits))
    keep(loose)
    keep(last)
    return holds


@njit(**PART)
def _cannot(x, width, to, layout):
    return False


to_fixed = _to_fixed if WIDTH_BYTES else _cannot
