"""The block of a matrix product that stays in registers.

Called inside @njit kernels only. LLVM keeps no block of sums in registers over a loop, so this is written
down as LLVM would have to find it, out of the words of vectors.py.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from kernels_numba.intrinsics.vectors import FLOAT, FUSE, LANES, LONG, same, spread_value

from llvmlite import ir  # isort: skip
from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.extending import intrinsic  # isort: skip

VECTORS = 2
"""Registers side by side in a block: so each number of `a`, spread over a register, is used twice."""
BLOCK_ROWS = 4 if LANES == 8 else 8
"""Rows of a block. 8 x 2 sums and what they are made of fit 32 registers, 4 x 2 the 16 of AVX2; 8 sums are
also what it takes to keep two multipliers busy that each need 4 cycles."""
BLOCK_COLUMNS = VECTORS * LANES

_VECTOR = ir.VectorType(FLOAT, LANES)


@intrinsic
def multiply_block(typing_context, c, c_start, a, a_start, a_row, a_step, b, inner, keep):
    """c[i, x] = keep * c[i, x] + sum over k < inner of a[i, k] * b[k, x]; BLOCK_ROWS x BLOCK_COLUMNS sums.

    c, b      flat float32 scratch, BLOCK_COLUMNS numbers a row; c from c_start on
    a[i, k]   a[a_start + i * a_row + k * a_step], float32
    keep      0 or 1; with 0, what c holds does not matter
    """

    def generate(context, builder, signature, arguments):
        to, c_start, left, a_start, a_row, a_step, right, inner, keep = arguments
        sums_data, numbers, others_data = (
            context.make_array(kind)(context, builder, array).data
            for kind, array in ((c, to), (a, left), (b, right))
        )
        block = [(row, v) for row in range(BLOCK_ROWS) for v in range(VECTORS)]

        def address(data, start, row, v):
            offset = builder.add(builder.mul(row, LONG(BLOCK_COLUMNS)), LONG(v * LANES))
            return builder.bitcast(builder.gep(data, [builder.add(start, offset)]), _VECTOR.as_pointer())

        places = {(row, v): address(sums_data, c_start, LONG(row), v) for row, v in block}
        sums = {at: cgutils.alloca_once_value(builder, same(_VECTOR, 0.0)) for at in block}
        with builder.if_then(builder.icmp_signed("!=", keep, LONG(0))):
            for at in block:
                builder.store(builder.load(places[at], align=4), sums[at])
        with cgutils.for_range(builder, inner) as loop:
            others = [
                builder.load(address(others_data, LONG(0), loop.index, v), align=4) for v in range(VECTORS)
            ]
            column = builder.add(a_start, builder.mul(loop.index, a_step))
            for row in range(BLOCK_ROWS):
                at = builder.add(column, builder.mul(a_row, LONG(row)))
                number = spread_value(builder, builder.load(builder.gep(numbers, [at])), LANES)
                for v in range(VECTORS):
                    product = builder.fmul(number, others[v], flags=FUSE)
                    old = builder.load(sums[row, v])
                    builder.store(builder.fadd(product, old, flags=FUSE), sums[row, v])
        for at in block:
            builder.store(builder.load(sums[at]), places[at], align=4)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(c, integer, a, integer, integer, integer, b, integer, integer), generate
