"""Compiling a model's kernels before it is loaded, in sight of the user.

Used by `mooncake-lite generate` and by compute ranks. What is compiled, and how processes share the work:
kernels_numba/ahead.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kernels_numba.ahead import KernelUse, Report, compile_ahead, steps_of
from kernels_numba.runtime import SHARED_CACHE
from mooncake_lite.launch.child import start_child
from mooncake_lite.model.config import DType
from mooncake_lite.model.weight_source import weight_source

MAX_HELPERS = 3
"""The two longest steps take two thirds of the time: a fourth helper would find nothing to do."""


def kernel_use(
    folder: Path, dtype: DType, device: str, weights: str, codec: str | None = None
) -> KernelUse | None:
    """The kernels that the model in `folder` calls; None where it calls none on the CPU.

    weights   as for load_model; codec: of the pool's blocks, None where no blocks are moved

    Raises ModelError when the folder cannot be used.
    """
    if device != "cpu":
        return None
    source = weight_source(folder, weights, dtype, device)
    formats = source.formats() if dtype == "float32" else ()  # in bfloat16 torch multiplies
    return KernelUse(
        dtype=dtype,
        formats=formats,
        unpacked=() if source.tensors else tuple(name for name in formats if name != "tensor"),
        blocks=codec is not None,
        codec=codec or "none",
    )


def compile_with_helpers(use: KernelUse, report: Report, helpers: int) -> None:
    """Compile these kernels, or load them from the cache; returns when all are ready.

    helpers   processes to start, at most MAX_HELPERS, when something has to be compiled; they end here too
    """
    helpers = min(helpers, MAX_HELPERS) if SHARED_CACHE else 0
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-m", "kernels_numba.ahead", use.to_json()]
    silent: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)

    def on_compile(done: int, total: int, name: str) -> None:
        while len(started) < helpers:
            started.append(start_child(command, **silent))
        report(done, total, name)

    try:
        compile_ahead(steps_of(use), on_compile)
    finally:
        for process in started:
            process.kill()  # its locks end with it, and Numba renames whole files into the cache
        for process in started:
            process.wait()


@contextmanager
def console_compiling(console: Console | None = None) -> Iterator[Report]:
    """Give a report for compile_ahead: a bar on stderr, or one line at the start and one at the end where
    there is no terminal."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, visible=False)

        def report(done: int, total: int, name: str) -> None:
            text = f"compiling {name}" if name else "compiled the kernels"
            bar.update(task, completed=done, total=total, description=text, visible=True)

        yield report


def _lines(console: Console) -> Report:
    began = 0.0

    def report(done: int, total: int, name: str) -> None:
        nonlocal began
        if not began:
            began = time.monotonic()
            console.print("compiling kernels for this machine; later starts find them in the cache")
        if not name:
            console.print(f"compiled {total} groups of kernels in {time.monotonic() - began:.0f} s")

    return report
