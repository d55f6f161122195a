"""Vectors of bytes and of int32: exact dot products of small numbers, and numbers cut into bytes.

Called inside @njit kernels only, by address, and only where the processor has the instruction for them
(WIDTH_BYTES is not 0): an int32 plus four products of an unsigned and a signed byte. Used by
linear_tiles_fixed.py, which explains what for.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernels_numba.intrinsics.numerics import word
from kernels_numba.intrinsics.vectors import (
    BYTE,
    FLOAT,
    HALF,
    INT,
    LONG,
    Vector,
    call,
    load_value,
    processor_has,
    same,
    shuffle,
    spread_value,
    store_value,
)

from llvmlite import ir  # isort: skip
from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip


def _width() -> int:
    if processor_has("avx512bw", "avx512vl", "avx512vnni"):
        return 64
    return 32 if processor_has("avx2", "f16c", "avxvnni") else 0


WIDTH_BYTES = _width()
"""Bytes of a vector; 0 where the processor has no such instruction."""
SIZE = WIDTH_BYTES or 32
LANES = SIZE // 4
"""Numbers of four bytes in a vector."""
PAIR_BLOCKS = SIZE // 16
"""Blocks of 32 values in a pair of vectors of bytes."""

codes = Vector("uint8", SIZE)
integers = Vector("int32", LANES)
floats = Vector("float32", LANES)
_WORD = ir.IntType(16)


def _joined(builder: Any, parts: Sequence[Any]) -> Any:
    """Short vectors, one behind the other."""
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        parts = [shuffle(builder, a, b, lanes) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def pair_of_nibbles(step: int) -> Any:
    """A word for PAIR_BLOCKS blocks of 16 bytes, `step` bytes apart: the low halves, and the high halves."""

    @word(types.UniTuple(codes, 2)(types.int64))
    def load(builder, address):
        piece = ir.VectorType(BYTE, 16)
        pieces = [load_value(builder, address, piece, i * step) for i in range(PAIR_BLOCKS)]
        pairs = _joined(builder, pieces)
        halves = builder.and_(pairs, same(codes.llvm, 15)), builder.lshr(pairs, same(codes.llvm, 4))
        return cgutils.pack_array(builder, halves)

    return load


def pair_of_bytes(step: int) -> Any:
    """A word for PAIR_BLOCKS blocks of 32 signed bytes, `step` bytes apart: two vectors of them, plus 128.

    Eight bytes of a block by turns with eight of one further behind: so both vectors hold the same block in
    the same lane of four bytes, and what belongs to a block can be added.
    """

    @word(types.UniTuple(codes, 2)(types.int64))
    def load(builder, address):
        piece, count = ir.VectorType(BYTE, 32), SIZE // 32
        pieces = [load_value(builder, address, piece, i * step) for i in range(2 * count)]
        words = ir.VectorType(LONG, SIZE // 8)
        halves = (_joined(builder, part) for part in (pieces[:count], pieces[count:]))
        a, b = (builder.bitcast(half, words) for half in halves)
        results = []
        for which in (0, 1):
            lanes = [lane + which for j in range(0, words.count, 2) for lane in (j, j + words.count)]
            both = builder.bitcast(shuffle(builder, a, b, lanes), codes.llvm)
            results.append(builder.xor(both, same(codes.llvm, 128)))
        return cgutils.pack_array(builder, results)

    return load


NIBBLE_BLOCKS = [lane // 4 for lane in range(LANES)]
"""Which block of a pair of nibbles lies in a lane of four bytes."""
BYTE_BLOCKS = [lane // 8 + PAIR_BLOCKS // 2 * (lane % 4 // 2) for lane in range(LANES)]
"""The same of a pair of bytes."""


def spread_over(blocks: Sequence[int]) -> Any:
    """A word for floats in a row, one a block: number blocks[i] of them in lane i."""

    @word(floats(types.int64))
    def load(builder, address):
        few = load_value(builder, address, ir.VectorType(FLOAT, max(blocks) + 1))
        return shuffle(builder, few, few, blocks)

    return load


def scales(step: int, count: int) -> Any:
    """A word for `count` neighbouring float16 of LANES blocks, `step` bytes apart: vectors of float32."""

    @word(types.UniTuple(floats, count)(types.int64))
    def load(builder, address):
        words = (_sorted_words if SIZE == 64 else _single_words)(builder, address, step, count)
        results = []
        for i in range(count):
            part = shuffle(builder, words, words, range(LANES * i, LANES * (i + 1)))
            halves = builder.bitcast(part, ir.VectorType(HALF, LANES))
            results.append(builder.fpext(halves, floats.llvm))
        return cgutils.pack_array(builder, results)

    return load


def _sorted_words(builder: Any, address: Any, step: int, count: int) -> Any:
    """32 words: the first of each block, then the second of each if there is one.

    Whole vectors are loaded, and each puts its words where they belong; no load goes past the last of them.
    """
    kind = ir.VectorType(_WORD, 32)
    places = [step * lane // 2 + i for i in range(count) for lane in range(LANES)]
    end = max(places) + 1
    words = same(kind, 0)
    for first in range(0, end, 32):
        start = min(first, end - 32)
        here = [int(first <= place < first + 32) for place in places] + [0] * (32 - len(places))
        index = [place - start if wanted else 0 for place, wanted in zip(places + [0] * 32, here)]
        loaded = load_value(builder, address, kind, 2 * start)
        moved = call(builder, "llvm.x86.avx512.permvar.hi.512", kind, loaded, ir.Constant(kind, index))
        mask = ir.Constant(ir.VectorType(ir.IntType(1), 32), here)
        words = builder.select(mask, moved, words)
    return words


def _single_words(builder: Any, address: Any, step: int, count: int) -> Any:
    """The same, one after the other."""
    words = ir.Constant(ir.VectorType(_WORD, LANES * count), ir.Undefined)
    for i in range(LANES * count):
        word = load_value(builder, address, _WORD, step * (i % LANES) + 2 * (i // LANES))
        words = builder.insert_element(words, word, INT(i))
    return words


def _loading(kind: Vector) -> Any:
    @word(kind(types.int64))
    def load(builder, address):
        return load_value(builder, address, kind.llvm)

    return load


load_codes, load_integers, load_floats = _loading(codes), _loading(integers), _loading(floats)


@word(lambda address, vector: types.void(types.int64, vector))
def put_at(builder, address, vector):
    """Store a vector of any kind to a byte address."""
    store_value(builder, address, vector)


def _add_dots(builder: Any, totals: Any, unsigned: Any, signed: Any) -> Any:
    # Its bytes are declared as int32: older LLVMs know no other form, newer ones translate it.
    factors = [builder.bitcast(factor, integers.llvm) for factor in (unsigned, signed)]
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{8 * SIZE}", integers.llvm, totals, *factors)


@word(integers(integers, codes, codes))
def add_dots(builder, totals, unsigned, signed):
    """totals + the sum of four products of bytes, in each lane."""
    return _add_dots(builder, totals, unsigned, signed)


@word(lambda high, middle, low: types.UniTuple(integers, 2)(high, middle, low))
def corrections(builder, high, middle, low):
    """-128 times the sums of three pairs of limbs in a lane, as (upper, last): 65536 * upper + last.

    `upper` takes all of `middle` but a remainder, so that neither grows by more than what it corrects.
    """
    nothing, bytes_of_128 = same(integers.llvm, 0), same(codes.llvm, 128)
    less = []
    for pair in (high, middle, low):
        a, b = cgutils.unpack_tuple(builder, pair)
        less.append(_add_dots(builder, _add_dots(builder, nothing, bytes_of_128, a), bytes_of_128, b))
    of_high, of_middle, of_low = (builder.sub(nothing, each) for each in less)
    eight, mask = same(integers.llvm, 8), same(integers.llvm, 255)
    upper = builder.add(of_high, builder.ashr(of_middle, eight))
    last = builder.add(of_low, builder.shl(builder.and_(of_middle, mask), eight))
    return cgutils.pack_array(builder, [upper, last])


@word(integers())
def no_integers(builder):
    """Zeros."""
    return same(integers.llvm, 0)


@word(integers(integers))
def times_256(builder, a):
    """int32 * 256, in each lane."""
    return builder.shl(a, same(integers.llvm, 8))


@word(floats(integers))
def as_floats(builder, a):
    """The nearest float32 of each int32."""
    return builder.sitofp(a, floats.llvm)


@word(floats(floats, integers))
def where(builder, a, mask):
    """Floats in the lanes whose mask is all ones, 0 in the others whatever `a` holds there."""
    bits = builder.and_(builder.bitcast(a, integers.llvm), mask)
    return builder.bitcast(bits, floats.llvm)


@word(types.int64(types.int64))
def largest_bits(builder, address):
    """The bits of the largest |x| of 32 float32, int64: an infinity's or more if one is not finite."""
    most = same(integers.llvm, 0)
    for first in range(0, 32, LANES):
        bits = load_value(builder, address, integers.llvm, 4 * first)
        bits = builder.and_(bits, same(integers.llvm, 0x7FFFFFFF))
        most = builder.select(builder.icmp_signed(">", bits, most), bits, most)
    return builder.zext(call(builder, f"llvm.vector.reduce.smax.v{LANES}i32", INT, most), LONG)


@word(types.int64(types.int64, types.float32, types.int64))
def put_limbs(builder, address, factor, limbs):
    """32 float32 times the factor, as integers of three signed bytes; returns their sum, int64.

    address   of the first
    limbs     address for 96 bytes: the 32 highest, the 32 in the middle, the 32 lowest
    """
    eight, above = same(integers.llvm, 8), same(integers.llvm, 24)
    factors = spread_value(builder, factor, LANES)
    total = same(integers.llvm, 0)
    for at in range(0, 32, LANES):
        scaled = builder.fmul(load_value(builder, address, floats.llvm, 4 * at), factors)
        whole = call(builder, f"llvm.rint.v{LANES}f32", floats.llvm, scaled)
        number = builder.fptosi(whole, integers.llvm)
        total = builder.add(total, number)
        for limb in (2, 1, 0):
            low = builder.ashr(builder.shl(number, above), above)
            low_bytes = builder.trunc(low, ir.VectorType(BYTE, LANES))
            store_value(builder, limbs, low_bytes, 32 * limb + at)
            number = builder.ashr(builder.sub(number, low), eight)
    return builder.sext(call(builder, f"llvm.vector.reduce.add.v{LANES}i32", INT, total), LONG)
