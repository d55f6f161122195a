"""The words of the linear layers: a step of 32 weights, by address, as vectors of float32.

Called inside @njit kernels only. Out of the words of vectors.py; by address, because the kernels of the
formats are called by address, with any of them behind the same arguments. Explained in
docs/explain/paged-attention.md.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from kernels_numba.intrinsics import vectors
from kernels_numba.intrinsics.numerics import word
from kernels_numba.intrinsics.vectors import (
    BYTE,
    FLOAT,
    INT,
    LONG,
    Vector,
    load_value,
    same,
    shuffle,
    store_value,
)

from llvmlite import ir  # isort: skip
from numba import carray, types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.extending import intrinsic, register_jitable  # isort: skip

LANES = max(8, vectors.LANES)
"""Floats of one vector: 16 with AVX-512, else 8 (two instructions of 4 where there is NEON only)."""
STEP = 32
"""Values that every load takes: a block of the GGUF formats, 32 // LANES vectors."""
PARTS = STEP // LANES

floats = Vector("float32", LANES)


def _as_floats(builder, small):
    """LANES signed bytes -> LANES float32, exact."""
    return builder.sitofp(builder.sext(small, ir.VectorType(INT, LANES)), floats.llvm)


@word(types.UniTuple(floats, PARTS)(types.int64))
def load_floats(builder, address):
    """STEP float32 from a byte address."""
    parts = [load_value(builder, address, floats.llvm, 4 * LANES * part) for part in range(PARTS)]
    return cgutils.pack_array(builder, parts)


@word(types.UniTuple(floats, PARTS)(types.int64))
def load_int8(builder, address):
    """STEP int8 from a byte address, as floats."""
    kind = ir.VectorType(BYTE, LANES)
    loaded = [load_value(builder, address, kind, LANES * part) for part in range(PARTS)]
    return cgutils.pack_array(builder, [_as_floats(builder, small) for small in loaded])


@intrinsic(prefer_literal=True)
def load_nibbles(typing_context, address, zero):
    """STEP values q - zero of 4 bits from 16 bytes, as floats; the low halves are the first 16 values."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(BYTE, STEP // 2)

        def all_lanes(value):
            return same(kind, value)

        pairs = load_value(builder, arguments[0], kind)
        halves = [builder.and_(pairs, all_lanes(15)), builder.lshr(pairs, all_lanes(4))]
        if zero.literal_value:
            halves = [builder.sub(half, all_lanes(zero.literal_value)) for half in halves]
        parts = [
            _as_floats(builder, shuffle(builder, half, half, range(first, first + LANES)))
            for half in halves
            for first in range(0, STEP // 2, LANES)
        ]
        return cgutils.pack_array(builder, parts)

    if isinstance(zero, types.IntegerLiteral):
        return types.UniTuple(floats, PARTS)(types.int64, zero), generate
    return None


@word(types.int64(types.int64))
def load_index(builder, address):
    """One uint16 from a byte address, as int64."""
    return builder.zext(load_value(builder, address, ir.IntType(16)), LONG)


@word(lambda array: types.void(array))
def keep(builder, array):
    """Use an array, so that it lives until here: Numba frees one after its last use, its address no use."""


@word(types.float32(types.int64))
def load_float(builder, address):
    """One float32 from a byte address."""
    return load_value(builder, address, FLOAT)


@word(types.float32(types.int64))
def load_byte(builder, address):
    """One int8 from a byte address, as float32."""
    return builder.sitofp(load_value(builder, address, BYTE), FLOAT)


@word(types.CPointer(types.float32)(types.int64))
def _pointer(builder, address):
    """A byte address as a pointer to float32."""
    return builder.inttoptr(address, FLOAT.as_pointer())


@register_jitable
def floats_at(address, count):
    """`count` float32 from a byte address on, as an array that owns nothing."""
    return carray(_pointer(address), (count,))


LINE_BYTES = 64


def prefetching(nearness, nbytes=LINE_BYTES):
    """A word that asks for the cache lines of bytes from any address on; nothing waits for them."""

    @word(types.void(types.int64))
    def prefetch(builder, address):
        for line in range(0, nbytes, LINE_BYTES):
            place = builder.add(address, LONG(line))
            pointer = builder.inttoptr(place, BYTE.as_pointer())
            vectors.prefetch_pointer(builder, pointer, nearness)

    return prefetch


FIRST, SECOND = 3, 2
prefetch = prefetching(FIRST)
"""To the first cache: with the second, 16 rows of x take 1.1 times as long, and int8 in fixed point too."""
prefetch_second = prefetching(SECOND)
"""To the second cache, for a kernel that fills the first with what it makes of the weights."""


@word(lambda address, tile: types.void(types.int64, tile))
def store_floats(builder, address, tile):
    """Vectors, as float32 in a row, to a byte address."""
    for i, part in enumerate(cgutils.unpack_tuple(builder, tile)):
        store_value(builder, address, part, 4 * LANES * i)


@word(types.void(types.int64, types.float32))
def store_float(builder, address, value):
    """One float32 to a byte address."""
    store_value(builder, address, value)


def _each(builder, operation, tile, scalar):
    """The operation on every lane of each vector of a tile and the scalar."""
    other = vectors.spread_value(builder, scalar, LANES)
    return cgutils.pack_array(
        builder, [operation(part, other) for part in cgutils.unpack_tuple(builder, tile)]
    )


def _of_each(tile, scalar):
    return tile(tile, types.float32)


@word(_of_each)
def multiply_each(builder, tile, scalar):
    """Every lane of every vector times the scalar, rounded."""
    return _each(builder, builder.fmul, tile, scalar)


@word(_of_each)
def add_each(builder, tile, scalar):
    """Every lane of every vector plus the scalar, rounded."""
    return _each(builder, builder.fadd, tile, scalar)


@word(lambda sums, weights, address, step: sums(sums, weights, types.int64, types.int64))
def multiply_add(builder, sums, weights, address, step):
    """sums[c * rows + r] += weights of row r times the STEP floats at address + c * step.

    sums      rows * columns vectors
    weights   rows * PARTS vectors
    address   of the first column, step in bytes to the next

    A product and a sum are rounded once, together.
    """
    totals, factors = (cgutils.unpack_tuple(builder, tile) for tile in (sums, weights))
    rows = len(factors) // PARTS
    column = address
    for c in range(len(totals) // rows):
        for part in range(PARTS):
            values = load_value(builder, column, floats.llvm, 4 * LANES * part)
            for row in range(rows):
                at, weight = c * rows + row, factors[row * PARTS + part]
                totals[at] = vectors.multiply_add_values(builder, weight, values, totals[at])
        column = builder.add(column, step)
    return cgutils.pack_array(builder, totals)


@word(lambda tile, address: types.void(tile, types.int64))
def store_sums(builder, tile, address):
    """The sum of the lanes of each vector, as so many float32 in a row at a byte address; a multiple of 4."""
    parts = cgutils.unpack_tuple(builder, tile)
    for first in range(0, len(parts), 4):
        sums = vectors.sums_of_four(builder, parts[first : first + 4])
        store_value(builder, address, sums, 4 * first)


@intrinsic
def call_address(typing_context, address, arguments):
    """Call the C function at an address with a tuple of int64; it returns nothing."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [LONG] * arguments.count)
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, values[1]))
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, arguments.count)), generate
