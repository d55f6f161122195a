"""Vectors held in registers: the words of loops that the compiler does not vectorise well.

Called inside @njit kernels only, and the base of linear_vectors.py, register_blocks.py and vectors_codes.py.
Tuples of vectors are *tiles*: small matrices whose entries are vectors, as many as fit into registers. All is
unrolled, so a count is a constant; LLVM picks the instructions. Explained in docs/explain/paged-attention.md.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, attr-defined"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernels_numba.intrinsics.numerics import (  # first: it sets up Numba's cache folder
    EXP2_FIT,
    EXP2_FLOOR,
    word,
)

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where an element of an array lies. position: its index, integers of the machine's width."""

    context: Any
    builder: Any
    array_type: Any
    array: Any
    position: list[Any]

    def pointer(self, kind: Any, rows: int = 0, columns: int = 0) -> Any:
        """Pointer to a `kind` that begins so many rows and columns further on."""
        at = self.position
        if rows or columns:
            *front, row, column = at
            at = [*front, self.builder.add(row, LONG(rows)), self.builder.add(column, LONG(columns))]
        view = self.context.make_array(self.array_type)(self.context, self.builder, self.array)
        pointer = cgutils.get_item_pointer(
            self.context, self.builder, self.array_type, view, at, wraparound=False
        )
        return self.builder.bitcast(pointer, kind.as_pointer())

    def vector(self, lanes: int, rows: int = 0, columns: int = 0) -> Any:
        """Elements from there on, widened to float32 (int16 and uint16 as in numerics.widen)."""
        builder, dtype = self.builder, self.array_type.dtype

        def elements(kind: Any, align: int) -> Any:
            return builder.load(self.pointer(ir.VectorType(kind, lanes), rows, columns), align=align)

        floats, integers = ir.VectorType(FLOAT, lanes), ir.VectorType(INT, lanes)
        if dtype == types.float32:
            return elements(FLOAT, 4)
        if dtype == types.int16:
            return builder.fpext(elements(HALF, 2), floats)
        wide = builder.zext(elements(ir.IntType(16), 2), integers)
        return builder.bitcast(builder.shl(wide, same(integers, 16)), floats)


def placed_word(result: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a word whose first arguments are an array and an index: an integer, or a tuple of them; none
    negative. It is made of a function of LLVM's builder, the Place of that element, and the other arguments,
    of which a constant is an int.

    result   the type of its value, from the types of the other arguments and from the constants
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typed(typing_context: Any, array: Any, index: Any, *given: Any) -> Any:
            known = [getattr(kind, "literal_value", kind) for kind in given]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                several = isinstance(index, types.BaseTuple)
                integers = cgutils.unpack_tuple(builder, values[1]) if several else [values[1]]
                kinds = index.types if several else [index]
                position = [context.cast(builder, *each, types.intp) for each in zip(integers, kinds)]
                place = Place(context, builder, array, values[0], position)
                others = [one if isinstance(one, int) else value for one, value in zip(known, values[2:])]
                value = emit(builder, place, *others)
                return context.get_dummy_value() if value is None else value

            return result(*known)(array, index, *given), generate

        own = list(inspect.signature(typed, follow_wrapped=False).parameters.values())[:3]
        others = list(inspect.signature(emit).parameters.values())[2:]
        typed.__signature__ = inspect.Signature([*own, *others])
        return intrinsic(prefer_literal=True)(typed)

    return decorate


@placed_word(lambda lanes: Vector("float32", lanes))
def load(builder, place, lanes):
    """The vector of `lanes` elements from array[index] on, as float32."""
    return place.vector(lanes)


@placed_word(lambda vector: types.void)
def put(builder, place, vector):
    """The reverse of load, into a float32 array."""
    builder.store(vector, place.pointer(vector.type), align=4)


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


@placed_word(lambda rows, width, lanes: types.UniTuple(Vector("float32", lanes), rows * width))
def load_tile(builder, place, rows, width, lanes):
    """tile[r * width + w] = the vector at array[index], r rows further down and w vectors further right."""
    vectors = [place.vector(lanes, r, lanes * w) for r in range(rows) for w in range(width)]
    return cgutils.pack_array(builder, vectors)


@placed_word(lambda rows, width, tile: types.void)
def store_tile(builder, place, rows, width, tile):
    """The reverse of load_tile, into a float32 array."""
    for number, vector in enumerate(cgutils.unpack_tuple(builder, tile)):
        r, w = divmod(number, width)
        builder.store(vector, place.pointer(vector.type, r, vector.type.count * w), align=4)


@placed_word(lambda rows, lanes: types.UniTuple(Vector("float32", lanes), rows))
def spread_column(builder, place, rows, lanes):
    """tile[r] = `lanes` times the float of a float32 array that lies r rows below array[index]."""
    vectors = [spread_value(builder, builder.load(place.pointer(FLOAT, r)), lanes) for r in range(rows)]
    return cgutils.pack_array(builder, vectors)


@word(lambda tile, rows, columns: tile(tile, rows, columns))
def add_products(builder, tile, rows, columns):
    """tile[r * width + w] += rows[r] * columns[w], all lanes: each loaded vector is used many times."""
    sums, left, right = (cgutils.unpack_tuple(builder, each) for each in (tile, rows, columns))
    products = [builder.fmul(a, b, flags=FUSE) for a in left for b in right]
    added = [builder.fadd(c, ab, flags=FUSE) for c, ab in zip(sums, products)]
    return cgutils.pack_array(builder, added)


@placed_word(lambda rows, tile: types.void)
def store_totals(builder, place, rows, tile):
    """Four floats r rows below array[index] = the sums over the lanes of tile[4 * r] to tile[4 * r + 3]."""
    vectors = cgutils.unpack_tuple(builder, tile)
    for r in range(rows):
        sums = sums_of_four(builder, vectors[4 * r : 4 * r + 4])
        builder.store(sums, place.pointer(sums.type, r), align=4)


@placed_word(lambda: types.void)
def prefetch(builder, place):
    """Ask for the cache line of array[index] to come to the second cache; nothing waits for it."""
    prefetch_pointer(builder, place.pointer(BYTE), 2)


def prefetch_pointer(builder: Any, pointer: Any, nearness: int) -> None:
    """nearness: 3 the first cache, 2 the second."""
    read, data = INT(0), INT(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, INT(nearness), data)
