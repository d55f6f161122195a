"""v2 of the linear layers: tiles of sums that stay in registers, over weights that are read as they lie.

Called by linear_layers.py, which has the interface, the ladder and the index mapping. One compiled kernel a
format, called by address; small weights run on the calling thread, large ones on all. Which weights v3
(linear_tiles_fixed.py) takes is decided here too, because x decides as well.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kernels_numba.intrinsics.linear_vectors import (
    LANES,
    LINE_BYTES,
    STEP,
    call_address,
    keep,
    load_float,
    multiply_add,
    multiply_each,
    prefetch,
    prefetch_second,
    store_float,
    store_floats,
    store_sums,
)
from kernels_numba.intrinsics.numerics import copy_bytes
from kernels_numba.intrinsics.vectors import zeros
from kernels_numba.matmul.linear_blocks import (
    BLOCK_BYTES,
    FLOAT32,
    HALVES,
    INT8,
    Q4_0,
    Q4_1,
    Q8_0,
    TILE_ROWS,
    read_float32,
    read_int8,
    read_one_float32,
    read_one_int8,
    read_q4_0,
    read_q4_1,
    read_q8_0,
)
from kernels_numba.matmul.linear_blocks_fixed import LAYOUTS, fixed_bytes, to_fixed
from kernels_numba.runtime import PART, cfunc, njit, prange, register_jitable

TILE_COLUMNS = 4 if LANES == 16 else 2
"""16 sums in registers where there are 32, 8 where there may be 16."""
TILE_SUMS = TILE_ROWS * TILE_COLUMNS
AHEAD_BYTES = 9216
"""How far ahead weights are asked for: 4 tiles of int8 rows of 576. The four streams of a tile of short rows
lie in one page of memory, where the processor's own prefetcher sees no stream; without this, int8 and Q8_0
run at half the speed or less."""

HALVES_ADDRESS = HALVES.ctypes.data

_KERNEL, _ADDRESS, _ROW_BYTES, _ROWS, _SCALES, _FIXED_KERNEL, _LAYOUT = range(7)
TABLE_COLUMNS = 7


@register_jitable(forceinline=True)
def _tile(read, nothing, addresses, halves, step_bytes, steps, x, x_step, ahead, ahead_step, sums):
    """sums[c * TILE_ROWS + r] = row r, from its address, times column c of x, over whole steps.

    nothing   zeros: one vector for each sum
    ahead     address of what is wanted soon, ahead_step bytes of it with each step; 0: it is near already
    """
    a0, a1, a2, a3 = addresses
    totals = nothing
    for step in range(steps):
        at = step * step_bytes
        if ahead:
            for line in range(0, ahead_step, LINE_BYTES):
                prefetch(ahead + step * ahead_step + line)
        weights = read(a0 + at, halves) + read(a1 + at, halves)
        weights = weights + read(a2 + at, halves) + read(a3 + at, halves)
        totals = multiply_add(totals, weights, x + step * 4 * STEP, x_step)
    store_sums(totals, sums)


@register_jitable(forceinline=True)
def _finish(read_one, addresses, tail, scales, x, x_step, sums, out, out_step, rows, columns):
    """Add what lies behind the last whole step, apply the rows' scales if there are any, write the sums."""
    for c in range(columns):
        place = sums + c * 4 * TILE_ROWS
        if tail or scales:
            for r in range(rows):
                total = load_float(place + 4 * r)
                for k in range(tail):
                    total += read_one(addresses[r], k) * load_float(x + c * x_step + 4 * k)
                store_float(place + 4 * r, total * load_float(scales + 4 * r) if scales else total)
        if rows == TILE_ROWS:
            copy_bytes(out + c * out_step, place, 4 * TILE_ROWS)  # a known length is one instruction
        else:
            copy_bytes(out + c * out_step, place, 4 * rows)


@register_jitable(forceinline=True)
def _widen_row(read, read_one, address, halves, step_bytes, width, scale, near):
    """A row as float32 at the address `near`; what is wanted soon is asked for on the way."""
    steps = width // STEP
    for step in range(steps):
        at = address + step * step_bytes
        prefetch_second(at + AHEAD_BYTES)
        store_floats(near + step * 4 * STEP, multiply_each(read(at, halves), scale))
    for k in range(width - steps * STEP):
        value = read_one(address + steps * step_bytes, k) * scale
        store_float(near + 4 * (steps * STEP + k), value)


@register_jitable(forceinline=True)
def _rows(
    read, read_one, step_bytes, address, row_bytes, scales, halves, x, n, width, out, rows, first, last
):
    """Rows first..last-1 of a weight times all of x, in one of two ways.

    One row of x: quantised values become float32 in registers. Several: a tile of rows becomes float32 in the
    nearest cache, once for all columns; float32 rows are there as they are.
    """
    steps = width // STEP
    tail, end = width - steps * STEP, 4 * steps * STEP
    x_step, out_step = 4 * width, 4 * rows
    # Of several columns each asks for its share of the next tile: all at once they would wait for memory.
    passes = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
    ahead_step = (TILE_ROWS * 4 * STEP // passes + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    sums = np.empty(TILE_SUMS, np.float32)
    wide = np.empty((TILE_ROWS, 1 if n == 1 or step_bytes == 4 * STEP else width), np.float32)
    place, near = np.int64(sums.ctypes.data), np.int64(wide.ctypes.data)
    for row in range(first, last, TILE_ROWS):
        a0 = address + row * row_bytes
        a1 = address + min(row + 1, last - 1) * row_bytes  # past the end: the last row again, not written
        a2 = address + min(row + 2, last - 1) * row_bytes
        a3 = address + min(row + 3, last - 1) * row_bytes
        tile = (a0, a1, a2, a3)
        count = min(TILE_ROWS, last - row)
        target = out + 4 * row
        single = n == 1 and step_bytes == 4 * STEP  # long rows: the processor sees four streams
        if n == 1:
            ahead, nothing = 0 if single else a0 + AHEAD_BYTES, zeros(TILE_ROWS, LANES)
            ahead_step = TILE_ROWS * step_bytes
            _tile(read, nothing, tile, halves, step_bytes, steps, x, 0, ahead, ahead_step, place)
            at = steps * step_bytes
            ends = (a0 + at, a1 + at, a2 + at, a3 + at)
            scale = scales + 4 * row if scales else 0
            _finish(read_one, ends, tail, scale, x + end, 0, place, target, 0, count, 1)
            continue
        ahead = a0 + TILE_ROWS * row_bytes
        if step_bytes != 4 * STEP:
            for r in range(count):
                scale = load_float(scales + 4 * (row + r)) if scales else np.float32(1.0)
                _widen_row(read, read_one, tile[r], halves, step_bytes, width, scale, near + r * x_step)
            ahead = 0
            tile = (near, near + x_step, near + 2 * x_step, near + 3 * x_step)
        ends = (tile[0] + end, tile[1] + end, tile[2] + end, tile[3] + end)
        for column in range(0, n, TILE_COLUMNS):
            values = x + column * x_step
            nothing = zeros(TILE_SUMS, LANES)
            _tile(
                *(read_float32, nothing, tile, 0, 4 * STEP, steps),
                *(values, x_step, ahead, ahead_step, place),
            )
            held = min(TILE_COLUMNS, n - column)
            goal = target + column * out_step
            _finish(read_one_float32, ends, tail, 0, values + end, x_step, place, goal, out_step, count, held)
            if ahead:
                ahead += steps * ahead_step
    keep(sums)
    keep(wide)


READERS = {
    FLOAT32: ("float32", read_float32, read_one_float32),
    INT8: ("int8", read_int8, read_one_int8),
    Q8_0: ("q8_0", read_q8_0, read_one_int8),
    Q4_0: ("q4_0", read_q4_0, read_one_int8),
    Q4_1: ("q4_1", read_q4_1, read_one_int8),
}
"""Of each format: its name, how a step is read, and how a value behind the last whole step is."""


def _rows_of(kind: int) -> Any:
    """v2 of one format. Numba keeps compiled functions in files by their names, so each has its own."""
    (name, read, read_one), step_bytes = READERS[kind], BLOCK_BYTES[kind]

    def rows_of_format(address, row_bytes, scales, halves, x, n, width, out, rows, first, last):
        _rows(
            *(read, read_one, step_bytes, address, row_bytes, scales, halves),
            *(x, n, width, out, rows, first, last),
        )

    rows_of_format.__qualname__ = f"_rows_{name}"
    return rows_of_format


@functools.cache
def compiled_kernel(kind: int) -> Any:
    """The compiled v2 of a format, when it is first needed: a C function of eleven int64, called by address.

    By address, because a compiled caller would carry a copy of all five.
    """
    return cfunc("void(" + ", ".join(["int64"] * 11) + ")", cache=True)(_rows_of(kind))


@register_jitable(forceinline=True)
def _widen(read, read_one, step_bytes, address, row_bytes, scales, halves, width, out, first, last):
    """Rows first..last-1 of a weight as float32 at the address `out`."""
    for row in range(first, last):
        scale = load_float(scales + 4 * row) if scales else np.float32(1.0)
        place = out + 4 * width * row
        _widen_row(read, read_one, address + row * row_bytes, halves, step_bytes, width, scale, place)


def _widen_of(kind: int) -> Any:
    """The unpacking of one format. See _rows_of."""
    (name, read, read_one), step_bytes = READERS[kind], BLOCK_BYTES[kind]

    def widen_format(address, row_bytes, scales, halves, width, out, first, last):
        _widen(read, read_one, step_bytes, address, row_bytes, scales, halves, width, out, first, last)

    widen_format.__qualname__ = f"_widen_{name}"
    return widen_format


@functools.cache
def widening_kernel(kind: int) -> Any:
    """The same for unpacking: eight int64."""
    return cfunc("void(" + ", ".join(["int64"] * 8) + ")", cache=True)(_widen_of(kind))


@njit(cache=True, nogil=True, parallel=True)
def widen_parallel(kernel, address, row_bytes, scales, halves, width, out, rows, workers):
    """Each worker a share of the rows."""
    share = (rows + workers - 1) // workers
    for worker in prange(workers):
        first, last = min(rows, worker * share), min(rows, (worker + 1) * share)
        call_address(kernel, (address, row_bytes, scales, halves, width, out, first, last))


@njit(**PART)
def _part(table, halves, x, n, width, out, first, last, fixed):
    """Rows first..last-1 of all weights of a call, counted through; x holds whole tiles of columns.

    fixed   (columns, LAYOUTS) addresses of x in fixed point; no columns where v2 is to multiply
    """
    for i in range(table.shape[0]):
        rows = table[i, _ROWS]
        begin, end = max(0, first), min(rows, last)
        if begin < end:
            weight = (table[i, _ADDRESS], table[i, _ROW_BYTES], table[i, _SCALES])
            if fixed.shape[0] and table[i, _FIXED_KERNEL]:
                for c in range(n):
                    column = (fixed[c, table[i, _LAYOUT]], width, out + 4 * rows * c, begin, end)
                    call_address(table[i, _FIXED_KERNEL], weight + column)
            else:
                call_address(table[i, _KERNEL], weight + (halves, x, n, width, out, rows, begin, end))
        first, last = first - rows, last - rows
        out += 4 * n * rows


@njit(**PART)
def _whole_tiles(x, n, width):
    """x with rows of zeros up to a whole number of tiles, so that no tile reads past the end: a copy."""
    missing = -n % TILE_COLUMNS if n > 1 else 0
    padded = np.zeros((n + missing, width) if missing else (0, width), np.float32)
    if missing:
        copy_bytes(padded.ctypes.data, x, 4 * n * width)
    return padded


@njit(**PART)
def _fixed_columns(table, x, n, width):
    """x in fixed point: (addresses as _part takes them, what they point into). An empty table takes none."""
    n = n if table.shape[0] else 0
    size = fixed_bytes(width)
    store = np.empty(n * LAYOUTS * size + LINE_BYTES, np.uint8)
    start = np.int64(store.ctypes.data)
    start += -start % LINE_BYTES
    addresses = np.zeros((n, LAYOUTS), np.int64)
    for i in range(table.shape[0]):
        layout = table[i, _LAYOUT]
        if table[i, _FIXED_KERNEL] and addresses[0, layout] == 0:
            for c in range(n):
                addresses[c, layout] = start + (c * LAYOUTS + layout) * size
                if not to_fixed(x + 4 * width * c, width, addresses[c, layout], layout):
                    return addresses[:0], store
    return addresses, store


@njit(cache=True, nogil=True)
def linear_v2(table, halves, x, n, width, out, fixed):
    """All rows, one thread.

    table   (weights, TABLE_COLUMNS) int64
    x, out  addresses
    fixed   whether v3 multiplies, where a weight and x allow it
    """
    padded = _whole_tiles(x, n, width)
    start = np.int64(padded.ctypes.data) if padded.shape[0] else x
    columns, store = _fixed_columns(table[: table.shape[0] if fixed else 0], x, n, width)
    _part(table, halves, start, n, width, out, 0, table[:, _ROWS].sum(), columns)
    keep(padded)
    keep(store)


@njit(cache=True, nogil=True, parallel=True)
def linear_v2_parallel(table, halves, x, n, width, out, fixed, workers):
    """Each worker a share of the rows, whole tiles of them."""
    padded = _whole_tiles(x, n, width)
    start = np.int64(padded.ctypes.data) if padded.shape[0] else x
    columns, store = _fixed_columns(table[: table.shape[0] if fixed else 0], x, n, width)
    total = 0
    for i in range(table.shape[0]):
        total += table[i, _ROWS]
    share = (total + workers * TILE_ROWS - 1) // (workers * TILE_ROWS) * TILE_ROWS
    for worker in prange(workers):
        _part(table, halves, start, n, width, out, worker * share, min(total, (worker + 1) * share), columns)
    keep(padded)
    keep(store)
