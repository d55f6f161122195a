"""Every CUDA kernel with the types it is launched with, lowered, linked and assembled as for a launch.

Used by gpu_report and by the tests. Needs NVVM and nvJitLink, which come with numba-cuda[cu13], but no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels_numba.gpu.backend_cuda import Capability

GROUPS = (8, 128)
"""Query heads of a kv head that ask for the fewest and the most warps."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, its signature and launch bounds. tuned: the form that is called; it must not spill."""

    name: str
    function: Any
    arguments: tuple
    tuned: bool
    bounds: tuple[int, int] | None = None

    def lowered(self, *ccs: Capability) -> list[bytes]:
        """LTO-IR for each compute capability."""
        from kernels_numba.gpu.backend_cuda import lower

        return lower(self.function, self.arguments, ccs, self.bounds)


@dataclass(frozen=True)
class Assembled:
    """What the assembler says of a kernel; shared_bytes: a block's, registers: a thread's."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int


def kernels() -> Iterator[Kernel]:
    """All kernels: the tuned ones of every element type and head_dim of interest, then the plain rungs."""
    from numba import types

    from kernels_numba.attention.attention_decode_cuda import make_decode_v3, make_merge
    from kernels_numba.attention.attention_mma_cuda import (
        HEAD_DIMS,
        bounds,
        decode_warps,
        make_attend,
        prefill_warps,
    )

    i64, f32 = types.int64, types.float32
    for element in ("bfloat16", "float16"):
        for head_dim in HEAD_DIMS:
            for group in GROUPS:
                for split, what, warps in (
                    (False, "prefill", prefill_warps(group)),
                    (True, "decode", decode_warps(group)),
                ):
                    attend = make_attend(element, head_dim, split, warps)
                    limit = None if split else bounds(warps)
                    name = f"{what} mma {element} {head_dim}, group {group}"
                    yield Kernel(name, attend, (i64,) * 13 + (f32, i64), True, limit)
    for element, head_dim in (("float32", 64), ("float32", 256), ("bfloat16", 256), ("float16", 96)):
        decode = make_decode_v3(element, head_dim)
        yield Kernel(f"decode v3 {element} {head_dim}", decode, (i64,) * 12 + (f32, i64), True)
    for element in ("float32", "bfloat16", "float16"):
        yield Kernel(f"merge {element}", make_merge(element), (i64,) * 6, True)
    yield from _tuned_movers()
    yield from plain_kernels()


def plain_kernels() -> Iterator[Kernel]:
    """The plain rungs, of every element type."""
    from numba import types

    from kernels_numba.attention import attention_cuda, attention_tiles_cuda
    from kernels_numba.movers import block_kernels_cuda
    from kernels_numba.movers.codec_kernels_cuda import recode_v1
    from kernels_numba.movers.rotary_cuda import scatter_rotated_v1

    i64, i32, f32 = types.int64, types.int32, types.float32
    bits: Any
    for name, bits in (("float32", f32), ("bfloat16", types.uint16), ("float16", types.int16)):
        rows, cache, caches = bits[:, :, ::1], bits[:, :, :, ::1], bits[:, :, :, :, :, ::1]
        attention = (rows, cache, cache, i32[:, ::1], i32[::1], i32[::1], rows, f32, i64)
        new, blocks, units = bits[:, :, :], bits[:, :, :, :, :, :], types.uint8[:, :, :, :, :]
        tokens, turns = (new, new, cache, cache, i64[::1]), f32[:, :, ::1]
        moved = (caches, i32[:, ::1], blocks, i64, i64, types.boolean)
        recoded = (caches, i32[:, ::1], units, i64, i64, i64, i64, f32, types.boolean)
        for what, function, arguments in (
            ("attention v1", attention_cuda.attention_v1, attention),
            ("attention shared", attention_cuda.attention_v1_shared, attention),
            ("attention v2", attention_tiles_cuda.attention_v2, attention),
            ("scatter_kv v1", block_kernels_cuda.scatter_kv_v1, tokens),
            ("move_blocks v1", block_kernels_cuda.move_blocks_v1, moved),
            ("copy_pages v1", block_kernels_cuda.copy_pages_v1, (caches, i32[::1], i32[::1])),
            ("scatter_rotated v1", scatter_rotated_v1, (*tokens, turns, turns, i64[::1], new, i64)),
            ("recode v1", recode_v1, recoded),
        ):
            yield Kernel(f"{what} {name}", function, arguments, False)


def _tuned_movers() -> Iterator[Kernel]:
    """Movers by address: plain, turning, and with each codec in both directions."""
    from numba import types

    from kernels_numba.codecs import CODECS
    from kernels_numba.movers import block_kernels_cuda
    from kernels_numba.movers.codec_kernels_cuda import make_recode_v2
    from kernels_numba.movers.rotary_cuda import make_scatter_rotated_v2

    i64 = types.int64
    yield Kernel("scatter_kv v2", block_kernels_cuda.scatter_kv_v2, (i64,) * 11, True)
    yield Kernel("move_blocks v2", block_kernels_cuda.move_blocks_v2, (i64,) * 12 + (types.boolean,), True)
    yield Kernel("copy_pages v2", block_kernels_cuda.copy_pages_v2, (i64,) * 6, True)
    for element, head_dim in (("float32", 64), ("bfloat16", 128), ("float16", 64)):
        turned = make_scatter_rotated_v2(element)
        yield Kernel(f"scatter_rotated v2 {element}", turned, (i64,) * 17, True)
        for codec in list(CODECS.values())[1:]:
            for what, to_pages in (("encode", False), ("decode", True)):
                kind = (codec.number, element, head_dim, codec.groups(head_dim), to_pages)
                name = f"{what} v2 {codec.name} {element} {head_dim}"
                yield Kernel(name, make_recode_v2(*kind), (i64,) * 13, True)


def architecture(cc: Capability) -> str:
    """The name that the linker knows, such as sm_90a."""
    return "sm_" + "".join(map(str, cc))


def linked(code: bytes, cc: Capability, *options: str) -> tuple[bytes, str]:
    """(machine code, what the linker says) of LTO-IR; without options the bytes that Numba loads.

    Raises RuntimeError with the linker's words.
    """
    from cuda.bindings import nvjitlink

    options = (f"-arch={architecture(cc)}", "-lto", *options)
    linker = nvjitlink.create(len(options), list(options))
    try:
        words = bytearray()
        try:
            nvjitlink.add_data(linker, nvjitlink.InputType.LTOIR, code, len(code), "kernel")
            nvjitlink.complete(linker)
        except nvjitlink.nvJitLinkError as error:
            words = bytearray(nvjitlink.get_error_log_size(linker))
            nvjitlink.get_error_log(linker, words)
            raise RuntimeError(f"{error}: {_text(words)}") from None
        words = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, words)
        what = "ptx" if "-ptx" in options else "cubin"
        made = bytearray(getattr(nvjitlink, f"get_linked_{what}_size")(linker))
        getattr(nvjitlink, f"get_linked_{what}")(linker, made)
    finally:
        nvjitlink.destroy(linker)
    return bytes(made), _text(words)


def ptx_of(code: bytes, cc: Capability) -> str:
    """The PTX that LTO-IR becomes on its way. Raises RuntimeError with the linker's words."""
    return linked(code, cc, "-ptx")[0].decode().strip("\0\n ")


def assemble(code: bytes, cc: Capability) -> Assembled:
    """Figures of LTO-IR linked as for a launch. Raises RuntimeError with the linker's words."""
    return read_log(linked(code, cc, "-verbose")[1])


def _text(log: bytearray) -> str:
    return log.decode(errors="replace").strip("\0\n ")


def read_log(log: str) -> Assembled:
    """The figures in what the assembler said. Raises RuntimeError where one is missing; shared memory is
    named only where there is some."""

    def number(pattern: str, otherwise: int | None = None) -> int:
        found = re.search(pattern, log)
        if found is None and otherwise is not None:
            return otherwise
        if found is None:
            raise RuntimeError(f"the assembler does not say {pattern!r}: {log[:500]}")
        return int(found[1])

    return Assembled(
        registers=number(r"[Uu]sed (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem", otherwise=0),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
    )
