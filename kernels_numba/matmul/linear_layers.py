"""Linear layers for decode: a few rows of x times a weight that is read once.

Called by the model's forward pass for small batches on the CPU. Knows arrays, not models; how weights lie in
memory is linear_blocks.py. The ladder:
    v0  NumPy in float64 over the dequantised weight, the oracle of the tests
    v1  plain loops, one value after the other
    v2  (linear_tiles.py) tiles of 4 rows x 1 or 4 columns whose sums stay in registers; quantised weights
        become float32 on the way; several weights of one x in one call. Measured: docs/explain/model.md.
    v3  (linear_tiles_fixed.py) quantised weights times few rows of x in fixed point, by exact products of
        bytes, where the processor has an instruction for them: 1.1 to 1.5 times the speed of v2

Index mapping:

    x (n, in) float32     weight (rows, in), any format     out (n, rows) float32

    row r -- // 4 --> tile of rows --.
    column c (a row of x) -- // 4 ---+--> 16 sums of vectors, over in / 32 steps --> out[c, r]
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.errors import RangeError, ShapeError
from kernels_numba.matmul.linear_blocks import GgufRows as GgufRows
from kernels_numba.matmul.linear_blocks import Int8Rows as Int8Rows
from kernels_numba.matmul.linear_blocks import Rows, as_rows, dequantize_v0
from kernels_numba.matmul.linear_tiles import (
    HALVES_ADDRESS,
    TABLE_COLUMNS,
    compiled_kernel,
    linear_v2,
    linear_v2_parallel,
    widen_parallel,
    widening_kernel,
)
from kernels_numba.matmul.linear_tiles_fixed import LAYOUT, fixed_kernel
from kernels_numba.runtime import PARALLEL_CALL, get_num_threads, njit

MAX_ROWS_OF_X = 32
"""Above it a product is a matrix product and not a reading of weights: torch's business."""
MAX_FIXED_ROWS_OF_X = 2
"""Up to here v3 multiplies, a row of x at a time; above, v2 makes float32 of a weight once for all rows."""
_RUNS = 5
"""Of one thread over weights of a new shape; the first may have to fetch them from the disk."""
_PAUSE_S = 20e-6
"""Between two parallel regions: about what a decode step computes on one core between them."""
_REGIONS, _BURST, _BETWEEN_BURSTS_S = 40, 8, 0.01
"""Five bursts of eight regions, with time between bursts for another process to leave the core: see
`measured_region_us`, which takes the least of all."""


class Linears:
    """Weights that are multiplied by the same x, in one call: q, k and v; gate and up; or a single one.

    weights     each (rows, in) float32, Int8Rows or GgufRows; NumPy arrays or torch CPU tensors, contiguous
    has_fixed   whether v3 multiplies some of them on this processor
    table       (weights, TABLE_COLUMNS) int64, what the drivers know of them (linear_tiles.py)

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
        self._total = sum(self.rows)
        self._parts = parts
        self.has_fixed = any(fixed_kernel(part.kind, part.width) for part in parts)
        self.table = np.array([_table_row(part) for part in parts], np.int64)
        load_drivers()
        self._serial_us = _measured_serial_us(parts, self.table)

    def __call__(self, x: Any, fixed: bool | None = None) -> list[Any]:
        """x @ weight.T for each weight: arrays of the kind of x, (n, rows) float32.

        x       (n, in) float32, contiguous, 1 <= n <= MAX_ROWS_OF_X
        fixed   whether v3 multiplies where it can, or v2 alone; None: v3 for at most MAX_FIXED_ROWS_OF_X rows

        With fixed=False a row of x gives the same bits whatever the other rows and the threads; int8 apart,
        where a single row is scaled later. With fixed=True as well, while every x is finite.

        Raises ShapeError, DtypeError, LayoutError, KindError, RangeError.
        """
        n = self._check(x)
        shape = (n, self._total) if len(self.rows) == 1 else (n * self._total,)
        if isinstance(x, np.ndarray):
            out = np.empty(shape, np.float32)
            self._run(x.ctypes.data, n, out.ctypes.data, fixed)
        else:
            out = x.new_empty(shape)
            self._run(x.data_ptr(), n, out.data_ptr(), fixed)
        if len(self.rows) == 1:
            return [out]
        sizes = [n * rows for rows in self.rows]
        parts: Any = np.split(out, np.cumsum(sizes)[:-1]) if isinstance(out, np.ndarray) else out.split(sizes)
        return [part.reshape(n, rows) for part, rows in zip(parts, self.rows)]

    def into(self, x: Any, out: Any) -> None:
        """The same for a single weight, written to `out` (n, rows) float32, contiguous."""
        n = self._check(x)
        arrays.common_device({"x": x, "out": out})
        arrays.check_integer("out", out, "float32")
        arrays.check_shape("out", out, n, self._total)
        arrays.check_contiguous("out", out)
        arrays.check_writable("out", out)
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
        arrays.check_writable("out", out)
        part = self._parts[index]
        if not 0 <= first <= first + out.shape[0] <= part.rows:
            raise RangeError("first", first, f"rows of the {part.rows} that weights[{index}] has")
        job = (part.address + first * part.row_bytes, part.row_bytes, part.scales and part.scales + 4 * first)
        address = widening_kernel(part.kind).address
        with PARALLEL_CALL:
            widen_parallel(
                address, *job, HALVES_ADDRESS, self.width, out.ctypes.data, out.shape[0], get_num_threads()
            )

    def shared(self, n: int) -> bool:
        """Whether all threads share the work for n rows of x: where that takes less time than one thread."""
        workers = get_num_threads()
        return workers > 1 and self._serial_us * max(1.0, n / 4) > 2 * region_us(workers)

    def _check(self, x: Any) -> int:
        """The rows of x."""
        plain = arrays.plain_float32(x)
        if not plain:
            if arrays.device_of("x", x) != arrays.CPU:
                raise arrays.KindError("x", "array on cuda", "an array on cpu")
            arrays.check_integer("x", x, "float32")
        shape = x.shape
        if len(shape) != 2 or shape[1] != self.width:
            arrays.check_shape("x", x, "n", self.width)
        if not 1 <= shape[0] <= MAX_ROWS_OF_X:
            raise RangeError("x.shape[0]", shape[0], f"1 to {MAX_ROWS_OF_X} rows")
        if not plain:
            arrays.check_contiguous("x", x)
        return int(shape[0])

    def _run(self, x: int, n: int, out: int, fixed: bool | None = None) -> None:
        fixed = n <= MAX_FIXED_ROWS_OF_X if fixed is None else fixed
        workers = get_num_threads()
        if self.shared(n):
            with PARALLEL_CALL:
                linear_v2_parallel(self.table, HALVES_ADDRESS, x, n, self.width, out, fixed, workers)
        else:
            linear_v2(self.table, HALVES_ADDRESS, x, n, self.width, out, fixed)


def _table_row(part: Rows) -> list[int]:
    """What the drivers know of a weight."""
    kernel = compiled_kernel(part.kind).address
    fixed = fixed_kernel(part.kind, part.width)
    known = [kernel, part.address, part.row_bytes, part.rows, part.scales]
    return [*known, fixed, LAYOUT.get(part.kind, 0)]


@functools.cache
def load_drivers() -> None:
    """Compile or load both forms now: which of them a call takes depends on its size."""
    table = np.empty((0, TABLE_COLUMNS), np.int64)
    linear_v2(table, 0, 0, 1, 0, 0, False)
    with PARALLEL_CALL:
        linear_v2_parallel(table, 0, 0, 1, 0, 0, False, get_num_threads())


_serial_us: dict[tuple, float] = {}
"""Formats and shapes of weights of one x -> what one thread takes for a row of x, in microseconds."""


def _measured_serial_us(parts: list[Rows], table: np.ndarray) -> float:
    """By the best of a few runs over the first weights of these formats and shapes, to judge whether a second
    thread pays."""
    key = tuple((part.kind, part.rows, part.width) for part in parts)
    if key not in _serial_us:
        width, taken = parts[0].width, []
        x, out = np.ones((1, width), np.float32), np.empty(sum(part.rows for part in parts), np.float32)
        for _ in range(_RUNS):
            start = time.perf_counter()
            linear_v2(table, HALVES_ADDRESS, x.ctypes.data, 1, width, out.ctypes.data, True)
            taken.append(time.perf_counter() - start)
        _serial_us[key] = 1e6 * min(taken)
    return _serial_us[key]


_region_us: dict[int, float] = {}
"""Workers -> what a parallel region costs with them."""


def region_us(workers: int) -> float:
    """What a parallel region costs here, in microseconds; measured once, unless `use_region_us` told it.

    A layer is cut in two only where half its time is more than that.
    """
    if workers not in _region_us:
        _region_us[workers] = measured_region_us(workers)
    return _region_us[workers]


def use_region_us(workers: int, microseconds: float) -> None:
    """Take a cost that another process of this machine has measured."""
    _region_us[workers] = microseconds


def measured_region_us(workers: int) -> float:
    """The least of some empty parallel regions, in microseconds.

    Some 2 where threads spin through the pause before it (by default; our ranks do for a while), 50 and more
    where they sleep (OMP_WAIT_POLICY=passive) and their core with them. The least, and in bursts with time
    between them: while another process holds a core, every region lasts as long as its threads spin.
    """
    table = np.empty((0, TABLE_COLUMNS), np.int64)
    taken = []
    for number in range(_REGIONS):
        if number % _BURST == 0:
            time.sleep(_BETWEEN_BURSTS_S)
        pause_end = time.perf_counter() + _PAUSE_S
        while time.perf_counter() < pause_end:
            pass
        with PARALLEL_CALL:
            start = time.perf_counter()  # waiting for another thread's kernel is no cost of this one
            linear_v2_parallel(table, 0, 0, 1, 0, 0, False, workers)
            taken.append(time.perf_counter() - start)
    return 1e6 * min(taken)


def linear(x: Any, weight: Any, out: Any = None) -> Any:
    """x @ weight.T for a few rows of x; quantised weights are not unpacked to memory.

        x        (n, in) float32, contiguous, n from 1 to MAX_ROWS_OF_X
        weight   (rows, in) float32, an Int8Rows or a GgufRows
        out      optional (n, rows) float32, contiguous; written in place

    NumPy arrays and torch CPU tensors. The values of a quantised weight are those of its dequantised form,
    to the bit (int8: the scale is applied to a row's sum); only the order of the sums differs, and for one or
    two rows of x its 24th bit (the bound: linear_tiles_fixed.py). NaN and infinity mean what they mean in
    float32. A caller with the same weight again and again keeps a `Linears`. Raises ShapeError, DtypeError,
    LayoutError, KindError, RangeError (errors.py).
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
