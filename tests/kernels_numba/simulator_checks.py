"""The CUDA kernels in Numba's simulator, against float64 oracles: run as a program by test_cuda.py.

A process of its own, because Numba chooses between simulator and compiler when it is imported
(NUMBA_ENABLE_CUDASIM=1). Needs NumPy and Numba only. Prints one line a check; ends with an exit code.

Stricter than the simulator itself: shared memory begins as NaN in every block, so that a missing barrier
shows; the twins of backend_twins check addresses and copy asynchronously as late as they may.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi

import kernels_numba
from kernels_numba import attention_cuda, attention_decode_cuda, attention_mma_cuda, blocks_cuda
from kernels_numba.backend_cuda import SIMULATED, cuda
from kernels_numba.blocks import gather_blocks_v0
from kernels_numba.checks import NO_WINDOW
from kernels_numba.errors import KindError

RANDOM = np.random.default_rng(0)
PIECE = 32
"""Tokens of a piece here instead of MIN_PIECE, so that short contexts have several."""


class PoisonedShared(kernelapi.FakeCUDAShared):
    """Shared memory whose every float is NaN until it is written. One array a line of the kernel, as in the
    simulator, whose own look-up two threads can enter at once."""

    LOCK = threading.Lock()

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> np.ndarray:
        line = sys._getframe(1).f_lineno
        with self.LOCK:
            if line not in self._allocations:
                array = self._allocations[line] = np.empty(shape, dtype)
                array.reshape(-1).view(np.uint8)[:] = 0xFF  # a NaN in every float format
            return self._allocations[line]


class PatientThread(simulator.BlockThread):
    """The simulator's manager asks its threads without a pause whether they live, and so keeps them from
    running: let it give way each time. Two to three times as fast."""

    def is_alive(self) -> bool:
        time.sleep(0)
        return super().is_alive()


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
    mma = attention_cuda.launch_prefill
    lens, one_each = (70, 1), (1, 1)
    return [
        ("public float32", lambda: check_public("float32", 3, 32)),
        ("public bfloat16", lambda: check_public("bfloat16", 1, 72)),
        ("public float16", lambda: check_public("float16", 2, 64)),
        ("plain", lambda: check_rung(plain, Case("float32", 2, 8, window=4))),
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
        ("decode, two passes", lambda: check_decode(Case("float32", 1, 256, (9,), (1,)))),
        ("decode mma", lambda: check_decode(Case("bfloat16", 4, 128, lens, one_each))),
        (
            "decode mma, window",
            lambda: check_decode(Case("float16", 17, 64, (70,), (1,), window=36, kv_heads=2)),
        ),
        ("empty sequence", check_an_empty_sequence_decodes_to_zeros),
        ("blocks by element", lambda: check_blocks(np.uint16, 1)),
        ("blocks by 16 bytes", lambda: check_blocks(np.float32, 32)),
        ("blocks, long runs", lambda: check_blocks(np.float16, 264)),
        ("tokens and pages by element", lambda: check_tokens_and_pages(2, np.float32)),
        ("tokens and pages by 16 bytes", lambda: check_tokens_and_pages(8, np.float16)),
        ("mixed devices", check_that_devices_are_not_mixed),
    ]


def main() -> None:
    assert SIMULATED
    kernelapi.FakeCUDAShared = PoisonedShared
    simulator.BlockThread = PatientThread
    sys.setswitchinterval(1e-3)
    for module in (attention_mma_cuda, attention_decode_cuda):
        module.MIN_PIECE, module.PIECE_STEP = PIECE, PIECE
    assert blocks_cuda.CHUNK == 16
    wanted = sys.argv[1:]
    for name, check in checks():
        if not wanted or any(word in name for word in wanted):
            started = time.perf_counter()
            check()
            print(f"{name}: {time.perf_counter() - started:.2f} s", flush=True)
    print("all checks passed")


if __name__ == "__main__":
    main()
