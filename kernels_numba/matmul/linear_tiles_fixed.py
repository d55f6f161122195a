"""v3 of the linear layers: quantised weights times x in fixed point, by exact products of bytes.

Called by linear_tiles.py for few rows of x, where weights need more arithmetic than they take to read, on
processors with an instruction for it. A quantised weight is a small integer already; x becomes integers of
three bytes once a call (linear_blocks_fixed.py). Then 32 or 64 products take one instruction, where v2 first
makes a float32 of each weight; what remains in float32 is one sum and one scale for four or eight products.

Error: a value of x is off by at most half of its block's scale, 1.004 * 2**-23 of the largest |x| of its
block of 32, and the integers are exact; what is added of them in float32 is rounded as v2 rounds. So
    |out - exact| <= (2**-22.99 * largest |x| of the block + e * |x|) * |w|, summed over the row
with e what float32 sums of in / 16 addends cost, and |w| = |q * d| + |m| for Q4_1, |q * d| + |8 * d| for
Q4_0, whose two parts are summed apart.

No sum overflows: a lane adds 8 products, for nibbles of at most 15 * 2**23, for bytes, whose low limb is
summed apart, of 128 * 2**15 (on the way 255 * 2**15). Every step starts anew, so width has no limit.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN202

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kernels_numba.intrinsics.linear_vectors import (
    FIRST,
    keep,
    load_float,
    prefetching,
    store_float,
    store_sums,
)
from kernels_numba.intrinsics.numerics import copy_bytes
from kernels_numba.intrinsics.vectors import fused, plus, spread, times
from kernels_numba.intrinsics.vectors_codes import (
    BYTE_BLOCKS,
    LANES,
    NIBBLE_BLOCKS,
    PAIR_BLOCKS,
    SIZE,
    WIDTH_BYTES,
    add_dots,
    as_floats,
    load_codes,
    load_floats,
    load_integers,
    no_integers,
    pair_of_bytes,
    pair_of_nibbles,
    put_at,
    scales,
    spread_over,
    times_256,
    where,
)
from kernels_numba.matmul.linear_blocks import BLOCK_BYTES, INT8, Q4_0, Q4_1, Q8_0, TILE_ROWS
from kernels_numba.matmul.linear_blocks_fixed import (
    BLOCK,
    BYTES,
    MIN_WIDTH,
    NIBBLES,
    PLAIN_BYTES,
    STEP_BYTES,
    places,
)
from kernels_numba.runtime import cfunc, register_jitable

AHEAD_BYTES = 5000
"""How far ahead weights are asked for: two tiles of rows of 576."""

LAYOUT = {INT8: PLAIN_BYTES, Q8_0: BYTES, Q4_0: NIBBLES, Q4_1: NIBBLES}

_int8, _q8_0 = pair_of_bytes(BLOCK_BYTES[INT8]), pair_of_bytes(BLOCK_BYTES[Q8_0])
_q4_0, _q4_1 = pair_of_nibbles(BLOCK_BYTES[Q4_0]), pair_of_nibbles(BLOCK_BYTES[Q4_1])
_scales_q8_0, _scales_q4_0 = scales(BLOCK_BYTES[Q8_0], 1), scales(BLOCK_BYTES[Q4_0], 1)
_scales_q4_1 = scales(BLOCK_BYTES[Q4_1], 2)
_ask_int8, _ask_q8_0, _ask_q4_0, _ask_q4_1 = (
    prefetching(FIRST, TILE_ROWS * PAIR_BLOCKS * block_bytes) for block_bytes in BLOCK_BYTES[INT8:]
)
_over_bytes, _over_nibbles = spread_over(BYTE_BLOCKS), spread_over(NIBBLE_BLOCKS)


@register_jitable(forceinline=True)
def _add_nibbles(pair, factor, limbs, high, low):
    """high, low + what a pair of nibbles comes to; all in `low`."""
    a, b = pair
    total = times_256(add_dots(add_dots(no_integers(), a, load_codes(limbs)), b, load_codes(limbs + SIZE)))
    total = add_dots(add_dots(total, a, load_codes(limbs + 2 * SIZE)), b, load_codes(limbs + 3 * SIZE))
    total = times_256(total)
    total = add_dots(add_dots(total, a, load_codes(limbs + 4 * SIZE)), b, load_codes(limbs + 5 * SIZE))
    return high, fused(as_floats(total), factor, low)


@register_jitable(forceinline=True)
def _add_bytes(pair, factor, limbs, high, low):
    """The same for a pair of bytes: two upper limbs, in units of 256, into `high`, the last into `low`."""
    a, b = pair
    upper, last = load_integers(limbs + 6 * SIZE), load_integers(limbs + 7 * SIZE)
    upper = times_256(add_dots(add_dots(upper, a, load_codes(limbs)), b, load_codes(limbs + SIZE)))
    upper = add_dots(add_dots(upper, a, load_codes(limbs + 2 * SIZE)), b, load_codes(limbs + 3 * SIZE))
    last = add_dots(add_dots(last, a, load_codes(limbs + 4 * SIZE)), b, load_codes(limbs + 5 * SIZE))
    return fused(as_floats(upper), factor, high), fused(as_floats(last), factor, low)


@register_jitable(forceinline=True)
def _put_factors(read, lift, address, block_bytes, count, x, x_sums, factors, offsets):
    """Scales of `count` blocks in a row, times those of x; and offset * sum of x, where `lift` is not 0."""
    for first in range(0, count, LANES):
        i = min(first, count - LANES)
        found = read(address + i * block_bytes)
        put_at(factors + 4 * i, times(found[0], load_floats(x + 4 * i)))
        if lift:
            offset = times(found[-1], load_floats(x_sums + 4 * i))
            put_at(offsets + 4 * i, times(offset, spread(np.float32(lift), LANES)))


@register_jitable(forceinline=True)
def _offset(offsets, there, blocks, lift):
    """The sum of a row's offsets, as one vector."""
    total = spread(np.float32(0.0), LANES)
    if lift:
        for at in range(0, 4 * blocks, 4 * LANES):
            total = plus(total, where(load_floats(offsets + at), load_integers(there + at)))
    return total


@register_jitable(forceinline=True)
def _write(sums, row_scales, out, count):
    """The sums of a tile, times their rows' scales if there are any."""
    if row_scales:
        for r in range(count):
            store_float(sums + 4 * r, load_float(sums + 4 * r) * load_float(row_scales + 4 * r))
    if count == TILE_ROWS:
        copy_bytes(out, sums, 4 * TILE_ROWS)  # a known length is one instruction
    else:
        copy_bytes(out, sums, 4 * count)


@register_jitable(forceinline=True)
def _rows(
    read,
    read_scales,
    over,
    add,
    ask,
    lift,
    block_bytes,
    head,
    address,
    row_bytes,
    row_scales,
    x,
    width,
    out,
    first,
    last,
):
    """Rows first..last-1 of a weight times one row of x.

    head    bytes of a block before its codes; 0: the blocks have no scales
    lift    the offset of a block is this times the last float16 of it; 0: there is none

    The factors of a tile are made while the one before is multiplied, because they are long in coming.
    """
    steps, x_sums, there, limbs = places(width)
    x_sums, there, limbs = x + x_sums, x + there, x + limbs
    blocks = width // BLOCK
    room = TILE_ROWS * blocks + LANES
    scratch = np.empty(4 * room + TILE_ROWS, np.float32)
    now = np.int64(scratch.ctypes.data)
    then, behind = now + 8 * room, 4 * room
    sums = now + 16 * room
    nothing = spread(np.float32(0.0), LANES)
    if head:
        count = min(TILE_ROWS, last - first) * blocks
        start = address + first * row_bytes
        _put_factors(read_scales, lift, start, block_bytes, count, x, x_sums, now, now + behind)
    for row in range(first, last, TILE_ROWS):
        count = min(TILE_ROWS, last - row)
        a0 = address + row * row_bytes
        if head:
            start, following = a0 + TILE_ROWS * row_bytes, min(TILE_ROWS, last - row - TILE_ROWS) * blocks
            _put_factors(read_scales, lift, start, block_bytes, following, x, x_sums, then, then + behind)
        # Past the end: the last row again, not written.
        r1, r2, r3 = min(1, count - 1), min(2, count - 1), min(3, count - 1)
        a1, a2, a3 = a0 + r1 * row_bytes, a0 + r2 * row_bytes, a0 + r3 * row_bytes
        f0 = now if head else x
        f1, f2, f3 = (f0 + 4 * r1 * blocks, f0 + 4 * r2 * blocks, f0 + 4 * r3 * blocks) if head else (x, x, x)
        h0, h1, h2, h3 = nothing, nothing, nothing, nothing
        t0, t1 = _offset(f0 + behind, there, blocks, lift), _offset(f1 + behind, there, blocks, lift)
        t2, t3 = _offset(f2 + behind, there, blocks, lift), _offset(f3 + behind, there, blocks, lift)
        for step in range(steps):
            ask(a0 + AHEAD_BYTES + step * TILE_ROWS * PAIR_BLOCKS * block_bytes)
            at = head + min(step * PAIR_BLOCKS * block_bytes, row_bytes - PAIR_BLOCKS * block_bytes)
            f = 4 * (min(step * PAIR_BLOCKS, blocks - PAIR_BLOCKS) if head else step * PAIR_BLOCKS)
            pair = limbs + step * STEP_BYTES
            h0, t0 = add(read(a0 + at), over(f0 + f), pair, h0, t0)
            h1, t1 = add(read(a1 + at), over(f1 + f), pair, h1, t1)
            h2, t2 = add(read(a2 + at), over(f2 + f), pair, h2, t2)
            h3, t3 = add(read(a3 + at), over(f3 + f), pair, h3, t3)
        unit = spread(np.float32(256.0), LANES)
        tile = (fused(h0, unit, t0), fused(h1, unit, t1), fused(h2, unit, t2), fused(h3, unit, t3))
        store_sums(tile, sums)
        _write(sums, row_scales and row_scales + 4 * row, out + 4 * row, count)
        now, then = then, now
    keep(scratch)


def _rows_int8(address, row_bytes, row_scales, x, width, out, first, last):
    _rows(
        *(_int8, _scales_q8_0, _over_bytes, _add_bytes, _ask_int8, 0.0, BLOCK_BYTES[INT8], 0),
        *(address, row_bytes, row_scales, x, width, out, first, last),
    )


def _rows_q8_0(address, row_bytes, row_scales, x, width, out, first, last):
    _rows(
        *(_q8_0, _scales_q8_0, _over_bytes, _add_bytes, _ask_q8_0, 0.0, BLOCK_BYTES[Q8_0], 2),
        *(address, row_bytes, 0, x, width, out, first, last),
    )


def _rows_q4_0(address, row_bytes, row_scales, x, width, out, first, last):
    _rows(
        *(_q4_0, _scales_q4_0, _over_nibbles, _add_nibbles, _ask_q4_0, -8.0, BLOCK_BYTES[Q4_0], 2),
        *(address, row_bytes, 0, x, width, out, first, last),
    )


def _rows_q4_1(address, row_bytes, row_scales, x, width, out, first, last):
    _rows(
        *(_q4_1, _scales_q4_1, _over_nibbles, _add_nibbles, _ask_q4_1, 1.0, BLOCK_BYTES[Q4_1], 4),
        *(address, row_bytes, 0, x, width, out, first, last),
    )


_KERNELS = {INT8: _rows_int8, Q8_0: _rows_q8_0, Q4_0: _rows_q4_0, Q4_1: _rows_q4_1}


@functools.cache
def _compiled(kind: int) -> Any:
    return cfunc("void(" + ", ".join(["int64"] * 8) + ")", cache=True)(_KERNELS[kind])


def fixed_kernel(kind: int, width: int) -> int:
    """Address of the compiled v3 of a format, a C function of eight int64; 0 where it has none for the width.

    Compiled or loaded when it is first needed.
    """
    if kind not in _KERNELS or not WIDTH_BYTES or width < MIN_WIDTH:
        return 0
    return _compiled(kind).address
