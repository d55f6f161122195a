"""What stays in registers: vectors as long as the processor's, and the block of a matrix product.

Called inside @njit kernels only. LLVM's vectoriser stops at half a register of AVX-512, and keeps no block of
sums in registers over a loop; so both are written down here as LLVM would have to find them. Nothing names an
instruction: LLVM chooses those of the processor.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, attr-defined"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

from kernels_numba.numerics import EXP2_FIT, EXP2_FLOOR  # first: it sets up Numba's cache folder

from llvmlite import ir  # isort: skip
from numba import types  # isort: skip
from numba.core import cgutils, config  # isort: skip
from numba.core.codegen import get_host_cpu_features  # isort: skip
from numba.extending import intrinsic, models, register_model  # isort: skip


def _processor_has(feature: str) -> bool:
    """Whether Numba compiles for a processor with this LLVM feature."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return f"+{feature}" in features.split(",")


LANES = 16 if _processor_has("avx512f") else 8 if _processor_has("avx2") else 4
"""Float32 numbers in a register."""
VECTORS = 2
"""Registers side by side in a block: so each number of `a`, spread over a register, is used twice."""
BLOCK_ROWS = 4 if LANES == 8 else 8
"""Rows of a block. 8 x 2 sums and what they are made of fit 32 registers, 4 x 2 the 16 of AVX2; 8 sums are
also what it takes to keep two multipliers busy that each need 4 cycles."""
BLOCK_COLUMNS = VECTORS * LANES

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_VECTOR, _INTEGERS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT32, LANES)
_FUSE = ("contract",)
"""A product and a sum may become one instruction."""


class VectorType(types.Type):
    """Numba's name for a vector of LANES float32."""

    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _VECTOR)


vector = VectorType()


def _constant(number: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [float(number)] * LANES)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Where the vector that begins at element `index` of a flat array lies."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


@intrinsic
def load(typing_context, array, index):
    """array[index : index + LANES] of a flat float32 array."""

    def generate(context, builder, signature, arguments):
        return builder.load(_address(context, builder, array, *arguments), align=4)

    return vector(array, types.int64), generate


@intrinsic
def put(typing_context, array, index, value):
    """array[index : index + LANES] = value."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], _address(context, builder, array, *arguments[:2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, value), generate


@intrinsic
def plus(typing_context, a, b):
    """a + b, by lanes."""
    return vector(vector, vector), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def times(typing_context, a, b):
    """a * b, by lanes."""
    return vector(vector, vector), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def larger(typing_context, a, b):
    """max(a, b), by lanes."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return vector(vector, vector), generate


@intrinsic
def exp2_of_difference(typing_context, a, b):
    """2**(a - b), by lanes, where a <= b: what numerics.exp2_of_negative does, except that NaN gives NaN."""

    def generate(context, builder, signature, arguments):
        x = builder.fsub(*arguments)
        tiny = builder.fcmp_ordered("<", x, _constant(EXP2_FLOOR))
        x = builder.select(tiny, _constant(EXP2_FLOOR), x)
        n = builder.fptosi(builder.fsub(x, _constant(0.5)), _INTEGERS)
        f = builder.fsub(x, builder.sitofp(n, _VECTOR))
        power = _constant(EXP2_FIT[-1])
        for coefficient in EXP2_FIT[-2::-1]:
            power = builder.fadd(builder.fmul(power, f, flags=_FUSE), _constant(coefficient), flags=_FUSE)
        exponent = builder.shl(n, ir.Constant(_INTEGERS, [23] * LANES))
        scaled = builder.bitcast(builder.add(builder.bitcast(power, _INTEGERS), exponent), _VECTOR)
        return builder.select(tiny, _constant(0.0), scaled)

    return vector(vector, vector), generate


def _spread(builder, number):
    """A vector of LANES times this number."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, _INT32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTEGERS, None))


@intrinsic
def spread(typing_context, number):
    """A vector of LANES times this float32."""
    return vector(number), lambda context, builder, signature, arguments: _spread(builder, *arguments)


@intrinsic
def multiply_block(typing_context, c, c_start, a, a_start, a_row, a_step, b, inner, keep):
    """c[i, x] = keep * c[i, x] + sum over k < inner of a[i, k] * b[k, x]; BLOCK_ROWS x BLOCK_COLUMNS sums.

    c, b      flat float32 scratch, BLOCK_COLUMNS numbers a row; c from c_start on
    a[i, k]   a[a_start + i * a_row + k * a_step], float32
    keep      0 or 1; with 0, what c holds does not matter
    """

    def generate(context, builder, signature, arguments):
        to, c_start, left, a_start, a_row, a_step, right, inner, keep = arguments
        numbers = context.make_array(a)(context, builder, left).data
        block = [(row, v) for row in range(BLOCK_ROWS) for v in range(VECTORS)]

        def address(kind, array, start, row, v):
            offset = builder.add(builder.mul(row, _INT64(BLOCK_COLUMNS)), _INT64(v * LANES))
            return _address(context, builder, kind, array, builder.add(start, offset))

        places = {(row, v): address(c, to, c_start, _INT64(row), v) for row, v in block}
        sums = {at: cgutils.alloca_once_value(builder, _constant(0)) for at in block}
        with builder.if_then(builder.icmp_signed("!=", keep, _INT64(0))):
            for at in block:
                builder.store(builder.load(places[at], align=4), sums[at])
        with cgutils.for_range(builder, inner) as loop:
            others = [
                builder.load(address(b, right, _INT64(0), loop.index, v), align=4) for v in range(VECTORS)
            ]
            column = builder.add(a_start, builder.mul(loop.index, a_step))
            for row in range(BLOCK_ROWS):
                at = builder.add(column, builder.mul(a_row, _INT64(row)))
                number = _spread(builder, builder.load(builder.gep(numbers, [at])))
                for v in range(VECTORS):
                    product = builder.fmul(number, others[v], flags=_FUSE)
                    old = builder.load(sums[row, v])
                    builder.store(builder.fadd(product, old, flags=_FUSE), sums[row, v])
        for at in block:
            builder.store(builder.load(sums[at]), places[at], align=4)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(c, integer, a, integer, integer, integer, b, integer, integer), generate


@intrinsic
def next_number(typing_context, counter):
    """counter[0] as it was, and one more in it; no two threads get the same. `counter` is an int64 array."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, _INT64(1), "monotonic")

    return types.int64(counter), generate
