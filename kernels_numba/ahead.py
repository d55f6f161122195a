"""Compiling the CPU kernels of a model before it is loaded: several processes share the work.

Called by `mooncake-lite generate` and by compute ranks; also a program, for processes that only help:

    python -m kernels_numba.ahead JSON_OF_KERNEL_USE

A step is a group of kernels that one tiny call compiles, or loads from Numba's cache. Each process takes the
next step that no other process is compiling (a file lock in the cache folder tells), and loads what others
have compiled. Numba compiles one kernel at a time in a process, so more threads would not help. Explained in
docs/explain/paged-attention.md.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from filelock import FileLock, Timeout

from kernels_numba.matmul.linear_blocks import FLOAT32, GGUF_FORMATS
from kernels_numba.runtime import PARALLEL_CALL, get_num_threads

WAIT_S = 120.0
"""Longest wait for other processes while no step of this process ends; then it compiles for itself. The
longest step takes 10 s on a core of 2.8 GHz."""
_PATIENCE_S = 0.5
"""A shorter wait is not reported: another process is only loading."""
_POLL_S = 0.02

Step: TypeAlias = tuple[str, Callable[[], object]]
"""(name, the call that compiles it)"""

Report: TypeAlias = Callable[[int, int, str], None]
"""report(done, total, name): `done` of `total` steps are ready, and `name` is being compiled, by this process
or another; "" when all are ready. Not called at all where everything comes from the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """Which kernels a process will call on the CPU.

    dtype      of queries and caches: "float32", "bfloat16" or "float16"
    formats    of the weights that linear layers multiply: "tensor" (float32), "Q8_0", "Q4_0", "Q4_1"
    unpacked   the formats that are also unpacked to float32, for many tokens
    blocks     whether pool blocks are moved; codec: how they are encoded
    """

    dtype: str
    formats: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()
    blocks: bool = False
    codec: str = "none"

    def to_json(self) -> str:
        """The argument of the program."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> KernelUse:
        """The reverse of to_json."""
        given = json.loads(text)
        return cls(**given | {name: tuple(given[name]) for name in ("formats", "unpacked")})


def steps_of(use: KernelUse) -> list[Step]:
    """The steps of these kernels, the longest first. Sizes do not matter: Numba compiles for types alone."""
    steps: list[Step] = [
        (f"prefill attention {use.dtype}", partial(_attend, use.dtype, prefill=True)),
        (f"decode attention {use.dtype}", partial(_attend, use.dtype, prefill=False)),
    ]
    if use.formats:
        steps.append(("linear layers", _linear_drivers))
    steps += [(f"linear layers {name}", partial(_multiply, name)) for name in use.formats]
    if use.formats:
        steps += [("norms and SwiGLU", _rows), ("decode layers", _decode_layers)]
    if use.unpacked:
        steps.append(("unpacking weights", partial(_unpack, use.unpacked)))
    if use.blocks:
        steps.append(("pool blocks", partial(_move_blocks, use.dtype, use.codec)))
    steps.append((f"new tokens {use.dtype}", partial(_scatter, use.dtype)))
    return steps


def compile_ahead(steps: Sequence[Step], report: Report, folder: Path | None = None) -> None:
    """Run every step once, each either here or in another process that runs the same steps at this time.

    folder    of the locks; by default Numba's cache folder
    """
    folder = folder or Path(os.environ["NUMBA_CACHE_DIR"])
    waiting, moved_at = list(steps), time.monotonic()
    shown = _Shown(report, len(steps))
    with _watching_compiler(lambda: shown.compiling(len(steps) - len(waiting))):
        while waiting:
            idle_s = time.monotonic() - moved_at
            for step in waiting:
                with _lock(folder, step[0], ignored=idle_s > WAIT_S) as mine:
                    if mine:
                        shown.name = step[0]
                        step[1]()
                        waiting.remove(step)
                        moved_at = time.monotonic()
                        shown.ended(len(steps) - len(waiting))
                        break
            else:
                if idle_s > _PATIENCE_S:
                    shown.name = waiting[0][0]
                    shown.compiling(len(steps) - len(waiting))
                time.sleep(_POLL_S)


class _Shown:
    """What has been reported: nothing until something is compiled, then every change."""

    def __init__(self, report: Report, total: int) -> None:
        self.name = ""
        self._report = report
        self._total = total
        self._last: tuple[int, str] | None = None

    def compiling(self, done: int) -> None:
        """The step of this name is being compiled."""
        if self._last != (done, self.name):
            self._last = (done, self.name)
            self._report(done, self._total, self.name)

    def ended(self, done: int) -> None:
        """A step has ended."""
        if self._last is not None and done == self._total:
            self._report(done, self._total, "")


@contextmanager
def _lock(folder: Path, name: str, ignored: bool) -> Iterator[bool]:
    """Whether this process may take the step now. Where files cannot be locked, every process may."""
    lock = FileLock(folder / f"compile {name}.lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield ignored
        return
    except (OSError, NotImplementedError):  # a read-only folder, a file system without locks
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def _watching_compiler(on_compile: Callable[[], None]) -> Iterator[None]:
    """Call on_compile whenever Numba begins to compile something in this thread."""
    from numba.core.event import Listener, install_listener

    thread = threading.get_ident()

    class Watch(Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            """Numba compiles."""
            if threading.get_ident() == thread:
                on_compile()

        def on_end(self, event: Any) -> None:
            """Numba has compiled."""

    with install_listener("numba:compile", Watch()):
        yield


# ------------------------------------------------------------------------------------------ the steps


def _element(dtype: str) -> Any:
    """NumPy's type for kernels: the bits of a bfloat16 are an uint16."""
    return {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]


def _attend(dtype: str, prefill: bool) -> None:
    """One token after one page."""
    from kernels_numba.attention.attention_decode import paged_attention_decode
    from kernels_numba.attention.attention_prefill import paged_attention_prefill

    query, cache = np.zeros((1, 1, 8), _element(dtype)), np.zeros((1, 1, 1, 8), _element(dtype))
    tables, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    if prefill:
        paged_attention_prefill(query, cache, cache, tables, lens, lens, scale=1.0)
    else:
        paged_attention_decode(query, cache, cache, tables, lens, scale=1.0)


def _scatter(dtype: str) -> None:
    """One new token, its key and its query turned."""
    from kernels_numba.movers.blocks import scatter_kv

    token, cache = np.zeros((1, 1, 8), _element(dtype)), np.zeros((1, 1, 1, 8), _element(dtype))
    table, zero = np.zeros((1, 1, 8), np.float32), np.zeros(1, np.int64)
    rotary = (table, table)
    scatter_kv(token, token, cache, cache, zero, rotary=rotary, positions=zero, query=token.copy())


def _move_blocks(dtype: str, codec: str) -> None:
    """A small block each way, and one so large that all threads work. All ids are -1, so no page is read."""
    from kernels_numba.codecs import codec as named
    from kernels_numba.movers.blocks import PARALLEL_BYTES, gather_blocks, scatter_blocks

    chosen = named(codec) if codec != "none" else None
    caches = np.zeros((1, 2, 1, 1, 1, 8), _element(dtype))
    for pages in (1, PARALLEL_BYTES // (2 * caches[0, 0, 0, 0].nbytes)):
        ids = np.full((1, pages), -1, np.int32)
        shape: tuple[int, ...] = (1, 1, 2, 1, pages, 8)
        if chosen is not None:
            shape = (*shape[:4], chosen.unit_nbytes(pages, 8, caches.itemsize))
        block = np.empty(shape, np.uint8 if chosen else caches.dtype)
        gather_blocks(caches, ids, block, codec=chosen)
        scatter_blocks(block, caches, ids, codec=chosen)


def _kind(name: str) -> int:
    return FLOAT32 if name == "tensor" else GGUF_FORMATS[name]


def _linear_drivers() -> None:
    from kernels_numba.matmul.linear_layers import load_drivers

    load_drivers()


def _rows() -> None:
    from kernels_numba.layers.row_kernels import rms_norm, silu_multiply

    row = np.ones((1, 8), np.float32)
    rms_norm(row, row[0], 1e-6, add=row)
    silu_multiply(row, row)


def _decode_layers() -> None:
    """A token, a page and no layers: no kernel is called, so that each is compiled in a step of its own."""
    from kernels_numba.layers.decode_layers import decode_layers

    some, row, table = np.ones(8, np.int64), np.zeros((1, 8), np.float32), np.zeros((1, 1, 8), np.float32)
    model = (np.empty((0, 1), np.int64), np.empty((0, 1, 1), np.int64), some, np.empty((0, 1), np.int64))
    caches, context = (
        np.empty((0, 2, 1, 1, 1, 1), np.float32),
        (np.zeros((1, 1), np.int32), np.ones(1, np.int32)),
    )
    decode_layers(some, model, row, row, caches, (some, some, table, table), context, (1.0, 1.0, 0), 1, 0, 0)


def _multiply(name: str) -> None:
    from kernels_numba.matmul.linear_tiles import compiled_kernel
    from kernels_numba.matmul.linear_tiles_fixed import fixed_kernel

    compiled_kernel(_kind(name))
    fixed_kernel(_kind(name), sys.maxsize)


def _unpack(formats: Sequence[str]) -> None:
    from kernels_numba.matmul.linear_tiles import widen_parallel, widening_kernel

    for name in formats:
        address = widening_kernel(_kind(name)).address
    with PARALLEL_CALL:
        widen_parallel(address, 0, 0, 0, 0, 0, 0, 0, get_num_threads())


if __name__ == "__main__":
    compile_ahead(steps_of(KernelUse.from_json(sys.argv[1])), lambda *_: None)
