"""Vectors held in registers: the words of loops that the compiler does not vectorise well.

Called inside @njit kernels only, and the base of linear_vectors.py, register_blocks.py and vectors_codes.py.
Tuples of vectors are *tiles*: small matrices whose entries are vectors, as many as fit into registers. All is
unrolled, so a count is a constant; LLVM picks the instructions. Explained in docs/explain/paged-attention.md.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, attr-defined"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernels_numba.numerics import EXP2_FIT, EXP2_FLOOR, word  # first: it sets up Numba's cache folder

from llvmlite import ir  # isort: skip
from numba import types  # isort: skip
from numba.core import cgutils, config  # isort: skip
from numba.core.codegen import get_host_cpu_features  # isort: skip
from numba.core.datamodel import models, register_default  # isort: skip
from numba.extending import intrinsic  # isort: skip


def processor_has(*wanted: str) -> bool:
    """Whether Numba compiles for a processor with these LLVM features."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return {f"+{feature}" for feature in wanted} <= set(features.split(","))


LANES = 16 if processor_has("avx512f") else 8 if processor_has("avx2") else 4
"""Float32 numbers in a register."""

BYTE, HALF, INT, LONG, FLOAT = ir.IntType(8), ir.HalfType(), ir.IntType(32), ir.IntType(64), ir.FloatType()
_ELEMENTS = {"float32": FLOAT, "int32": INT, "uint8": BYTE}
FUSE = ("contract",)
"""A product and a sum may become one instruction, rounded once."""


class Vector(types.Type):
    """Numba's name for a vector: of float32, int32 or uint8. `llvm` is LLVM's."""

    def __init__(self, element: str, lanes: int):
        self.llvm = ir.VectorType(_ELEMENTS[element], lanes)
        super().__init__(name=f"{element}x{lanes}")


@register_default(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.llvm)


# What intrinsics are made of, here and in the modules beside: from LLVM values to LLVM values.


def same(kind: ir.VectorType, number: float) -> ir.Constant:
    """A constant vector of one number."""
    return ir.Constant(kind, [number] * kind.count)


def shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """Lanes of a and b, counted through."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes)))


def spread_value(builder: Any, value: Any, lanes: int) -> Any:
    """A vector with the value in every lane."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return shuffle(builder, first, first, [0] * lanes)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def multiply_add_values(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once; numbers or vectors."""
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    return call(builder, f"llvm.fma.{suffix}", a.type, a, b, c)


def load_value(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """What lies at a byte address, an int64, that need not be aligned."""
    place = builder.add(address, LONG(offset)) if offset else address
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def store_value(builder: Any, address: Any, value: Any, offset: int = 0) -> None:
    """Store to a byte address, an int64, that need not be aligned."""
    place = builder.add(address, LONG(offset)) if offset else address
    builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=1)


def sums_of_four(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sums over the lanes of four vectors, a vector of four.

    Neighbours within each four lanes are added in pairs, so that two rounds of additions serve all four, by
    shuffles that stay in a quarter of a register; then quarters are added.
    """
    a, b, c, d = vectors
    sums = _add_neighbours(builder, _add_neighbours(builder, a, b), _add_neighbours(builder, c, d))
    while sums.type.count > 4:
        half = sums.type.count // 2
        low, high = (shuffle(builder, sums, sums, range(first, first + half)) for first in (0, half))
        sums = builder.fadd(low, high)
    return sums


def _add_neighbours(builder: Any, a: Any, b: Any) -> Any:
    """Sums of two neighbouring lanes, in each four: two of a, then two of b."""
    count = a.type.count
    even = [
        place for four in range(0, count, 4) for place in (four, four + 2, count + four, count + four + 2)
    ]
    odd = [place + 1 for place in even]
    return builder.fadd(shuffle(builder, a, b, even), shuffle(builder, a, b, odd))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


# Where something lies: an array and an index (an integer, or a tuple of them; none negative).


def _position(context: Any, builder: Any, index_type: Any, index: Any) -> list[Any]:
    """The integers of an index, all of the machine's width."""
    if isinstance(index_type, types.Integer):
        return [context.cast(builder, index, index_type, types.intp)]
    integers = zip(cgutils.unpack_tuple(builder, index), index_type.types)
    return [context.cast(builder, integer, kind, types.intp) for integer, kind in integers]


def _moved(builder: Any, position: list[Any], rows: int, columns: int) -> list[Any]:
    *front, row, column = position
    return [*front, builder.add(row, LONG(rows)), builder.add(column, LONG(columns))]


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: list[Any], kind: Any) -> Any:
    """Pointer to array[index] as a pointer to a `kind` that begins there."""
    view = context.make_array(array_type)(context, builder, array)
    pointer = cgutils.get_item_pointer(context, builder, array_type, view, index, wraparound=False)
    return builder.bitcast(pointer, kind.as_pointer())


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: list[Any], lanes: int) -> Any:
    """Elements from array[index] on, widened to float32 (int16 and uint16 as in numerics.widen)."""

    def elements(kind: Any, align: int) -> Any:
        pointer = _address(context, builder, array_type, array, index, ir.VectorType(kind, lanes))
        return builder.load(pointer, align=align)

    floats, integers = ir.VectorType(FLOAT, lanes), ir.VectorType(INT, lanes)
    if array_type.dtype == types.float32:
        return elements(FLOAT, 4)
    if array_type.dtype == types.int16:
        return builder.fpext(elements(HALF, 2), floats)
    wide = builder.zext(elements(ir.IntType(16), 2), integers)
    return builder.bitcast(builder.shl(wide, same(integers, 16)), floats)


@intrinsic(prefer_literal=True)
def load(typing_context, array, index, lanes):
    """The vector of `lanes` elements from array[index] on, as float32."""

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        return _load(context, builder, array, arguments[0], at, lanes.literal_value)

    return Vector("float32", lanes.literal_value)(array, index, lanes), generate


@intrinsic
def put(typing_context, array, index, vector):
    """The reverse of load, into a float32 array."""

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        place = _address(context, builder, array, arguments[0], at, vector.llvm)
        builder.store(arguments[2], place, align=4)
        return context.get_dummy_value()

    return types.void(array, index, vector), generate


@intrinsic(prefer_literal=True)
def spread(typing_context, number, lanes):
    """A vector of `lanes` times this float32."""

    def generate(context, builder, signature, arguments):
        return spread_value(builder, arguments[0], lanes.literal_value)

    return Vector("float32", lanes.literal_value)(types.float32, lanes), generate


@word(lambda a, b: a(a, b))
def plus(builder, a, b):
    """a + b, by lanes."""
    return builder.fadd(a, b)


@word(lambda a, b: a(a, b))
def times(builder, a, b):
    """a * b, by lanes."""
    return builder.fmul(a, b)


@word(lambda a, b, c: a(a, b, c))
def fused(builder, a, b, c):
    """a * b + c, rounded once: by lanes, or of three float32."""
    return multiply_add_values(builder, a, b, c)


@word(lambda a, b: a(a, b))
def larger(builder, a, b):
    """Of each lane the larger one."""
    return _larger(builder, a, b)


@word(lambda vector: types.float32(vector))
def largest(builder, vector):
    """The largest lane, a float32."""
    left = vector
    while left.type.count > 1:
        half = left.type.count // 2
        low, high = (shuffle(builder, left, left, range(first, first + half)) for first in (0, half))
        left = _larger(builder, low, high)
    return builder.extract_element(left, INT(0))


@word(lambda a, b: a(a, b))
def exp2_of_difference(builder, a, b):
    """2**(a - b), by lanes, where a <= b: what numerics.exp2_of_negative does."""
    x = builder.fsub(a, b)
    integers = ir.VectorType(INT, x.type.count)
    tiny = builder.fcmp_ordered("<", x, same(x.type, EXP2_FLOOR))
    x = builder.select(tiny, same(x.type, EXP2_FLOOR), x)
    n = builder.fptosi(builder.fsub(x, same(x.type, 0.5)), integers)
    f = builder.fsub(x, builder.sitofp(n, x.type))
    power = same(x.type, EXP2_FIT[-1])
    for coefficient in EXP2_FIT[-2::-1]:
        power = builder.fadd(builder.fmul(power, f, flags=FUSE), same(x.type, coefficient), flags=FUSE)
    exponent = builder.shl(n, same(integers, 23))
    scaled = builder.bitcast(builder.add(builder.bitcast(power, integers), exponent), x.type)
    return builder.select(tiny, same(x.type, 0.0), scaled)


@intrinsic(prefer_literal=True)
def zeros(typing_context, count, lanes):
    """A tile of `count` vectors of zeros."""
    kind = Vector("float32", lanes.literal_value)

    def generate(context, builder, signature, arguments):
        return cgutils.pack_array(builder, [same(kind.llvm, 0.0)] * count.literal_value)

    return types.UniTuple(kind, count.literal_value)(count, lanes), generate


@intrinsic(prefer_literal=True)
def load_tile(typing_context, array, index, rows, width, lanes):
    """tile[r * width + w] = the vector at array[index], r rows further down and w vectors further right."""
    wide = lanes.literal_value
    shape = [(r, w) for r in range(rows.literal_value) for w in range(width.literal_value)]

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        places = (_moved(builder, at, r, wide * w) for r, w in shape)
        vectors = [_load(context, builder, array, arguments[0], place, wide) for place in places]
        return cgutils.pack_array(builder, vectors)

    tile = types.UniTuple(Vector("float32", wide), len(shape))
    return tile(array, index, rows, width, lanes), generate


@intrinsic(prefer_literal=True)
def store_tile(typing_context, array, index, rows, width, tile):
    """The reverse of load_tile, into a float32 array."""
    shape = [(r, w) for r in range(rows.literal_value) for w in range(width.literal_value)]
    kind = tile.dtype.llvm

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        for (r, w), vector in zip(shape, cgutils.unpack_tuple(builder, arguments[4])):
            place = _moved(builder, at, r, kind.count * w)
            builder.store(vector, _address(context, builder, array, arguments[0], place, kind), align=4)
        return context.get_dummy_value()

    return types.void(array, index, rows, width, tile), generate


@intrinsic(prefer_literal=True)
def spread_column(typing_context, array, index, rows, lanes):
    """tile[r] = `lanes` times the float of a float32 array that lies r rows below array[index]."""

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        vectors = []
        for r in range(rows.literal_value):
            pointer = _address(context, builder, array, arguments[0], _moved(builder, at, r, 0), FLOAT)
            vectors.append(spread_value(builder, builder.load(pointer), lanes.literal_value))
        return cgutils.pack_array(builder, vectors)

    tile = types.UniTuple(Vector("float32", lanes.literal_value), rows.literal_value)
    return tile(array, index, rows, lanes), generate


@word(lambda tile, rows, columns: tile(tile, rows, columns))
def add_products(builder, tile, rows, columns):
    """tile[r * width + w] += rows[r] * columns[w], all lanes: each loaded vector is used many times."""
    sums, left, right = (cgutils.unpack_tuple(builder, each) for each in (tile, rows, columns))
    products = [builder.fmul(a, b, flags=FUSE) for a in left for b in right]
    added = [builder.fadd(c, ab, flags=FUSE) for c, ab in zip(sums, products)]
    return cgutils.pack_array(builder, added)


@intrinsic(prefer_literal=True)
def store_totals(typing_context, array, index, rows, tile):
    """Four floats r rows below array[index] = the sums over the lanes of tile[4 * r] to tile[4 * r + 3]."""

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        vectors = cgutils.unpack_tuple(builder, arguments[3])
        for r in range(rows.literal_value):
            sums = sums_of_four(builder, vectors[4 * r : 4 * r + 4])
            place = _address(context, builder, array, arguments[0], _moved(builder, at, r, 0), sums.type)
            builder.store(sums, place, align=4)
        return context.get_dummy_value()

    return types.void(array, index, rows, tile), generate


@intrinsic
def prefetch(typing_context, array, index):
    """Ask for the cache line of array[index] to come to the second cache; nothing waits for it."""

    def generate(context, builder, signature, arguments):
        at = _position(context, builder, index, arguments[1])
        prefetch_pointer(builder, _address(context, builder, array, arguments[0], at, BYTE), 2)
        return context.get_dummy_value()

    return types.void(array, index), generate


def prefetch_pointer(builder: Any, pointer: Any, nearness: int) -> None:
    """nearness: 3 the first cache, 2 the second."""
    read, data = INT(0), INT(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, INT(nearness), data)
