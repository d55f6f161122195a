"""What a decoder layer computes row by row between its linear layers: the norm with its residual, and SwiGLU.

Called by the model's forward pass on a CPU in float32. Knows arrays, not models. Each is one pass over memory
where torch makes several. No row depends on another, nor on how many there are. The ladder:
    v0  NumPy in float64, the oracle of the tests
    v1  vectorised loops; a large batch is shared by all threads
Microseconds per call, one thread of a 2.8 GHz Xeon, 1 and 256 rows: norm of 576 with addition, torch 27 and
302, v1 11 and 101; SwiGLU of 1536, torch 4 and 384, v1 7 and 317.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.intrinsics.linear_vectors import floats_at
from kernels_numba.intrinsics.numerics import LOG2_E, exp2_of_negative
from kernels_numba.intrinsics.vectors import LANES, fused, load, plus, put, zeros
from kernels_numba.runtime import PARALLEL_CALL, PART, get_num_threads, njit, prange, register_jitable

PARALLEL_VALUES = 1 << 15
"""Fewer values than this one thread computes in the time in which a second one wakes up."""
_RULES: Any = {"error_model": "numpy"}
"""No errors: a division by zero gives what float32 gives, and a loop with a test in it does not vectorise.
And no reordered sums: LLVM compiles a copy of a row's loop into each caller (one thread, several, a whole
decode step), may order the sums of each copy otherwise, and bits would depend on who calls."""
_STRIDE = 4 * LANES
"""Values that a turn of the sum of squares takes: one vector for each of four sums."""
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


def rms_norm(x: Any, weight: Any, eps: float, add: Any = None) -> Any:
    """Divide each row by its root mean square, times the weight; returns a new array of the kind of x.

        x        (..., width) float32, contiguous
        weight   (width,) float32, contiguous
        eps      added to the mean square
        add      optional, as x: x += add first, in place

    NumPy arrays and torch CPU tensors. Raises ShapeError, DtypeError, LayoutError, KindError (errors.py).
    """
    rows, width = _check("x", x)
    if weight.shape != (width,):
        arrays.check_shape("weight", weight, width)
    _check("weight", weight)
    if add is not None:
        _check("add", add, x)
    arrays.check_writable("x", x)
    out = np.empty_like(x) if isinstance(x, np.ndarray) else sys.modules["torch"].empty_like(x)
    more = arrays.address_of(add) if add is not None else 0
    job = (arrays.address_of(x), more, arrays.address_of(weight), float(eps), arrays.address_of(out))
    _run(norm_v1, job, rows, width)
    return out


def silu_multiply(gate: Any, up: Any) -> Any:
    """gate = gate * sigmoid(gate) * up, in place; returns gate.

        gate, up   (rows, width) float32, contiguous

    NumPy arrays and torch CPU tensors. Raises ShapeError, DtypeError, LayoutError, KindError (errors.py).
    """
    rows, width = _check("gate", gate)
    _check("up", up, gate)
    arrays.check_writable("gate", gate)
    _run(silu_v1, (arrays.address_of(gate), arrays.address_of(up)), rows, width)
    return gate


def _run(kernel: Any, job: tuple[Any, ...], rows: int, width: int) -> None:
    if rows * width < PARALLEL_VALUES:
        kernel(*job, rows, width, 1)
    else:
        with PARALLEL_CALL:
            kernel(*job, rows, width, get_num_threads())


def _check(name: str, array: Any, like: Any = None) -> tuple[int, int]:
    """The rows and the width of a contiguous float32 array on the CPU, of the shape of `like`."""
    if not arrays.plain_float32(array):
        if arrays.device_of(name, array) != arrays.CPU:
            raise arrays.KindError(name, "array on cuda", "an array on cpu")
        arrays.check_integer(name, array, "float32")
        arrays.check_contiguous(name, array)
    if like is not None and array.shape != like.shape:
        arrays.check_shape(name, array, *like.shape)
    width = array.shape[-1]
    return math.prod(array.shape[:-1]), width


def rms_norm_v0(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The oracle."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight


def silu_multiply_v0(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The oracle."""
    wide = gate.astype(np.float64)
    return wide / (1 + np.exp(-wide)) * up


@register_jitable
def _sum_of_squares(x, scratch):
    """In one order wherever it is compiled. scratch: as long as x."""
    total, whole = _ZERO, x.shape[0] // _STRIDE * _STRIDE
    if whole:
        a, b, c, d = zeros(4, LANES)
        for first in range(0, whole, _STRIDE):
            one, two = load(x, first, LANES), load(x, first + LANES, LANES)
            three, four = load(x, first + 2 * LANES, LANES), load(x, first + 3 * LANES, LANES)
            a, b, c, d = fused(one, one, a), fused(two, two, b), fused(three, three, c), fused(four, four, d)
        put(scratch, 0, plus(plus(a, b), plus(c, d)))
        for lane in range(LANES):
            total += scratch[lane]
    for place in range(whole, x.shape[0]):
        total += x[place] * x[place]
    return total


@njit(**PART, **_RULES)
def _norm_row(x, add, weight, eps, out):
    """One row; an empty `add` adds nothing."""
    for d in range(add.shape[0]):
        x[d] += add[d]
    factor = _ONE / np.sqrt(_sum_of_squares(x, out) / np.float32(x.shape[0]) + eps)
    for d in range(x.shape[0]):
        out[d] = x[d] * factor * weight[d]


@njit(**PART)
def _norm_rows(x, add, weight, eps, out, first, last, width):
    scales = floats_at(weight, width)
    for row in range(first, last):
        at = 4 * row * width
        more = floats_at(add + at, width if add else 0)
        _norm_row(floats_at(x + at, width), more, scales, np.float32(eps), floats_at(out + at, width))


@njit(cache=True, nogil=True, parallel=True)
def norm_v1(x, add, weight, eps, out, rows, width, workers):
    """Each worker a share of the rows; a parallel region would wake the other threads even for one worker."""
    if workers == 1:
        _norm_rows(x, add, weight, eps, out, 0, rows, width)
    else:
        share = (rows + workers - 1) // workers
        for worker in prange(workers):
            _norm_rows(x, add, weight, eps, out, worker * share, min(rows, worker * share + share), width)


@njit(**PART, **_RULES)
def _silu_row(gate, up):
    for d in range(gate.shape[0]):
        value = gate[d]
        small = exp2_of_negative(-abs(value) * np.float32(LOG2_E))  # e**-|value|: no overflow
        share = _ONE if value >= _ZERO else small
        gate[d] = value * share / (_ONE + small) * up[d]


@njit(**PART)
def _silu_rows(gate, up, first, last, width):
    for row in range(first, last):
        at = 4 * row * width
        _silu_row(floats_at(gate + at, width), floats_at(up + at, width))


@njit(cache=True, nogil=True, parallel=True)
def silu_v1(gate, up, rows, width, workers):
    """As norm_v1."""
    if workers == 1:
        _silu_rows(gate, up, 0, rows, width)
    else:
        share = (rows + workers - 1) // workers
        for worker in prange(workers):
            _silu_rows(gate, up, worker * share, min(rows, worker * share + share), width)
