"""Linear layers for decode: a few rows of x times a weight that is read once.

Called by the model's forward pass for small batches on the CPU. Knows arrays, not models; how weights lie in
memory is linear_blocks.py. The ladder:
    v0  NumPy in float64 over the dequantised weight, the oracle of the tests
    v1  plain loops, one value after the other
    v2  tiles of 4 rows x 1 or 4 columns whose sums stay in registers; quantised weights become float32 in
        registers on the way; several weights of one x in one call. Measured: docs/model.md.

Index mapping:

    x (n, in) float32     weight (rows, in), any format     out (n, rows) float32

    row r -- // 4 --> tile of rows --.
    column c (a row of x) -- // 4 ---+--> 16 sums of vectors, over in / 32 steps --> out[c, r]
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.errors import RangeError, ShapeError
from kernels_numba.linear_blocks import (
    FLOAT32,
    HALVES,
    INT8,
    Q4_0,
    Q4_1,
    Q8_0,
    as_rows,
    dequantize_v0,
    read_float32,
    read_int8,
    read_one_float32,
    read_one_int8,
    read_q4_0,
    read_q4_1,
    read_q8_0,
)
from kernels_numba.linear_blocks import GgufRows as GgufRows
from kernels_numba.linear_blocks import Int8Rows as Int8Rows
from kernels_numba.linear_vectors import (
    LANES,
    STEP,
    call_address,
    keep,
    load_float,
    multiply_add,
    multiply_each,
    prefetch,
    store_float,
    store_floats,
    store_sums,
    zeros,
)
from kernels_numba.numerics import copy_bytes
from kernels_numba.runtime import PARALLEL_CALL, cfunc, get_num_threads, njit, prange, register_jitable

MAX_ROWS_OF_X = 32
"""Above it a product is a matrix product and not a reading of weights: torch's business."""
TILE_ROWS = 4
TILE_COLUMNS = 4 if LANES == 16 else 2
"""16 sums in registers where there are 32, 8 where there may be 16."""
TILE_SUMS = TILE_ROWS * TILE_COLUMNS
NS_PER_VALUE = {FLOAT32: 0.16, INT8: 0.045, Q8_0: 0.05, Q4_0: 0.08, Q4_1: 0.085}
"""What a weight costs one thread, to judge whether a second one pays: float32 by memory, the others by
arithmetic. Measured on a core with AVX-512; an older one is slower, and gains more from the second."""
AHEAD_BYTES = 9216
"""How far ahead weights are asked for: 4 tiles of int8 rows of 576. The four streams of a tile of short rows
lie in one page of memory, where the processor's own prefetcher sees no stream; without this, int8 and Q8_0
run at half the speed or less."""
LINE_BYTES = 64
_PAUSE_S = 200e-6
"""Between two parallel regions: about what a decode step computes on one core between them."""

_HALVES_ADDRESS = HALVES.ctypes.data

_KERNEL, _ADDRESS, _ROW_BYTES, _ROWS, _SCALES = range(5)


class Linears:
    """Weights that are multiplied by the same x, in one call: q, k and v; gate and up; or a single one.

    weights   each (rows, in) float32, Int8Rows or GgufRows; NumPy arrays or torch CPU tensors, contiguous

    Checked once, here. Raises ShapeError, DtypeError, LayoutError, KindError, RangeError (errors.py).
    """

    def __init__(self, weights: Sequence[Any]) -> None:
        parts = [as_rows(f"weights[{i}]", weight) for i, weight in enumerate(weights)]
        if not parts:
            raise ShapeError("weights", "[]", "at least one weight")
        self.width = parts[0].width
        for i, part in enumerate(parts):
            if part.width != self.width:
                raise ShapeError(
                    f"weights[{i}]", f"of width {part.width}", f"width {self.width}, as weights[0]"
                )
        self.rows = [part.rows for part in parts]
        self._serial_us = sum(part.rows * part.width * NS_PER_VALUE[part.kind] for part in parts) / 1e3
        self._total = sum(self.rows)
        self._parts = parts
        self._seen_dtype: Any = None
        table = [
            [_kernel(part.kind).address, part.address, part.row_bytes, part.rows, part.scales]
            for part in parts
        ]
        self._table = np.array(table, np.int64)
        _load_drivers()

    def __call__(self, x: Any) -> list[Any]:
        """x @ weight.T for each weight: arrays of the kind of x, (n, rows) float32.

        x   (n, in) float32, contiguous, 1 <= n <= MAX_ROWS_OF_X

        Raises ShapeError, DtypeError, LayoutError, KindError, RangeError.
        """
        n = self._check(x)
        if isinstance(x, np.ndarray):
            out = np.empty(n * self._total, np.float32)
            self._run(x.ctypes.data, n, out.ctypes.data)
        else:
            out = x.new_empty(n * self._total)
            self._run(x.data_ptr(), n, out.data_ptr())
        if len(self.rows) == 1:
            return [out.reshape(n, self._total)]
        results, first = [], 0
        for rows in self.rows:
            results.append(out[first : first + n * rows].reshape(n, rows))
            first += n * rows
        return results

    def into(self, x: Any, out: Any) -> None:
        """The same for a single weight, written to `out` (n, rows) float32, contiguous."""
        n = self._check(x)
        arrays.common_device({"x": x, "out": out})
        arrays.check_integer("out", out, "float32")
        arrays.check_shape("out", out, n, self._total)
        arrays.check_contiguous("out", out)
        views = [arrays.as_numpy(array) for array in (x, out)]
        self._run(views[0].ctypes.data, n, views[1].ctypes.data)

    def dequantized(self, index: int, first: int, out: np.ndarray) -> None:
        """Rows first, first + 1, ... of one weight as float32, into all of `out` (some rows, in) float32.

        For batches above the limit: a piece at a time, then a matrix product on it. Raises ShapeError,
        DtypeError, RangeError.
        """
        arrays.check_integer("out", out, "float32")
        arrays.check_shape("out", out, "rows", self.width)
        arrays.check_contiguous("out", out)
        part = self._parts[index]
        if not 0 <= first <= first + out.shape[0] <= part.rows:
            raise RangeError("first", first, f"rows of the {part.rows} that weights[{index}] has")
        job = (part.address + first * part.row_bytes, part.row_bytes, part.scales and part.scales + 4 * first)
        address = _widening_kernel(part.kind).address
        with PARALLEL_CALL:
            _widen_parallel(
                address, *job, _HALVES_ADDRESS, self.width, out.ctypes.data, out.shape[0], get_num_threads()
            )

    def _check(self, x: Any) -> int:
        """The rows of x."""
        if arrays.device_of("x", x) != arrays.CPU:
            raise arrays.KindError("x", "array on cuda", "an array on cpu")
        if x.dtype is not self._seen_dtype:
            arrays.check_integer("x", x, "float32")
            self._seen_dtype = x.dtype
        n = x.shape[0] if len(x.shape) == 2 and x.shape[1] == self.width else 0
        if not n:
            arrays.check_shape("x", x, "n", self.width)
        if not 1 <= n <= MAX_ROWS_OF_X:
            raise RangeError("x.shape[0]", n, f"1 to {MAX_ROWS_OF_X} rows")
        arrays.check_contiguous("x", x)
        return n

    def _run(self, x: int, n: int, out: int) -> None:
        workers = get_num_threads()
        if workers > 1 and self._serial_us * max(1.0, n / 4) > 2 * region_us(workers):
            with PARALLEL_CALL:
                _linear_v2_parallel(self._table, _HALVES_ADDRESS, x, n, self.width, out, workers)
        else:
            _linear_v2(self._table, _HALVES_ADDRESS, x, n, self.width, out)


@functools.cache
def _load_drivers() -> None:
    """Compile or load both forms now: which of them a call takes depends on its size."""
    table = np.empty((0, 5), np.int64)
    _linear_v2(table, 0, 0, 1, 0, 0)
    with PARALLEL_CALL:
        _linear_v2_parallel(table, 0, 0, 1, 0, 0, get_num_threads())


@functools.cache
def region_us(workers: int) -> float:
    """What a parallel region costs here: the median of a few empty ones, in microseconds; asked once.

    Some 3 with threads that spin while they wait, 50 and more where they sleep (OMP_WAIT_POLICY=passive, as
    our ranks do, which share their cores) and their core with them: hence the pause before each. A layer is
    cut in two only where half its time is more than that.
    """
    table = np.empty((0, 5), np.int64)
    taken = []
    for _ in range(15):
        pause_end = time.perf_counter() + _PAUSE_S
        while (start := time.perf_counter()) < pause_end:
            pass
        with PARALLEL_CALL:
            _linear_v2_parallel(table, 0, 0, 1, 0, 0, workers)
            taken.append(time.perf_counter() - start)
    return 1e6 * sorted(taken)[len(taken) // 2]


def linear(x: Any, weight: Any, out: Any = None) -> Any:
    """x @ weight.T for a few rows of x; quantised weights are not unpacked to memory.

        x        (n, in) float32, contiguous, n from 1 to MAX_ROWS_OF_X
        weight   (rows, in) float32, an Int8Rows or a GgufRows
        out      optional (n, rows) float32, contiguous; written in place

    NumPy arrays and torch CPU tensors. The values of a quantised weight are those of its dequantised form,
    to the bit (int8: the scale is applied to a row's sum); only the order of the sums differs. A caller with
    the same weight again and again keeps a `Linears`. Raises ShapeError, DtypeError, LayoutError, KindError,
    RangeError (errors.py).
    """
    group = Linears([weight])
    if out is None:
        return group(x)[0]
    group.into(x, out)
    return out


def linear_v0(x: np.ndarray, weight: Any) -> np.ndarray:
    """The oracle: x @ weight.T in float64."""
    return x.astype(np.float64) @ dequantize_v0(weight).astype(np.float64).T


@njit(cache=True, nogil=True)
def linear_v1(x, weight, out):
    """Plain: float32 weights, one value after the other."""
    for c in range(x.shape[0]):
        for r in range(weight.shape[0]):
            total = np.float32(0.0)
            for k in range(x.shape[1]):
                total += x[c, k] * weight[r, k]
            out[c, r] = total


@register_jitable(forceinline=True)
def _tile(read, nothing, addresses, halves, step_bytes, steps, x, x_step, ahead, sums):
    """sums[c * TILE_ROWS + r] = row r, from its address, times column c of x, over whole steps.

    nothing   zeros: one vector for each sum
    ahead     address of what is wanted soon, as long as the tile; 0 where it is near already
    """
    a0, a1, a2, a3 = addresses
    totals = nothing
    for step in range(steps):
        at = step * step_bytes
        if ahead:
            for line in range(0, TILE_ROWS * step_bytes, LINE_BYTES):
                prefetch(ahead + TILE_ROWS * at + line)
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
        prefetch(at + AHEAD_BYTES)
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
        ahead = 0 if single else a0 + AHEAD_BYTES
        if n == 1:
            _tile(read, zeros(TILE_ROWS), tile, halves, step_bytes, steps, x, 0, ahead, place)
            at = steps * step_bytes
            ends = (a0 + at, a1 + at, a2 + at, a3 + at)
            scale = scales + 4 * row if scales else 0
            _finish(read_one, ends, tail, scale, x + end, 0, place, target, 0, count, 1)
            continue
        if step_bytes != 4 * STEP:
            for r in range(count):
                scale = load_float(scales + 4 * (row + r)) if scales else np.float32(1.0)
                _widen_row(read, read_one, tile[r], halves, step_bytes, width, scale, near + r * x_step)
            ahead = 0
            tile = (near, near + x_step, near + 2 * x_step, near + 3 * x_step)
        ends = (tile[0] + end, tile[1] + end, tile[2] + end, tile[3] + end)
        for column in range(0, n, TILE_COLUMNS):
            values = x + column * x_step
            _tile(read_float32, zeros(TILE_SUMS), tile, 0, 4 * STEP, steps, values, x_step, ahead, place)
            held = min(TILE_COLUMNS, n - column)
            goal = target + column * out_step
            _finish(read_one_float32, ends, tail, 0, values + end, x_step, place, goal, out_step, count, held)
            ahead = 0
    keep(sums)
    keep(wide)


def _rows_float32(address, row_bytes, scales, halves, x, n, width, out, rows, first, last):
    _rows(
        read_float32,
        read_one_float32,
        128,
        address,
        row_bytes,
        scales,
        halves,
        x,
        n,
        width,
        out,
        rows,
        first,
        last,
    )


def _rows_int8(address, row_bytes, scales, halves, x, n, width, out, rows, first, last):
    _rows(
        read_int8, read_one_int8, 32, address, row_bytes, scales, halves, x, n, width, out, rows, first, last
    )


def _rows_q8_0(address, row_bytes, scales, halves, x, n, width, out, rows, first, last):
    _rows(
        read_q8_0, read_one_int8, 34, address, row_bytes, scales, halves, x, n, width, out, rows, first, last
    )


def _rows_q4_0(address, row_bytes, scales, halves, x, n, width, out, rows, first, last):
    _rows(
        read_q4_0, read_one_int8, 18, address, row_bytes, scales, halves, x, n, width, out, rows, first, last
    )


def _rows_q4_1(address, row_bytes, scales, halves, x, n, width, out, rows, first, last):
    _rows(
        read_q4_1, read_one_int8, 20, address, row_bytes, scales, halves, x, n, width, out, rows, first, last
    )


_KERNELS = {FLOAT32: _rows_float32, INT8: _rows_int8, Q8_0: _rows_q8_0, Q4_0: _rows_q4_0, Q4_1: _rows_q4_1}


@functools.cache
def _kernel(kind: int) -> Any:
    """The compiled v2 of a format, when it is first needed: a C function of eleven int64, called by address.

    By address, because a compiled caller would carry a copy of all five.
    """
    return cfunc("void(" + ", ".join(["int64"] * 11) + ")", cache=True)(_KERNELS[kind])


@register_jitable(forceinline=True)
def _widen(read, read_one, step_bytes, address, row_bytes, scales, halves, width, out, first, last):
    """Rows first..last-1 of a weight as float32 at the address `out`."""
    for row in range(first, last):
        scale = load_float(scales + 4 * row) if scales else np.float32(1.0)
        place = out + 4 * width * row
        _widen_row(read, read_one, address + row * row_bytes, halves, step_bytes, width, scale, place)


def _widen_float32(address, row_bytes, scales, halves, width, out, first, last):
    _widen(read_float32, read_one_float32, 128, address, row_bytes, scales, halves, width, out, first, last)


def _widen_int8(address, row_bytes, scales, halves, width, out, first, last):
    _widen(read_int8, read_one_int8, 32, address, row_bytes, scales, halves, width, out, first, last)


def _widen_q8_0(address, row_bytes, scales, halves, width, out, first, last):
    _widen(read_q8_0, read_one_int8, 34, address, row_bytes, scales, halves, width, out, first, last)


def _widen_q4_0(address, row_bytes, scales, halves, width, out, first, last):
    _widen(read_q4_0, read_one_int8, 18, address, row_bytes, scales, halves, width, out, first, last)


def _widen_q4_1(address, row_bytes, scales, halves, width, out, first, last):
    _widen(read_q4_1, read_one_int8, 20, address, row_bytes, scales, halves, width, out, first, last)


_WIDENING = {
    FLOAT32: _widen_float32,
    INT8: _widen_int8,
    Q8_0: _widen_q8_0,
    Q4_0: _widen_q4_0,
    Q4_1: _widen_q4_1,
}


@functools.cache
def _widening_kernel(kind: int) -> Any:
    """The same for unpacking: eight int64."""
    return cfunc("void(" + ", ".join(["int64"] * 8) + ")", cache=True)(_WIDENING[kind])


@njit(cache=True, nogil=True, parallel=True)
def _widen_parallel(kernel, address, row_bytes, scales, halves, width, out, rows, workers):
    """Each worker a share of the rows."""
    share = (rows + workers - 1) // workers
    for worker in prange(workers):
        first, last = min(rows, worker * share), min(rows, (worker + 1) * share)
        call_address(kernel, (address, row_bytes, scales, halves, width, out, first, last))


@njit(cache=True, nogil=True)
def _part(table, halves, x, n, width, out, first, last):
    """Rows first..last-1 of all weights of a call, counted through; x holds whole tiles of columns."""
    for i in range(table.shape[0]):
        rows = table[i, _ROWS]
        begin, end = max(0, first), min(rows, last)
        if begin < end:
            weight = (table[i, _ADDRESS], table[i, _ROW_BYTES], table[i, _SCALES], halves)
            call_address(table[i, _KERNEL], weight + (x, n, width, out, rows, begin, end))
        first, last = first - rows, last - rows
        out += 4 * n * rows


@njit(cache=True, nogil=True)
def _whole_tiles(x, n, width):
    """x with rows of zeros up to a whole number of tiles, so that no tile reads past the end: a copy."""
    missing = -n % TILE_COLUMNS if n > 1 else 0
    padded = np.zeros((n + missing, width) if missing else (0, width), np.float32)
    if missing:
        copy_bytes(padded.ctypes.data, x, 4 * n * width)
    return padded


@njit(cache=True, nogil=True)
def _linear_v2(table, halves, x, n, width, out):
    """All rows, one thread. table (weights, 5) int64; x and out are addresses."""
    padded = _whole_tiles(x, n, width)
    start = np.int64(padded.ctypes.data) if padded.shape[0] else x
    _part(table, halves, start, n, width, out, 0, table[:, _ROWS].sum())
    keep(padded)


@njit(cache=True, nogil=True, parallel=True)
def _linear_v2_parallel(table, halves, x, n, width, out, workers):
    """Each worker a share of the rows, whole tiles of them."""
    padded = _whole_tiles(x, n, width)
    start = np.int64(padded.ctypes.data) if padded.shape[0] else x
    total = 0
    for i in range(table.shape[0]):
        total += table[i, _ROWS]
    share = (total + workers * TILE_ROWS - 1) // (workers * TILE_ROWS) * TILE_ROWS
    for worker in prange(workers):
        _part(table, halves, start, n, width, out, worker * share, min(total, (worker + 1) * share))
    keep(padded)
