"""The names of backend_ptx for the simulator, which knows no warps and no PTX: plain Python, shared lists.

Imported by backend_cuda alone, when Numba's simulator is on; the docstrings are in backend_ptx. Lanes of a
warp meet at a barrier of their own, so warps may go different ways, as on a GPU. Stricter than a GPU where
that finds mistakes: addresses are checked against the array's ends, copy_async copies only in copy_wait.
"""

# The twins are called by simulated kernels with whatever Numba's stand-ins pass.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201, ANN202, D103

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WAIT_S = 60.0
"""A warp whose lanes do not all come to an exchange is a mistake in a kernel: do not wait for ever."""

DAWDLE_S, DAWDLE_EVERY = 0.03, 4
"""Every second warp is so late at every fourth transposed load: warps that ought to wait for each other then
show. Not the last of a tile alone: those read what the warp itself has copied."""


class Memory:
    """An array as kernels see it here: its bytes, where a GPU has an address."""

    def __init__(self, array: np.ndarray):
        rows, row_bytes = array.shape[0], int(np.prod(array.shape[1:])) * array.itemsize
        size = array.strides[0] * (rows - 1) + row_bytes  # rows may lie at a distance: what is between counts
        self.bytes = np.lib.stride_tricks.as_strided(array.view(np.uint8), (size,), (1,))

    def part(self, offset: Any, count: int, dtype: type) -> np.ndarray:
        """`count` bytes at `offset`, as numbers; asserts that they are inside and aligned."""
        assert offset >= 0, f"offset {offset}: before the array"
        assert offset + count <= self.bytes.size, f"offset {offset}: past the array's {self.bytes.size} bytes"
        assert offset % count == 0, f"offset {offset}: not aligned to {count} bytes"
        return self.bytes[int(offset) : int(offset) + count].view(dtype)


class _Warp:
    """Where the 32 lanes of a warp meet: the last to come computes for all, and wakes them. A lock for each
    lane: a threading.Barrier would wake them one after the other, and take twice as long."""

    def __init__(self):
        self.passed: list = [None] * 32
        self.results: Any = None
        self.arriving, self.arrived = threading.Lock(), 0
        self.gates = [threading.Lock() for _ in range(32)]
        for gate in self.gates:
            gate.acquire()

    def meet(self, lane: int, value: Any, compute: Callable[[list], Any]) -> Any:
        """compute(what each lane passed)[lane], when all lanes have come. Raises TimeoutError."""
        with self.arriving:
            self.passed[lane] = value
            self.arrived += 1
            last = self.arrived == 32
            if last:
                self.arrived, self.results = 0, None
                try:
                    self.results = compute(self.passed)
                finally:
                    for other, gate in enumerate(self.gates):
                        if other != lane:
                            gate.release()
        if not last and not self.gates[lane].acquire(timeout=WAIT_S):
            raise TimeoutError(f"lane {lane}: not all of its warp came within {WAIT_S} s")
        return self.results[lane]


_CREATION = threading.Lock()


def _together(value: Any, compute: Callable[[list], Any]) -> Any:
    """This lane's part of what the warp computes from the values that its 32 lanes pass."""
    thread: Any = threading.current_thread()
    if not hasattr(thread, "warp"):
        with _CREATION:
            warps = thread._manager.__dict__.setdefault("warps", {})
            thread.warp = warps.setdefault(thread.thread_id // 32, _Warp())
    return thread.warp.meet(thread.thread_id % 32, value, compute)


def _wide_loader(nbytes: int):
    return lambda base, offset: tuple(base.part(offset, nbytes, np.uint32))


def _wide_storer(nbytes: int):
    def store(base: Memory, offset: Any, words: Any):
        base.part(offset, nbytes, np.uint32)[:] = words

    return store


load8, load16 = _wide_loader(8), _wide_loader(16)
store8, store16 = _wide_storer(8), _wide_storer(16)


def _loader(result: type, element: type):
    return lambda base, offset: result(base.part(offset, np.dtype(element).itemsize, element)[0])


def _storer(element: type, narrowed: Callable[[Any], Any] = lambda value: value):
    def store(base: Memory, offset: Any, value: Any):
        base.part(offset, np.dtype(element).itemsize, element)[0] = narrowed(value)

    return store


load_int32, load_int64 = _loader(np.int32, np.int32), _loader(np.int64, np.int64)
load_word, load_uint16 = _loader(np.uint32, np.uint32), _loader(np.uint32, np.uint16)
load_float = _loader(np.float32, np.float32)
store_word, store_uint16, store_float = _storer(np.uint32), _storer(np.uint16), _storer(np.float32)
store_float16 = _storer(np.float16)
store_bfloat16 = _storer(np.uint16, lambda value: bfloat16_bits(value))


def divide(dividend: Any, divisor: Any):
    assert 0 <= dividend < 2**31
    assert 0 < divisor < 2**31
    return np.int32(int(dividend) // int(divisor))


def exp2(power: Any):
    return np.float32(0.0) if power < -126 else np.float32(np.exp2(power))


def larger(a: Any, b: Any):
    return a if a >= b else b


def times(a: Any, b: Any):
    return np.float32(np.float32(a) * np.float32(b))


def plus(a: Any, b: Any):
    return np.float32(np.float32(a) + np.float32(b))


def quotient(a: Any, b: Any):
    return np.float32(np.float32(a) / np.float32(b))


def fused(a: Any, b: Any, c: Any):
    return np.float32(float(a) * float(b) + float(c))  # the product is exact in 53 bits


def as_bits(value: Any):
    return np.float32(value).view(np.uint32)


def as_float(bits: Any):
    return np.uint32(bits).view(np.float32)


def float32_single(word: Any):
    return (np.uint32(word).view(np.float32),)


def bfloat16_pair(word: Any):
    return tuple(_widened(np.array([word], np.uint32), "bfloat16"))


def float16_pair(word: Any):
    return tuple(_widened(np.array([word], np.uint32), "float16"))


def _widened(words: np.ndarray, element: str) -> np.ndarray:
    """Words of two 16-bit floats each as float32, the lower halves first."""
    if element == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(value: Any) -> int:
    """Rounded to the nearest even, NaN kept."""
    if value != value:
        return 0x7FC0
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def pack_bfloat16(low: Any, high: Any):
    return np.uint32(bfloat16_bits(low) | bfloat16_bits(high) << 16)


def pack_float16(low: Any, high: Any):
    return np.array([low, high], np.float16).view(np.uint32)[0]


def broadcast(value: Any, lane: Any):
    return _together((value, int(lane)), lambda passed: [passed[wanted][0] for _, wanted in passed])


def warp_sum(value: Any, lanes: int):
    """Added in the butterfly's order."""

    def compute(values: list) -> list:
        distance = lanes // 2
        while distance:
            values = [np.float32(v + values[i ^ distance]) for i, v in enumerate(values)]
            distance //= 2
        return values

    return _together(value, compute)


def warp_max(value: Any, lanes: int):
    return _together(value, lambda values: [max(values[i // lanes * lanes :][:lanes]) for i in range(32)])


def copy_async(target: np.ndarray, chunk: Any, base: Memory, offset: Any, bytes_there: Any):
    thread: Any = threading.current_thread()
    groups = thread.__dict__.setdefault("groups", [[]])
    there = target.reshape(-1)[int(chunk) :][:1].view(np.uint8)
    there[:] = 0xFF  # a NaN in every float format: whoever still reads here would do so too late on a GPU
    groups[-1].append((there, base, offset, bytes_there))


def copy_commit():
    threading.current_thread().__dict__.setdefault("groups", [[]]).append([])


def copy_wait(pending: int):
    groups = threading.current_thread().__dict__["groups"]
    while len(groups) - 1 > pending:
        for chunk, base, offset, bytes_there in groups.pop(0):
            chunk[:] = base.part(offset, 16, np.uint8) if bytes_there else 0


def _matrices(source: np.ndarray, chunks: list, *, transposed: bool) -> list:
    """Four words for each lane, from the 8 numbers of 16 bits in the chunk that each lane names."""
    rows = source.reshape(-1).view(np.uint16).reshape(-1, 8)[chunks].reshape(4, 8, 8)
    if transposed:
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1))
    return [tuple(words) for words in rows.view(np.uint32).reshape(4, 32).T]


def load_matrices(source: np.ndarray, chunk: Any):
    return _together(int(chunk), lambda chunks: _matrices(source, chunks, transposed=False))


def load_transposed(source: np.ndarray, chunk: Any):
    thread: Any = threading.current_thread()
    if thread.thread_id % 64 == 32:
        thread.loads = getattr(thread, "loads", 0) + 1
        if thread.loads % DAWDLE_EVERY == 0:
            time.sleep(DAWDLE_S)
    return _together(int(chunk), lambda chunks: _matrices(source, chunks, transposed=True))


def _multiply(element: str, sums: Any, words: tuple):
    """The four sums of this lane; what lies where is in backend_ptx."""

    def compute(passed: list) -> list:
        factors = _widened(np.array([words for _, words in passed], np.uint32).reshape(-1), element)
        lanes = factors.reshape(8, 4, 6, 2)  # (i // 4, i % 4, word, half of it)
        a = lanes[:, :, :4].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
        b = lanes[:, :, 4:].transpose(2, 1, 3, 0).reshape(16, 8)
        products = (a @ b).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
        return [tuple(total) for total in np.array([own for own, _ in passed], np.float32) + products]

    return _together((sums, words), compute)


def mma_bfloat16(sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any):
    return _multiply("bfloat16", sums, (a0, a1, a2, a3, b0, b1))


def mma_float16(sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any):
    return _multiply("float16", sums, (a0, a1, a2, a3, b0, b1))
