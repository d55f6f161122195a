"""The CUDA kernels in Numba's simulator, against float64 oracles: run as a program by test_cuda.py.

A process of its own, because Numba chooses between simulator and compiler when it is imported
(NUMBA_ENABLE_CUDASIM=1). Needs NumPy and Numba only. Prints one line a check; ends with an exit code.

Stricter than the simulator itself: see simulator_blocks; the twins of backend_twins check addresses and copy
asynchronously as late as they may.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import kernels_numba
from kernels_numba.attention import attention_cuda, attention_decode_cuda, attention_mma_cuda
from kernels_numba.checks import NO_WINDOW
from kernels_numba.codecs import codec
from kernels_numba.errors import ArgumentError, KindError
from kernels_numba.gpu import simulator_blocks
from kernels_numba.gpu.backend_cuda import SIMULATED, cuda
from kernels_numba.movers import block_kernels_cuda, codec_kernels_cuda
from kernels_numba.movers.block_kernels import gather_blocks_v0

RANDOM = np.random.default_rng(0)
PIECE = 32
"""Tokens of a piece here instead of MIN_PIECE, so that short contexts have several."""


class Case:
    """Ragged sequences in shuffled, poisoned pages, in the element type's bits, and what they must give."""

    def __init__(
        self,
        dtype: str,
        group: int,
        head_dim: int,
        lens: tuple[int, ...] = (11, 5),
        new: tuple[int, ...] = (3, 2),
        *,
        window: int = NO_WINDOW,
        kv_heads: int = 1,
        page_size: int = 8,
    ):
        self.dtype, self.window, self.scale = dtype, window, 0.25
        needed = [-(-n // page_size) for n in lens]
        pages = sum(needed) + 2
        order = iter(RANDOM.permutation(pages))
        caches = np.full((2, pages, kv_heads, page_size, head_dim), np.nan, np.float32)
        self.tables = np.full((len(lens), max(needed) + 1), 2**31 - 1, np.int32)
        query = self.rounded((sum(new), kv_heads * group, head_dim))
        self.want = np.zeros(query.shape)
        row = 0
        for b, (tokens, fresh) in enumerate(zip(lens, new)):
            keys, values = self.rounded((2, tokens, kv_heads, head_dim))
            for i in range(needed[b]):
                page = self.tables[b, i] = next(order)
                span = slice(i * page_size, min(tokens, (i + 1) * page_size))
                for cache, rows in zip(caches, (keys, values)):
                    cache[page, :, : span.stop - span.start] = rows[span].swapaxes(0, 1)
            for i in range(fresh):
                last = tokens - fresh + i + 1
                seen = slice(max(0, last - window), last)
                for head in range(kv_heads * group):
                    scores = keys[seen, head // group].astype(float) @ query[row + i, head] * self.scale
                    weights = np.exp(scores - scores.max())
                    self.want[row + i, head] = weights @ values[seen, head // group] / weights.sum()
            first_seen = max(0, tokens - fresh + 1 - window) // page_size
            self.tables[b, :first_seen] = -1  # pages before every window are never looked up
            row += fresh
        self.query, self.caches = self.as_elements(query), self.as_elements(caches)
        self.new, self.lens = np.array(new, np.int32), np.array(lens, np.int32)

    def rounded(self, shape: tuple[int, ...]) -> np.ndarray:
        """Random numbers that the element type holds exactly."""
        array = RANDOM.standard_normal(shape, dtype=np.float32)
        if self.dtype == "bfloat16":
            return (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return array.astype(np.float16).astype(np.float32) if self.dtype == "float16" else array

    def as_elements(self, array: np.ndarray) -> np.ndarray:
        if self.dtype == "bfloat16":
            return (array.view(np.uint32) >> 16).astype(np.uint16)
        return array.astype(self.dtype)

    def inputs(self) -> list:
        return device(self.query, self.caches[0], self.caches[1], self.tables)

    def check(self, out: Any, want: np.ndarray | None = None) -> None:
        found = out.copy_to_host()
        if self.dtype == "bfloat16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        error = np.abs(found - (self.want if want is None else want)).max()
        # outputs reach 4: half a unit of their last place is 2**-7 for bfloat16, and on tensor cores the
        # weights are rounded too, by 2**-9 of them
        assert error < {"float32": 1e-5, "float16": 2**-9, "bfloat16": 2**-6}[self.dtype], error


def device(*arrays: np.ndarray) -> list:
    return [cuda.to_device(array) for array in arrays]


def poison(case: Case, like: np.ndarray) -> Any:
    """An output full of NaN."""
    return device(np.full_like(like, 0x7FFF if case.dtype == "bfloat16" else np.nan))[0]


def check_public(dtype: str, group: int, head_dim: int) -> None:
    """Both functions, on what they choose for these arrays."""
    case = Case(dtype, group, head_dim)
    inputs, lens = case.inputs(), device(case.lens)
    out = kernels_numba.paged_attention_prefill(*inputs, *device(case.new), *lens, scale=case.scale)
    case.check(out)
    last = np.cumsum(case.new) - 1
    decoded = kernels_numba.paged_attention_decode(
        *device(case.query[last]), *inputs[1:], *lens, scale=case.scale
    )
    case.check(decoded, case.want[last])


def check_rung(launch: Any, case: Case, **options: Any) -> None:
    """One rung of prefill."""
    out = poison(case, case.query)
    launch(*case.inputs(), *device(case.new, case.lens), case.scale, out, case.window, **options)
    case.check(out)


def check_decode(case: Case, **options: Any) -> None:
    """One rung of decode, contexts in pieces."""
    out = poison(case, case.query)
    attention_decode_cuda.launch_split(
        *case.inputs(), *device(case.lens), case.scale, out, case.window, **options
    )
    case.check(out)


def check_that_more_pieces_than_a_warp_has_lanes_are_merged() -> None:
    on_two, attention_decode_cuda.multiprocessors = attention_decode_cuda.multiprocessors, lambda like: 48
    try:
        check_decode(Case("float32", 1, 40, (33 * PIECE + 5,), (1,)))
    finally:
        attention_decode_cuda.multiprocessors = on_two


def cases_of_all_rungs(new: int) -> list[tuple[Callable[..., None], Case]]:
    """Two sequences for each rung; for prefill, with so many new tokens in the first."""
    return [
        (attention_decode_cuda.launch_split, Case("float32", 2, 8, (40, 5), (1, 1))),
        (attention_decode_cuda.launch_split, Case("bfloat16", 2, 64, (40, 5), (1, 1))),
        (attention_cuda.launch_plain, Case("float32", 1, 8, (5, 3), (1, 1))),
        (attention_cuda.launch_shared, Case("float32", 1, 8, (9, 3), (1, 1))),
        (attention_cuda.launch_tiled, Case("float32", 1, 8, (9, 3), (1, 1))),
        (attention_cuda.launch_prefill, Case("float16", 1, 64, (9, 3), (new, 1))),
    ]


def launched(launch: Callable[..., None], case: Case) -> np.ndarray:
    """What a rung gives for a case."""
    new = [] if launch is attention_decode_cuda.launch_split else device(case.new)
    out = poison(case, case.query)
    launch(*case.inputs(), *new, *device(case.lens), case.scale, out)
    found = out.copy_to_host()
    return (found.astype(np.uint32) << 16).view(np.float32) if case.dtype == "bfloat16" else found


def check_that_a_key_that_is_no_number_is_seen() -> None:
    """By every rung, in the sequence that holds it and no other."""
    for launch, case in cases_of_all_rungs(new=1):
        nan = 0x7FC0 if case.dtype == "bfloat16" else np.nan
        case.caches[0][case.tables[0, 0], 0, 1, 3] = nan
        found = launched(launch, case)
        assert np.isnan(found[0]).all(), launch
        assert np.abs(found[1] - case.want[1]).max() < 2**-6, launch


def check_that_scores_of_only_minus_infinity_give_nan() -> None:
    """By every rung, as on the CPU: in the sequence whose every key does so, and in no other."""
    for launch, case in cases_of_all_rungs(new=2):
        one = 0x3F80 if case.dtype == "bfloat16" else 1
        case.query[: case.new[0], :, 3] = one
        for t in range(case.lens[0]):
            lowest = 0xFF80 if case.dtype == "bfloat16" else -np.inf
            case.caches[0][case.tables[0, t // 8], 0, t % 8, 3] = lowest
        found = launched(launch, case)
        assert np.isnan(found[: case.new[0]]).all(), launch
        assert np.abs(found[-1] - case.want[-1]).max() < 2**-6, launch


def check_an_empty_sequence_decodes_to_zeros() -> None:
    case = Case("float32", 1, 8, (11, 5), (1, 1))
    case.lens[1] = 0
    out = kernels_numba.paged_attention_decode(*case.inputs(), *device(case.lens), scale=0.25)
    assert not out.copy_to_host()[1].any()
    assert out.copy_to_host()[0].any()


def check_blocks(dtype: type, head_dim: int) -> None:
    """Gather and scatter of a range of layers and heads, blocks at a distance, a page left out."""
    caches = RANDOM.integers(0, 60000, (2, 2, 5, 3, 4, head_dim)).astype(dtype)
    ids = np.array([[3, 1], [0, -1]], np.int32)
    want = gather_blocks_v0(caches, ids, slice(1, 2), slice(1, 3))
    pages, table, spaced = device(caches, ids, np.full((4, *want.shape[1:]), 7, dtype))
    out = spaced[::2]
    kernels_numba.gather_blocks(pages, table, out, layers=slice(1, 2), heads=range(1, 3))
    gathered = out.copy_to_host()
    assert (gathered[0] == want[0]).all()
    assert (gathered[1, ..., :4, :] == want[1, ..., :4, :]).all()
    assert (gathered[1, ..., 4:, :] == 7).all()
    assert (spaced.copy_to_host()[1::2] == 7).all()
    (target,) = device(np.zeros_like(caches))
    kernels_numba.scatter_blocks(out, target, table, layers=slice(1, 2), heads=range(1, 3))
    back = target.copy_to_host()
    assert (back[1][:, [3, 1, 0], 1:] == caches[1][:, [3, 1, 0], 1:]).all()
    assert not back[0].any()
    assert not back[1][:, [2, 4]].any()
    assert not back[1][:, :, 0].any()


def check_tokens_and_pages(head_dim: int, dtype: type) -> None:
    caches = RANDOM.random((1, 2, 3, 2, 4, head_dim), np.float32).astype(dtype)
    fused = RANDOM.random((3, 2, 2, head_dim), np.float32).astype(dtype)
    keys, values, mapping, new = device(caches[0, 0], caches[0, 1], np.array([9, -1, 0], np.int64), fused)
    kernels_numba.scatter_kv(new[:, 0], new[:, 1], keys, values, mapping)
    for cache, kv in ((keys, 0), (values, 1)):
        want = caches[0, kv].copy()
        want[2, :, 1], want[0, :, 0] = fused[0, kv], fused[2, kv]
        assert (cache.copy_to_host() == want).all()
    pages, sources, targets = device(caches, np.array([0, 1], np.int32), np.array([1, 2], np.int32))
    kernels_numba.copy_pages(pages, sources, targets)
    assert (pages.copy_to_host() == caches[:, :, [0, 0, 0]]).all()


def elements(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers of many sizes with a NaN, infinities and zeros, as the CPU form takes them."""
    numbers = RANDOM.standard_normal(shape, dtype=np.float32)
    numbers *= np.float32(2.0) ** RANDOM.integers(-14, 9, (*shape[:-1], 1)).astype(np.float32)
    rows = numbers.reshape(-1, shape[-1])  # every ninth of each kind: some in every page
    rows.view(np.uint32)[1::9, 0] = 0x7FFFFFFF  # the NaN that rounding up would make a zero
    rows[2::9, -1], rows[3::9, 1], rows[4::9], rows[5::9] = np.inf, -np.inf, 0.0, -0.0
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float32":
        rows[6::9] *= np.float32(2.0**-140)  # subnormal
        rows[7::9], rows[7::9, 0] = 1, np.nextafter(np.float32(127), np.float32(128))  # a scale just above 1
        return numbers
    return numbers.astype(np.float16)


def check_codec(name: str, dtype: str, head_dim: int, page_size: int = 8, *, tuned: bool = True) -> None:
    """Both directions to the CPU form's bits: parts of layers and heads, blocks apart, a page left out.

    tuned: whether v2 has to take these shapes.
    """
    own, made = codec(name), codec_kernels_cuda.make_recode_v2.cache_info().misses
    caches = elements(dtype, (2, 2, 4, 3, page_size, head_dim))
    ids, part = np.array([[3, 1], [0, -1]], np.int32), {"layers": slice(1, 2), "heads": range(2, 3)}
    unit = own.unit_nbytes(2 * page_size, head_dim, caches.itemsize)
    want = np.full((2, 1, 2, 1, unit), 7, np.uint8)
    kernels_numba.gather_blocks(caches, ids, want, codec=own, **part)
    pages, table, spaced = device(caches, ids, np.full((4, *want.shape[1:]), 7, np.uint8))
    kernels_numba.gather_blocks(pages, table, spaced[::2], codec=own, **part)
    assert (spaced.copy_to_host()[::2] == want).all()
    assert (spaced.copy_to_host()[1::2] == 7).all()

    spaced = RANDOM.integers(0, 256, (4, *want.shape[1:])).astype(np.uint8)  # any bytes decode
    target = elements(dtype, caches.shape)
    encoded, back = device(spaced, target)
    kernels_numba.scatter_blocks(encoded[::2], back, table, codec=own, **part)
    kernels_numba.scatter_blocks(spaced[::2], target, ids, codec=own, **part)
    found = back.copy_to_host()
    if dtype == "bfloat16":
        found, target = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (found, target))
    np.testing.assert_array_equal(found, target)
    made = codec_kernels_cuda.make_recode_v2.cache_info().misses - made
    assert made == (2 if tuned and name != "none" else 0), "not the rung that should take these shapes"


def check_rotation(dtype: str, head_dim: int, query_heads: int) -> None:
    """Keys, values and queries to the CPU form's bits, the caches' other rows untouched."""
    fused = elements(dtype, (3, query_heads + 4, head_dim))
    caches = elements(dtype, (2, 3, 2, 4, head_dim))
    slots, positions = np.array([9, -1, 0], np.int64), np.array([4, 0, 3], np.int64)
    angles = RANDOM.uniform(0, 6, (5, 1, head_dim // 2)).astype(np.float32)
    cosine, sine = np.tile(np.cos(angles), 2), np.concatenate((-np.sin(angles), np.sin(angles)), -1)
    moved, pages, mapping, places, *tables = device(fused, caches, slots, positions, cosine, sine)
    for new, kv, where, rows, turns in (
        (moved, pages, mapping, places, tables),
        (fused, caches, slots, positions, (cosine, sine)),
    ):
        kernels_numba.scatter_kv(
            *(new[:, 0:2], new[:, 2:4], kv[0], kv[1], where),
            rotary=tuple(turns),
            positions=rows,
            query=new[:, 4:] if query_heads else None,
        )
    for found, want in ((moved.copy_to_host(), fused), (pages.copy_to_host(), caches)):
        if dtype == "bfloat16":
            found, want = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (found, want))
        np.testing.assert_array_equal(found, want)


def check_that_wrong_arguments_of_the_new_forms_are_named() -> None:
    """As on the CPU: argument, value, what was expected."""
    caches, ids = np.zeros((1, 2, 1, 1, 8, 8), np.float32), np.zeros((1, 1), np.int32)
    pages, table, short = device(caches, ids, np.zeros((1, 1, 2, 1, 8), np.uint8))
    new, slots, cosine = device(np.zeros((1, 1, 8), np.float32), np.zeros(1, np.int64), np.zeros((3, 1, 8)))
    single = device(np.zeros((3, 1, 8), np.float32))[0]
    keys, values = device(caches[0, 0], caches[0, 1])

    def gather(out: Any, ids: Any = table) -> None:
        kernels_numba.gather_blocks(pages, ids, out, codec=codec("int8"))

    def scatter(rotary: Any, positions: Any) -> None:
        kernels_numba.scatter_kv(new, new, keys, values, slots, rotary=rotary, positions=positions)

    host, elsewhere = np.zeros(1, np.int64), "cpu: expected an array on cuda, where"
    for call, words in (
        (lambda: gather(short), "out.shape=(1, 1, 2, 1, 8): expected (1, 1, 2, 1, 80)"),
        (lambda: gather(keys), "out.dtype=float32: expected uint8"),
        (lambda: gather(short, ids), f"page_ids={elsewhere} caches lives"),
        (lambda: scatter((cosine, cosine), slots), "cosine.dtype=float64: expected float32"),
        (lambda: scatter((single, single), host), f"positions={elsewhere} key lives"),
        (lambda: scatter((single,) * 2, None), "positions=None: expected (1,) int64, since rotary is given"),
    ):
        message = ""
        try:
            call()
        except ArgumentError as error:
            message = str(error)
        assert message == words


def check_that_devices_are_not_mixed() -> None:
    case = Case("float32", 1, 8)
    mixed = (*device(case.query, case.caches[0]), case.caches[1], *device(case.tables, case.new, case.lens))
    message = ""
    try:
        kernels_numba.paged_attention_prefill(*mixed, scale=1.0)
    except KindError as error:
        message = str(error)
    assert message == "value_cache=cpu: expected an array on cuda, where query lives"


def checks() -> list[tuple[str, Any]]:
    """(name, check), in the order in which they run."""
    plain, tiled = attention_cuda.launch_plain, attention_cuda.launch_tiled
    shared = attention_cuda.launch_shared
    mma = attention_cuda.launch_prefill
    lens, one_each = (70, 1), (1, 1)
    return [
        ("public float32", lambda: check_public("float32", 3, 32)),
        ("public bfloat16", lambda: check_public("bfloat16", 1, 72)),
        ("public float16", lambda: check_public("float16", 2, 64)),
        ("plain", lambda: check_rung(plain, Case("float32", 2, 8, window=4))),
        ("shared", lambda: check_rung(shared, Case("bfloat16", 2, 72, (70, 5), (2, 1)))),
        ("shared, window", lambda: check_rung(shared, Case("float16", 3, 8, (80, 7), (3, 7), window=9))),
        ("tiled, a group in two", lambda: check_rung(tiled, Case("float32", 18, 8))),
        ("tiled, window", lambda: check_rung(tiled, Case("float16", 3, 8, (80, 7), (5, 7), window=9))),
        ("mma 64", lambda: check_rung(mma, Case("bfloat16", 3, 64, (135, 9, 4), (6, 9, 0)), warps=2)),
        (
            "mma 128, window",
            lambda: check_rung(mma, Case("float16", 2, 128, (75,), (17,), window=40), warps=1),
        ),
        ("decode", lambda: check_decode(Case("float32", 5, 40, (40, 1), one_each))),
        (
            "decode, window",
            lambda: check_decode(Case("bfloat16", 2, 32, lens, one_each, window=50, kv_heads=2)),
        ),
        ("decode in many pieces", check_that_more_pieces_than_a_warp_has_lanes_are_merged),
        ("decode, two passes", lambda: check_decode(Case("float32", 1, 256, (9,), (1,)))),
        ("decode mma", lambda: check_decode(Case("bfloat16", 4, 128, lens, one_each))),
        (
            "decode mma, window",
            lambda: check_decode(Case("float16", 17, 64, (70,), (1,), window=36, kv_heads=2)),
        ),
        ("a key that is no number", check_that_a_key_that_is_no_number_is_seen),
        ("only minus infinity", check_that_scores_of_only_minus_infinity_give_nan),
        ("empty sequence", check_an_empty_sequence_decodes_to_zeros),
        ("blocks by element", lambda: check_blocks(np.uint16, 1)),
        ("blocks by 16 bytes", lambda: check_blocks(np.float32, 32)),
        ("blocks, long runs", lambda: check_blocks(np.float16, 264)),
        ("tokens and pages by element", lambda: check_tokens_and_pages(2, np.float32)),
        ("tokens and pages by 16 bytes", lambda: check_tokens_and_pages(8, np.float16)),
        ("codec none", lambda: check_codec("none", "float16", 8)),
        ("codec none by byte", lambda: check_codec("none", "bfloat16", 5, page_size=1)),
        ("codec bfloat16", lambda: check_codec("bfloat16", "float32", 16)),
        ("codec bfloat16 by element", lambda: check_codec("bfloat16", "bfloat16", 5, tuned=False)),
        ("codec int8", lambda: check_codec("int8", "bfloat16", 48)),
        ("codec int8 float32", lambda: check_codec("int8", "float32", 32)),
        ("codec int8 by element", lambda: check_codec("int8", "float16", 6, page_size=3, tuned=False)),
        ("codec int4", lambda: check_codec("int4", "bfloat16", 64)),
        ("codec int4, one group", lambda: check_codec("int4", "float32", 32)),
        ("codec int4 by element", lambda: check_codec("int4", "float32", 96, page_size=2, tuned=False)),
        ("codec fp8", lambda: check_codec("fp8", "float16", 32)),
        ("codec fp8 by element", lambda: check_codec("fp8", "float32", 7, page_size=3, tuned=False)),
        ("rotation by 16 bytes", lambda: check_rotation("bfloat16", 32, 3)),
        ("rotation by 16 bytes, float32", lambda: check_rotation("float32", 8, 0)),
        ("rotation by element", lambda: check_rotation("float16", 6, 1)),
        ("wrong arguments", check_that_wrong_arguments_of_the_new_forms_are_named),
        ("mixed devices", check_that_devices_are_not_mixed),
    ]


def wanted(*arguments: str) -> list[tuple[str, Any]]:
    """`--part 1/4`: every fourth check, from the second on; words: checks with one of them in its name."""
    if arguments[:1] == ("--part",):
        part, parts = map(int, arguments[1].split("/"))
        return checks()[part::parts]
    return [(name, check) for name, check in checks() if not arguments or any(w in name for w in arguments)]


def main() -> None:
    assert SIMULATED
    simulator_blocks.use()
    warnings.simplefilter("ignore", RuntimeWarning)  # numbers overflow on purpose
    sys.setswitchinterval(1e-3)
    for module in (attention_mma_cuda, attention_decode_cuda):
        module.MIN_PIECE, module.PIECE_STEP = PIECE, PIECE
    assert block_kernels_cuda.CHUNK == 16
    for name, check in wanted(*sys.argv[1:]):
        started = time.perf_counter()
        check()
        print(f"{name}: {time.perf_counter() - started:.2f} s", flush=True)
    print("all checks passed")


if __name__ == "__main__":
    main()
