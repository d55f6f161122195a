"""Scalars inside CPU kernels: 16-bit floats as bits, a vectorising exp2, and a copy of bytes by address.

Called inside @njit kernels only. Numba computes with no 16-bit float on the CPU, so here a uint16 array *is*
a bfloat16 array (the upper halves of float32s) and an int16 array a float16 array. Explained in
docs/explain/paged-attention.md.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.intrinsics.words import word_maker
from kernels_numba.runtime import PART, njit

from llvmlite import ir  # isort: skip
from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.extending import intrinsic, overload  # isort: skip

word = word_maker(intrinsic)


@word(types.float32(types.uint32))
def bits_to_float(builder, bits):
    """The float32 whose bits are the uint32 `bits`."""
    return builder.bitcast(bits, ir.FloatType())


@word(types.uint32(types.float32))
def float_to_bits(builder, value):
    """The bits of a float32, as uint32."""
    return builder.bitcast(value, ir.IntType(32))


@word(types.float32(types.int16))
def half_to_float(builder, bits):
    """The float32 of a float16 whose bits are the int16 `bits`; one instruction for eight (F16C, NEON)."""
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


@word(types.int16(types.float32))
def float_to_half(builder, value):
    """The bits, as int16, of the float16 nearest to a float32, ties to even."""
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


@word(types.void(types.int64, types.int64, types.int64))
def copy_bytes(builder, target, source, count):
    """memcpy: `count` bytes from address `source` to address `target`; they must not overlap."""
    byte_pointer = ir.IntType(8).as_pointer()
    to = builder.inttoptr(target, byte_pointer)
    of = builder.inttoptr(source, byte_pointer)
    cgutils.raw_memcpy(builder, to, of, count, 1)


@intrinsic
def take_next(typing_context, counter):
    """counter[0] before it is raised by one, in a step that no thread can come between; int64 array."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(counter)(context, builder, arguments[0])
        return builder.atomic_rmw("add", view.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


def widen(value: Any) -> Any:
    """float32 of one cache element: itself, bfloat16 bits moved to the upper half, or float16 bits."""
    raise NotImplementedError("inside kernels only")


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: bits_to_float(np.uint32(value) << np.uint32(16))
    if value == types.int16:
        return lambda value: half_to_float(value)
    return lambda value: value


def store(array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, a float32, rounded to the nearest even one where the array holds 16 bits."""
    raise NotImplementedError("inside kernels only")


@overload(store)
def _store(array, index, value):
    if array.dtype == types.uint16:

        def store_bfloat16(array, index, value):
            bits = float_to_bits(value)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            if value == value:
                array[index] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
            else:  # rounding a NaN's bits up could carry into an infinity
                array[index] = np.uint16(0x7FC0)

        return store_bfloat16

    if array.dtype == types.int16:

        def store_float16(array, index, value):
            array[index] = float_to_half(value)

        return store_float16

    def store_float32(array, index, value):
        array[index] = value

    return store_float32


LOG2_E = 1.4426950408889634
LOWEST = np.float32(-1e30)
"""Stands for minus infinity in a mask: finite, so that LOWEST - LOWEST is 0 and not NaN."""

EXP2_FIT = (1.0, 0.6931472067, 0.2402265121, 0.05550327214, 0.009618025603, 0.001340043217, 0.0001546973196)
"""2**f for |f| <= 1/2: coefficients of f**0, f**1, ..., a Chebyshev fit."""
EXP2_FLOOR = -126.0
"""Below, 2**x counts as 0: it would not be a normal float32."""
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(c) for c in EXP2_FIT)
_FLOOR, _HALF, _ZERO = np.float32(EXP2_FLOOR), np.float32(0.5), np.float32(0.0)


@njit(**PART, fastmath={"contract"}, inline="never")
def exp2_of_negative(x: Any) -> Any:
    """2**x for float32 x <= 0, 0 below -126, NaN for NaN; relative error under 2e-7. The same bits wherever
    it is compiled: sums may be fused with products, and not reordered.

    Vectorises, which a call of the C library's exp does not: 2**x = 2**n * 2**f with n the nearest integer
    and |f| <= 1/2; a Chebyshev fit of degree 6 gives 2**f, and n goes straight into the exponent's bits.
    """
    tiny = x < _FLOOR
    clamped = _FLOOR if tiny else x
    n = np.int32(clamped - _HALF)  # cut towards zero: the nearest integer of a number <= 0
    f = clamped - np.float32(n)
    power = _C5 + f * _C6
    power = _C4 + f * power
    power = _C3 + f * power
    power = _C2 + f * power
    power = _C1 + f * power
    power = _C0 + f * power
    scaled = power * bits_to_float(np.uint32((n + np.int32(127)) << np.int32(23)))
    return _ZERO if tiny else scaled
