"""Vectors of eight floats, held in registers: for loops that the compiler does not vectorise well.

Called inside @njit kernels only. Tuples of vectors are *tiles*: small matrices whose entries are vectors, as
many as fit into registers. Everything is unrolled, so a count is a constant; LLVM turns a vector into one AVX
register, two of NEON, or whatever the processor has. Explained in docs/explain/paged-attention.md.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

import kernels_numba.runtime  # noqa: F401  - sets up numba's cache folder before numba is imported

from llvmlite import ir  # isort: skip
from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.core.datamodel import models, register_default  # isort: skip
from numba.extending import intrinsic  # isort: skip

LANES = 8
"""Floats in a vector: a register of AVX2; every head width is a multiple of it."""

_FUSE = ("contract",)
"""A product and a sum may become one instruction, rounded once."""
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


class VectorType(types.Type):
    """Numba's name for a vector of eight float32."""

    def __init__(self):
        super().__init__(name="float32x8")


@register_default(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _FLOATS)


_VECTOR = VectorType()


def _tile(count: int) -> types.UniTuple:
    return types.UniTuple(_VECTOR, count)


def _pack(builder: Any, vectors: list[Any]) -> Any:
    """The LLVM array that a tuple of vectors is."""
    return cgutils.pack_array(builder, vectors)


def _unpack(builder: Any, tile: Any) -> list[Any]:
    return cgutils.unpack_tuple(builder, tile)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: list[Any], vector: Any) -> Any:
    """Pointer to array[index] as a pointer to a `vector` that begins there."""
    view = context.make_array(array_type)(context, builder, array)
    pointer = cgutils.get_item_pointer(context, builder, array_type, view, index, wraparound=False)
    return builder.bitcast(pointer, vector.as_pointer())


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: list[Any]) -> Any:
    """Eight elements from array[index] on, widened to float32 (int16 and uint16 as in numerics.widen)."""
    if array_type.dtype == types.float32:
        return builder.load(_address(context, builder, array_type, array, index, _FLOATS), align=4)
    if array_type.dtype == types.int16:
        halves = ir.VectorType(ir.HalfType(), LANES)
        pointer = _address(context, builder, array_type, array, index, halves)
        return builder.fpext(builder.load(pointer, align=2), _FLOATS)
    pointer = _address(context, builder, array_type, array, index, ir.VectorType(ir.IntType(16), LANES))
    words = ir.VectorType(ir.IntType(32), LANES)
    wide = builder.zext(builder.load(pointer, align=2), words)
    return builder.bitcast(builder.shl(wide, ir.Constant(words, [16] * LANES)), _FLOATS)


def _spread(builder: Any, value: Any) -> Any:
    """A vector of eight times the same float."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, first, zeros)


@intrinsic(prefer_literal=True)
def zeros(typing_context, count):
    """A tile of `count` vectors of zeros."""

    def generate(context, builder, signature, arguments):
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        return _pack(builder, [zero] * count.literal_value)

    return _tile(count.literal_value)(count), generate


@intrinsic
def load(typing_context, array, index):
    """The vector of the eight elements from array[index] on. index: a tuple of integers, none negative."""

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        return _load(context, builder, array, arguments[0], at)

    return _VECTOR(array, index), generate


@intrinsic(prefer_literal=True)
def load_tile(typing_context, array, index, rows, width):
    """tile[r * width + w] = the vector at array[index], r rows further down and w vectors further right."""
    shape = [(r, w) for r in range(rows.literal_value) for w in range(width.literal_value)]

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        places = (_moved(builder, at, r, LANES * w) for r, w in shape)
        return _pack(builder, [_load(context, builder, array, arguments[0], place) for place in places])

    return _tile(len(shape))(array, index, rows, width), generate


@intrinsic(prefer_literal=True)
def store_tile(typing_context, array, index, rows, width, tile):
    """The reverse of load_tile, into a float32 array."""
    shape = [(r, w) for r in range(rows.literal_value) for w in range(width.literal_value)]

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        for (r, w), vector in zip(shape, _unpack(builder, arguments[4])):
            place = _moved(builder, at, r, LANES * w)
            pointer = _address(context, builder, array, arguments[0], place, _FLOATS)
            builder.store(vector, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, index, rows, width, tile), generate


@intrinsic(prefer_literal=True)
def spread_column(typing_context, array, index, rows):
    """tile[r] = eight times the float of a float32 array that lies r rows below array[index]."""

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        vectors = []
        for r in range(rows.literal_value):
            place = _moved(builder, at, r, 0)
            pointer = _address(context, builder, array, arguments[0], place, ir.FloatType())
            vectors.append(_spread(builder, builder.load(pointer)))
        return _pack(builder, vectors)

    return _tile(rows.literal_value)(array, index, rows), generate


def _position(context: Any, builder: Any, index_type: Any, index: Any) -> list[Any]:
    """The integers of an index tuple, all of the machine's width."""
    integers = zip(_unpack(builder, index), index_type.types)
    return [context.cast(builder, integer, kind, types.intp) for integer, kind in integers]


def _moved(builder: Any, position: list[Any], rows: int, columns: int) -> list[Any]:
    *front, row, column = position
    row = builder.add(row, ir.Constant(row.type, rows))
    return [*front, row, builder.add(column, ir.Constant(column.type, columns))]


@intrinsic
def add_products(typing_context, tile, rows, columns):
    """tile[r * width + w] += rows[r] * columns[w], all lanes: each loaded vector is used many times."""

    def generate(context, builder, signature, arguments):
        sums, left, right = (_unpack(builder, argument) for argument in arguments)
        products = [builder.fmul(a, b, flags=_FUSE) for a in left for b in right]
        return _pack(builder, [builder.fadd(c, ab, flags=_FUSE) for c, ab in zip(sums, products)])

    return tile(tile, rows, columns), generate


@intrinsic
def larger(typing_context, a, b):
    """Of each lane the larger one."""

    def generate(context, builder, signature, arguments):
        return _larger(builder, *arguments)

    return _VECTOR(a, b), generate


@intrinsic
def largest(typing_context, vector):
    """The largest lane, a float32."""

    def generate(context, builder, signature, arguments):
        (vector,) = arguments
        for half in (4, 2, 1):
            low, high = (_shuffle(builder, vector, vector, range(i, i + half)) for i in (0, half))
            vector = _larger(builder, low, high)
        return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    return types.float32(vector), generate


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic(prefer_literal=True)
def store_totals(typing_context, array, index, rows, tile):
    """Four floats r rows below array[index] = the sums over the lanes of tile[4 * r] to tile[4 * r + 3].

    Four sums at once: neighbours are added in pairs, so that three rounds of additions serve all four.
    """

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        vectors = _unpack(builder, arguments[3])
        for r in range(rows.literal_value):
            a, b, c, d = vectors[4 * r : 4 * r + 4]
            sums = _add_neighbours(builder, _add_neighbours(builder, a, b), _add_neighbours(builder, c, d))
            low, high = (_shuffle(builder, sums, sums, range(i, i + 4)) for i in (0, 4))
            four = ir.VectorType(ir.FloatType(), 4)
            pointer = _address(context, builder, array, arguments[0], _moved(builder, at, r, 0), four)
            builder.store(builder.fadd(low, high), pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, index, rows, tile), generate


def _shuffle(builder: Any, a: Any, b: Any, lanes: Any) -> Any:
    lanes = list(lanes)
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def _add_neighbours(builder: Any, a: Any, b: Any) -> Any:
    """Sums of two neighbouring lanes, of a and b by turns within each half: what one register half can do."""
    even = _shuffle(builder, a, b, [0, 2, 8, 10, 4, 6, 12, 14])
    odd = _shuffle(builder, a, b, [1, 3, 9, 11, 5, 7, 13, 15])
    return builder.fadd(even, odd)


@intrinsic
def prefetch(typing_context, array, index):
    """Ask for the cache line of array[index]; nothing waits for it."""

    def generate(context, builder, signature, arguments):
        byte = ir.IntType(8)
        at = _position(context, builder, index, arguments[1])
        pointer = _address(context, builder, array, arguments[0], at, byte)
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = (ir.Constant(word, number) for number in (0, 2, 1))
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, index), generate
