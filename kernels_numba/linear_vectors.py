"""Vectors of float32 inside CPU kernels: loads that widen, fused multiply-adds, sums across lanes.

Called inside @njit kernels only, by address: Numba's own vectoriser neither keeps a tile of sums in registers
nor widens bytes well. Plain LLVM instructions, so LLVM picks the machine's (AVX-512, AVX2, NEON). A tuple of
vectors stays in registers. Explained in docs/explain/paged-attention.md.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import llvmlite.binding
from llvmlite import ir

from kernels_numba.runtime import FAST as FAST  # the cache folder is chosen before numba is imported

from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.extending import intrinsic, models, register_model  # isort: skip


def _lanes() -> int:
    """Floats of one vector: 16 with AVX-512, else 8 (two instructions of 4 where there is NEON only)."""
    import os

    chosen = os.environ.get("NUMBA_CPU_NAME")  # somebody compiles for an older machine than this one
    features = llvmlite.binding.get_host_cpu_features() if not chosen else {}
    return 16 if features.get("avx512f") else 8


LANES = _lanes()
STEP = 32
"""Values that every load takes: a block of the GGUF formats, 32 // LANES vectors."""
PARTS = STEP // LANES

_FLOAT, _BYTE, _INT = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


class Floats(types.Type):
    """Numba's type of one vector of LANES float32."""

    def __init__(self):
        super().__init__(name=f"Floats({LANES})")


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    """In registers and on the stack: an LLVM vector."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _VECTOR)


floats = Floats()


def _load(builder, address, kind, offset=0):
    """The vector `kind` at a byte address that need not be aligned."""
    if offset:
        address = builder.add(address, address.type(offset))
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _lanes_of(builder, vector, first, count):
    """Lanes first..first+count-1 of a vector."""
    mask = ir.Constant(ir.VectorType(_INT, count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, vector, mask)


def _as_floats(builder, small):
    """LANES signed bytes -> LANES float32, exact."""
    return builder.sitofp(builder.sext(small, ir.VectorType(_INT, LANES)), _VECTOR)


def _splat(builder, scalar):
    """A vector with the scalar in every lane."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))


def _pack(context, builder, signature, values):
    return context.make_tuple(builder, signature.return_type, values)


@intrinsic(prefer_literal=True)
def zeros(typing_context, count):
    """`count` vectors of zeros; `count` is a constant."""

    def generate(context, builder, signature, arguments):
        return _pack(context, builder, signature, [ir.Constant(_VECTOR, [0.0] * LANES)] * count.literal_value)

    if isinstance(count, types.IntegerLiteral):
        return types.UniTuple(floats, count.literal_value)(count), generate
    return None


@intrinsic
def load_floats(typing_context, address):
    """STEP float32 from a byte address."""

    def generate(context, builder, signature, arguments):
        parts = [_load(builder, arguments[0], _VECTOR, 4 * LANES * part) for part in range(PARTS)]
        return _pack(context, builder, signature, parts)

    return types.UniTuple(floats, PARTS)(types.int64), generate


@intrinsic
def load_int8(typing_context, address):
    """STEP int8 from a byte address, as floats."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(_BYTE, LANES)
        loaded = [_load(builder, arguments[0], kind, LANES * part) for part in range(PARTS)]
        return _pack(context, builder, signature, [_as_floats(builder, small) for small in loaded])

    return types.UniTuple(floats, PARTS)(types.int64), generate


@intrinsic(prefer_literal=True)
def load_nibbles(typing_context, address, zero):
    """STEP values q - zero of 4 bits from 16 bytes, as floats; the low halves are the first 16 values."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(_BYTE, STEP // 2)

        def all_lanes(value):
            return ir.Constant(kind, [value] * (STEP // 2))

        pairs = _load(builder, arguments[0], kind)
        halves = [builder.and_(pairs, all_lanes(15)), builder.lshr(pairs, all_lanes(4))]
        if zero.literal_value:
            halves = [builder.sub(half, all_lanes(zero.literal_value)) for half in halves]
        parts = [
            _as_floats(builder, _lanes_of(builder, half, first, LANES))
            for half in halves
            for first in range(0, STEP // 2, LANES)
        ]
        return _pack(context, builder, signature, parts)

    if isinstance(zero, types.IntegerLiteral):
        return types.UniTuple(floats, PARTS)(types.int64, zero), generate
    return None


@intrinsic
def load_index(typing_context, address):
    """One uint16 from a byte address, as int64."""

    def generate(context, builder, signature, arguments):
        return builder.zext(_load(builder, arguments[0], ir.IntType(16)), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def keep(typing_context, array):
    """Use an array, so that it lives until here: Numba frees one after its last use, its address no use."""

    def generate(context, builder, signature, arguments):
        return context.get_dummy_value()

    return types.void(array), generate


@intrinsic
def load_float(typing_context, address):
    """One float32 from a byte address."""

    def generate(context, builder, signature, arguments):
        return _load(builder, arguments[0], _FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def load_byte(typing_context, address):
    """One int8 from a byte address, as float32."""

    def generate(context, builder, signature, arguments):
        return builder.sitofp(_load(builder, arguments[0], _BYTE), _FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line of an address to come to the second cache; any address will do."""

    def generate(context, builder, signature, arguments):
        pointer = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.inttoptr(arguments[0], pointer)
        builder.call(function, [place, _INT(0), _INT(2), _INT(1)])  # to read; second of three; data
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def store_floats(typing_context, address, vectors):
    """Vectors, as float32 in a row, to a byte address."""

    def generate(context, builder, signature, arguments):
        for i, part in enumerate(cgutils.unpack_tuple(builder, arguments[1], vectors.count)):
            place = builder.add(arguments[0], ir.Constant(arguments[0].type, 4 * LANES * i))
            builder.store(part, builder.inttoptr(place, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, vectors), generate


@intrinsic
def store_float(typing_context, address, value):
    """One float32 to a byte address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], _FLOAT.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


def _each(operation):
    """An intrinsic body: a tuple of vectors and a scalar -> the operation on every lane of each vector."""

    def body(typing_context, vectors, scalar):
        def generate(context, builder, signature, arguments):
            other = _splat(builder, arguments[1])
            parts = cgutils.unpack_tuple(builder, arguments[0], vectors.count)
            return _pack(
                context, builder, signature, [getattr(builder, operation)(part, other) for part in parts]
            )

        return vectors(vectors, types.float32), generate

    return body


@intrinsic
def multiply_each(typing_context, vectors, scalar):
    """Every lane of every vector times the scalar, rounded."""
    return _each("fmul")(typing_context, vectors, scalar)


@intrinsic
def add_each(typing_context, vectors, scalar):
    """Every lane of every vector plus the scalar, rounded."""
    return _each("fadd")(typing_context, vectors, scalar)


@intrinsic
def multiply_add(typing_context, sums, weights, address, step):
    """sums[c * rows + r] += weights of row r times the STEP floats at address + c * step.

    sums      rows * columns vectors
    weights   rows * PARTS vectors
    address   of the first column, step in bytes to the next

    A product and a sum are rounded once, together.
    """
    rows = weights.count // PARTS
    columns = sums.count // rows

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        totals = cgutils.unpack_tuple(builder, arguments[0], sums.count)
        factors = cgutils.unpack_tuple(builder, arguments[1], weights.count)
        column = arguments[2]
        for c in range(columns):
            for part in range(PARTS):
                values = _load(builder, column, _VECTOR, 4 * LANES * part)
                for row in range(rows):
                    at = c * rows + row
                    totals[at] = builder.call(fma, [factors[row * PARTS + part], values, totals[at]])
            column = builder.add(column, arguments[3])
        return _pack(context, builder, signature, totals)

    return sums(sums, weights, types.int64, types.int64), generate


@intrinsic
def store_sums(typing_context, vectors, address):
    """The sum of the lanes of each vector, as so many float32 in a row at a byte address.

    Neighbours are added, two vectors into one, until one is left: a tree of all sums at once costs a third
    of the shuffles of one after the other. The number of vectors is a power of two.
    """

    def generate(context, builder, signature, arguments):
        parts = cgutils.unpack_tuple(builder, arguments[0], vectors.count)
        for first in range(0, vectors.count, LANES):
            group = parts[first : first + LANES]
            place = builder.add(arguments[1], ir.Constant(arguments[1].type, 4 * first))
            total = _tree_sum(builder, group)
            builder.store(total, builder.inttoptr(place, total.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(vectors, types.int64), generate


def _tree_sum(builder, level):
    """At most LANES vectors -> one vector with the sum of each."""
    wanted = len(level)
    while len(level) > 1 or level[0].type.count > wanted:
        count = level[0].type.count
        if len(level) == 1:
            level, count = level * 2, count // 2  # lanes of one vector are left to add: half as many
        kind = ir.VectorType(_INT, count)
        even, odd = (ir.Constant(kind, list(range(first, first + 2 * count, 2))) for first in (0, 1))
        level = [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
            for a, b in zip(level[::2], level[1::2])
        ]
    return level[0]


@intrinsic
def call_address(typing_context, address, arguments):
    """Call the C function at an address with a tuple of int64; it returns nothing."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments.count)
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, values[1], arguments.count))
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, arguments.count)), generate
