"""Instructions that Numba does not offer: 16-byte moves, warp exchanges, cp.async, ldmatrix, mma.sync.

Imported by backend_cuda alone, where there is no simulator; backend_twins holds the same names for it. Each
is an intrinsic around one line of PTX (a device function would ask the driver which GPU to compile for).
Memory is an int64 address plus a byte offset. Shared memory is an array of complex128, the element of 16
bytes, aligned to CHUNK_ALIGNMENT, as cp.async and ldmatrix want; an index counts chunks of 16 bytes.
"""

# Device functions are typed by Numba.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.cuda.extending import intrinsic

from kernels_numba.intrinsics.words import word_maker

word = word_maker(intrinsic)

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS2, WORDS4, FLOATS4, FLOATS2 = (
    types.UniTuple(types.uint32, 2),
    types.UniTuple(types.uint32, 4),
    types.UniTuple(types.float32, 4),
    types.UniTuple(types.float32, 2),
)
FULL_WARP = 0xFFFFFFFF


def _assembly(
    builder,
    line: str,
    result: Any,
    constraints: str,
    arguments: list,
    *,
    fixed: bool = True,
    together: bool = False,
):
    """One line of PTX as an LLVM call. fixed: it touches memory or other lanes and must stay in its order.
    together: the lanes of a warp execute it as one, so it may not be moved into a branch or copied into two.
    """
    kind = ir.FunctionType(result, [a.type for a in arguments])
    code = ir.InlineAsm(kind, line, constraints, side_effect=fixed)
    return builder.call(code, arguments, attrs=("convergent",) if together else ())


def _shared_address(context, builder, array_type, array, index):
    """The 32-bit address within shared memory of chunk `index`, 32 bits too."""
    data = context.make_array(array_type)(context, builder, array).data
    start = builder.ptrtoint(builder.addrspacecast(data, ir.IntType(8).as_pointer(3)), I32)
    return builder.add(start, builder.shl(index, I32(4)))


def _as_tuple(builder, count: int, struct):
    """The fields of a PTX instruction's result as a Numba tuple."""
    return cgutils.pack_array(builder, [builder.extract_value(struct, i) for i in range(count)])


def _fields(count: int, kind: Any) -> Any:
    return ir.LiteralStructType([kind] * count)


def _wide_loader(name: str, kind: Any, line: str):
    """A load of several words from aligned global memory at address + byte offset."""

    @word(kind(types.int64, types.int64), name)
    def load(builder, base, offset):
        constraints, fields = "=r," * kind.count + "l", _fields(kind.count, I32)
        loaded = _assembly(builder, line, fields, constraints, [builder.add(base, offset)])
        return _as_tuple(builder, kind.count, loaded)

    return load


def _wide_storer(name: str, kind: Any, line: str):
    """A store of several words to aligned global memory at address + byte offset."""

    @word(types.void(types.int64, types.int64, kind), name)
    def store(builder, base, offset, words):
        parts = [builder.extract_value(words, i) for i in range(kind.count)]
        constraints = "l" + ",r" * kind.count
        _assembly(builder, line, ir.VoidType(), constraints, [builder.add(base, offset), *parts])

    return store


load8 = _wide_loader("load8", WORDS2, "ld.global.v2.u32 {$0, $1}, [$2];")
load16 = _wide_loader("load16", WORDS4, "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];")
store8 = _wide_storer("store8", WORDS2, "st.global.v2.u32 [$0], {$1, $2};")
store16 = _wide_storer("store16", WORDS4, "st.global.v4.u32 [$0], {$1, $2, $3, $4};")


def _loader(name: str, result, line: str, kind: Any, constraint: str):
    """A load of one number from global memory at address + byte offset."""

    @word(result(types.int64, types.int64), name)
    def load(builder, base, offset):
        return _assembly(builder, line, kind, f"={constraint},l", [builder.add(base, offset)])

    return load


def _storer(name: str, value_type, line: str, constraint: str):
    """A store of one number to global memory at address + byte offset."""

    @word(types.void(types.int64, types.int64, value_type), name)
    def store(builder, base, offset, value):
        _assembly(builder, line, ir.VoidType(), f"l,{constraint}", [builder.add(base, offset), value])

    return store


load_int32 = _loader("load_int32", types.int32, "ld.global.s32 $0, [$1];", I32, "r")
load_int64 = _loader("load_int64", types.int64, "ld.global.s64 $0, [$1];", I64, "l")
load_word = _loader("load_word", types.uint32, "ld.global.u32 $0, [$1];", I32, "r")
load_uint16 = _loader("load_uint16", types.uint32, "ld.global.u16 $0, [$1];", I32, "r")
load_float = _loader("load_float", types.float32, "ld.global.f32 $0, [$1];", F32, "f")
store_word = _storer("store_word", types.uint32, "st.global.u32 [$0], $1;", "r")
store_uint16 = _storer("store_uint16", types.uint32, "st.global.u16 [$0], $1;", "r")
store_float = _storer("store_float", types.float32, "st.global.f32 [$0], $1;", "f")
_NARROWED = "{{ .reg .b16 %half; cvt.rn.{0}.f32 %half, $1; st.global.b16 [$0], %half; }}"
store_bfloat16 = _storer("store_bfloat16", types.float32, _NARROWED.format("bf16"), "f")
store_float16 = _storer("store_float16", types.float32, _NARROWED.format("f16"), "f")


@word(types.int32(types.int32, types.int32))
def divide(builder, dividend, divisor):
    """dividend // divisor of numbers from 0 to 2**31 - 1, in 32 bits: a quarter of the work of 64."""
    return builder.udiv(dividend, divisor)


@word(types.float32(types.float32))
def exp2(builder, power):
    """2 ** power in float32, the hardware's approximation (relative error 2**-22); 0 below -126."""
    return _assembly(builder, "ex2.approx.ftz.f32 $0, $1;", F32, "=f,f", [power], fixed=False)


@word(types.UniTuple(types.float32, 1)(types.uint32))
def float32_single(builder, word):
    """The float32 of a word, as a tuple of one: the twin of the 16-bit pairs."""
    return cgutils.pack_array(builder, [builder.bitcast(word, F32)])


@word(FLOATS2(types.uint32))
def bfloat16_pair(builder, word):
    """Two float32 from the two bfloat16 of a word, the lower half first."""
    halves = builder.shl(word, I32(16)), builder.and_(word, I32(0xFFFF0000))
    return cgutils.pack_array(builder, [builder.bitcast(half, F32) for half in halves])


@word(FLOATS2(types.uint32))
def float16_pair(builder, word):
    """Two float32 from the two float16 of a word, the lower half first."""
    halves = [builder.trunc(w, ir.IntType(16)) for w in (word, builder.lshr(word, I32(16)))]
    floats = [builder.fpext(builder.bitcast(half, ir.HalfType()), F32) for half in halves]
    return cgutils.pack_array(builder, floats)


def _packer(name: str, line: str):
    """Two float32 to one word of 16-bit floats, rounded to the nearest even, the first in the lower half."""

    @word(types.uint32(types.float32, types.float32), name)
    def pack(builder, low, high):
        return _assembly(builder, line, I32, "=r,f,f", [low, high], fixed=False)

    return pack


pack_bfloat16 = _packer("pack_bfloat16", "cvt.rn.bf16x2.f32 $0, $2, $1;")
pack_float16 = _packer("pack_float16", "cvt.rn.f16x2.f32 $0, $2, $1;")


def _shuffle(builder, value, mode: str, lane):
    """One exchange of 32 bits within the warp."""
    is_float = isinstance(value.type, ir.FloatType)
    bits = builder.bitcast(value, I32) if is_float else value
    line = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, {FULL_WARP};"
    moved = _assembly(builder, line, I32, "=r,r,r", [bits, lane], together=True)
    return builder.bitcast(moved, F32) if is_float else moved


@word(lambda value, lane: value(value, types.int32))
def broadcast(builder, value, lane):
    """The 32-bit `value` that `lane` of the warp has; each lane may ask for another. All lanes must call."""
    return _shuffle(builder, value, "idx", lane)


def _reducer(name: str, combine):
    """A butterfly over runs of `lanes` neighbours, a power of two known when the kernel is compiled."""

    def typed(typing_context, value, lanes):
        if not isinstance(lanes, types.IntegerLiteral):
            return None

        def generate(context, builder, signature, arguments):
            total, distance = arguments[0], lanes.literal_value // 2
            while distance:
                total = combine(builder, total, _shuffle(builder, total, "bfly", I32(distance)))
                distance //= 2
            return total

        return types.float32(types.float32, lanes), generate

    typed.__name__ = name
    return intrinsic(typed)


def _larger(builder, a, b):
    return _assembly(builder, "max.f32 $0, $1, $2;", F32, "=f,f,f", [a, b], fixed=False)


warp_sum = _reducer("warp_sum", lambda builder, a, b: builder.fadd(a, b))
"""Sum over `lanes` neighbouring lanes, given to each of them."""
warp_max = _reducer("warp_max", _larger)
"""Maximum over `lanes` neighbouring lanes, given to each of them."""


def _binary(name: str, instruction: str):
    """A float32 of two, in one instruction: nothing that the compiler may fuse with its neighbours."""

    @word(types.float32(types.float32, types.float32), name)
    def combine(builder, a, b):
        return _assembly(builder, f"{instruction} $0, $1, $2;", F32, "=f,f,f", [a, b], fixed=False)

    return combine


larger = _binary("larger", "max.f32")
"""max of two float32 (Python's max asks about NaN first)."""
times, plus = _binary("times", "mul.rn.f32"), _binary("plus", "add.rn.f32")
"""Rounded by themselves: a * b + c is one rounding where the compiler makes it so, and other bits."""
quotient = _binary("quotient", "div.rn.f32")


@word(types.float32(types.float32, types.float32, types.float32))
def fused(builder, a, b, c):
    """a * b + c in float32, rounded once."""
    return _assembly(builder, "fma.rn.f32 $0, $1, $2, $3;", F32, "=f,f,f,f", [a, b, c], fixed=False)


@word(types.uint32(types.float32))
def as_bits(builder, value):
    """The bits of a float32, as uint32."""
    return builder.bitcast(value, I32)


@word(types.float32(types.uint32))
def as_float(builder, bits):
    """The float32 whose bits are the uint32 `bits`."""
    return builder.bitcast(bits, F32)


@intrinsic
def copy_async(typing_context, target, chunk, base, offset, bytes_there):
    """16 bytes from global memory to chunk `chunk` of shared memory, some time before copy_wait returns;
    bytes_there 0 reads nothing and writes zeros."""

    def generate(context, builder, signature, arguments):
        array, chunk, base, offset, count = arguments
        to = _shared_address(context, builder, target, array, chunk)
        line = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        places = [to, builder.add(base, offset), count]
        _assembly(builder, line, ir.VoidType(), "r,l,r,~{memory}", places)
        return context.get_dummy_value()

    return types.void(target, types.int32, types.int64, types.int64, types.int32), generate


@word(types.void())
def copy_commit(builder):
    """Ends a group of copy_async."""
    _assembly(builder, "cp.async.commit_group;", ir.VoidType(), "~{memory}", [])


@intrinsic
def copy_wait(typing_context, pending):
    """Waits until at most `pending` (a constant) of this thread's newest groups are still on their way."""
    if not isinstance(pending, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, arguments):
        line = f"cp.async.wait_group {pending.literal_value};"
        _assembly(builder, line, ir.VoidType(), "~{memory}", [])
        return context.get_dummy_value()

    return types.void(pending), generate


def _matrix_loader(name: str, suffix: str):
    """Four 8x8 matrices of 16-bit numbers: lane i names the chunk that is row i % 8 of matrix i // 8."""

    def typed(typing_context, source, chunk):
        def generate(context, builder, signature, arguments):
            at = _shared_address(context, builder, source, *arguments)
            line = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
            constraints = "=r,=r,=r,=r,r,~{memory}"
            loaded = _assembly(builder, line, _fields(4, I32), constraints, [at], together=True)
            return _as_tuple(builder, 4, loaded)

        return WORDS4(source, types.int32), generate

    typed.__name__ = name
    return intrinsic(typed)


load_matrices = _matrix_loader("load_matrices", "")
"""Word j of lane i: numbers 2 (i % 4) and the next of row i // 4 of matrix j."""
load_transposed = _matrix_loader("load_transposed", ".trans")
"""The same of the transposed matrices."""


def _multiplier(name: str, element: str):
    """sums + A @ B: A (16, 16) as four words a lane, B (16, 8) as two, sums (16, 8) as four float32.

    Lane i, q = i // 4, c = 2 (i % 4). A: rows q, q + 8 at columns c, c + 1, then both at c + 8, c + 9.
    B: rows c, c + 1 of column q, then rows c + 8, c + 9. Sums: row q at columns c, c + 1, then row q + 8.
    """

    @word(FLOATS4(FLOATS4, *[types.uint32] * 6), name)
    def multiply(builder, sums, a0, a1, a2, a3, b0, b1):
        before = [builder.extract_value(sums, i) for i in range(4)]
        line = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
        factors = [a0, a1, a2, a3, b0, b1, *before]
        after = _assembly(builder, line, _fields(4, F32), constraints, factors, fixed=False, together=True)
        return _as_tuple(builder, 4, after)

    return multiply


mma_bfloat16 = _multiplier("mma_bfloat16", "bf16")
mma_float16 = _multiplier("mma_float16", "f16")
