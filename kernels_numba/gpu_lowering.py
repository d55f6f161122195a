"""Every CUDA kernel with the types it is launched with, lowered to PTX and, where ptxas is, assembled.

Used by gpu_report and by the tests. Needs NVVM (numba-cuda[cu13]) but no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCATIONS = ("/usr/local/cuda/bin", "/usr/local/cuda-13.0/bin", "/opt/cuda/bin")
"""Where ptxas lies when it is not on the path."""
ASSEMBLE_S = 60


@dataclass(frozen=True)
class Kernel:
    """One kernel, its signature and launch bounds. tuned: the form that is called; it must not spill."""

    name: str
    function: Any
    arguments: tuple
    tuned: bool
    bounds: tuple[int, int] | None = None

    def ptx(self, *ccs: tuple[int, int]) -> list[str]:
        """Lowered for each compute capability."""
        from kernels_numba.backend_cuda import lower

        return lower(self.function, self.arguments, ccs, self.bounds)


@dataclass(frozen=True)
class Assembled:
    """What ptxas says of a kernel; shared_bytes: a block's, registers: a thread's."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int


def kernels() -> Iterator[Kernel]:
    """All kernels: the tuned ones of every element type and head_dim of interest, then the plain rungs."""
    from numba import types

    from kernels_numba import attention_cuda, blocks_cuda
    from kernels_numba.attention_decode_cuda import make_decode_v3, make_merge
    from kernels_numba.attention_mma_cuda import HEAD_DIMS, bounds, make_attend

    i64, i32, f32 = types.int64, types.int32, types.float32
    for element in ("bfloat16", "float16"):
        for head_dim in HEAD_DIMS:
            for split, what, warps in ((False, "prefill", 4), (True, "decode", 1)):
                attend = make_attend(element, head_dim, split, warps)
                limit = None if split else bounds(warps)
                name = f"{what} mma {element} {head_dim}"
                yield Kernel(name, attend, (i64,) * 13 + (f32, i64), True, limit)
    for element, head_dim in (("float32", 64), ("float32", 256), ("bfloat16", 256), ("float16", 96)):
        decode = make_decode_v3(element, head_dim)
        yield Kernel(f"decode v3 {element} {head_dim}", decode, (i64,) * 12 + (f32, i64), True)
    for element in ("float32", "bfloat16", "float16"):
        yield Kernel(f"merge {element}", make_merge(element), (i64,) * 6, True)
    yield Kernel("scatter_kv v2", blocks_cuda.scatter_kv_v2, (i64,) * 11, True)
    yield Kernel("move_blocks v2", blocks_cuda.move_blocks_v2, (i64,) * 12 + (types.boolean,), True)
    yield Kernel("copy_pages v2", blocks_cuda.copy_pages_v2, (i64,) * 6, True)

    bits: Any
    for name, bits in (("float32", f32), ("bfloat16", types.uint16), ("float16", types.int16)):
        rows, cache, caches = bits[:, :, ::1], bits[:, :, :, ::1], bits[:, :, :, :, :, ::1]
        attention = (rows, cache, cache, i32[:, ::1], i32[::1], i32[::1], rows, f32, i64)
        yield Kernel(f"attention v1 {name}", attention_cuda.attention_v1, attention, False)
        yield Kernel(f"attention v2 {name}", attention_cuda.attention_v2, attention, False)
        new, blocks = bits[:, :, :], bits[:, :, :, :, :, :]
        moved = (caches, i32[:, ::1], blocks, i64, i64, types.boolean)
        yield Kernel(
            f"scatter_kv v1 {name}", blocks_cuda.scatter_kv_v1, (new, new, cache, cache, i64[::1]), False
        )
        yield Kernel(f"move_blocks v1 {name}", blocks_cuda.move_blocks_v1, moved, False)
        yield Kernel(f"copy_pages v1 {name}", blocks_cuda.copy_pages_v1, (caches, i32[::1], i32[::1]), False)


def find_ptxas() -> str:
    """The path of ptxas, "" where there is none."""
    found = shutil.which("ptxas")
    folders = [Path(folder) for folder in LOCATIONS]
    try:
        import nvidia  # type: ignore[import-untyped]  # the folder of the CUDA wheels

        folders += [folder for root in nvidia.__path__ for folder in Path(root).glob("*/bin")]
    except ImportError:
        pass
    return found or next((str(f / "ptxas") for f in folders if (f / "ptxas").exists()), "")


def assemble(ptxas: str, ptx: str, cc: tuple[int, int]) -> Assembled:
    """Raises RuntimeError with ptxas's words when it refuses. An older ptxas is given its own version."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        command = [ptxas, "-v", f"-arch=sm_{cc[0]}{cc[1]}", "-o", str(path.with_suffix(".cubin")), str(path)]
        for _ in range(2):
            path.write_text(ptx)
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASSEMBLE_S)
            older = re.search(r"Unsupported \.version .*current version is '([\d.]+)'", done.stderr)
            if older is None:
                break
            ptx = re.sub(r"\.version .*", f".version {older[1]}", ptx, count=1)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stderr)
        return int(found[1]) if found else 0

    return Assembled(
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
    )
