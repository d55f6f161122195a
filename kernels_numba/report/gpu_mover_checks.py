"""Checks of the movers on a GPU, bit for bit: parts "blocks" and "codecs" of gpu_report.

Plain moves are compared with torch, rotations and codecs with the CPU forms. Needs torch; knows the public
functions, and the rungs behind them by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import kernels_numba
from kernels_numba.codecs import codec
from kernels_numba.movers import block_kernels_cuda, codec_kernels_cuda
from kernels_numba.report.gpu_checks import Check

DEVICE = "cuda"


def _blocks(dtype: Any, head_dim: int, plain: bool) -> str:
    layers, pages, kv_heads, page_size = 3, 40, 4, 16
    bits = torch.int16 if dtype != torch.float32 else torch.int32
    caches = torch.randn(layers, 2, pages, kv_heads, page_size, head_dim, device=DEVICE).to(dtype)
    ids = torch.randperm(pages, device=DEVICE)[:24].int().view(6, 4)
    ids[2, 1] = -1
    first, last = 1, 3
    out = torch.full((12, 2, 2, 2, 4 * page_size, head_dim), 7, dtype=dtype, device=DEVICE)[::2]
    move = block_kernels_cuda.launch_move_blocks_plain if plain else block_kernels_cuda.launch_move_blocks
    move(caches, ids, out, (first, 2, first, 2), False)
    part = caches[first:last, :, :, first:last][:, :, ids.long()]  # layers 2 blocks pages heads rows head_dim
    wanted = part.permute(2, 0, 1, 4, 3, 5, 6).clone()
    wanted[2, :, :, :, 1] = 7
    assert torch.equal(out.view(bits), wanted.reshape(out.shape).view(bits)), "gathered blocks differ"
    back = torch.zeros_like(caches)
    move(back, ids, out, (first, 2, first, 2), True)
    used = ids[ids >= 0].long()
    wanted = torch.zeros_like(caches)
    wanted[first:last, :, used, first:last] = caches[first:last, :, used, first:last]
    assert torch.equal(back.view(bits), wanted.view(bits)), "scattered pages differ"
    return f"{out.numel() * out.element_size()} bytes each way"


def _tokens(dtype: Any, head_dim: int) -> str:
    pages, kv_heads, page_size, tokens = 30, 3, 16, 200
    caches = torch.randn(1, 2, pages, kv_heads, page_size, head_dim, device=DEVICE).to(dtype)
    fused = torch.randn(tokens, 3, kv_heads, head_dim, device=DEVICE).to(dtype)
    slots = torch.randperm(pages * page_size, device=DEVICE)[:tokens]
    slots[5] = -1
    wanted = caches.clone()
    for kv in range(2):
        kept = slots >= 0
        wanted[0, kv, slots[kept] // page_size, :, slots[kept] % page_size] = fused[kept, 1 + kv]
    kernels_numba.scatter_kv(fused[:, 1], fused[:, 2], caches[0, 0], caches[0, 1], slots)
    assert torch.equal(caches, wanted), "scatter_kv differs"
    sources = torch.tensor([3, 4, 3], dtype=torch.int32, device=DEVICE)
    targets = torch.tensor([4, 9, 1], dtype=torch.int32, device=DEVICE)
    for source, target in ((3, 4), (4, 9), (3, 1)):
        wanted[:, :, target] = wanted[:, :, source]
    kernels_numba.copy_pages(caches, sources, targets)
    assert torch.equal(caches, wanted), "copy_pages differs"
    return f"{tokens} tokens"


def blocks_checks() -> Iterator[Check]:
    """Movers, by 16 bytes and by element, and rotations, bit for bit."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for plain in (False, True):
            yield f"blocks {dtype} plain={plain}", partial(_blocks, dtype, 64, plain)
        for head_dim in (64, 5):
            yield f"tokens and pages {dtype} {head_dim}", partial(_tokens, dtype, head_dim)
    for dtype, head_dim in (
        (torch.bfloat16, 128),
        (torch.float16, 64),
        (torch.float32, 64),
        (torch.float32, 6),
    ):
        yield f"scatter_kv with rotation {dtype} {head_dim}", partial(_rotation, dtype, head_dim)


def same_bits(found: Any, wanted: Any) -> bool:
    """Equal, NaN included."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    return torch.equal(found.view(bits).cpu(), wanted.view(bits).cpu())


def _rotation(dtype: Any, head_dim: int) -> str:
    """Beside the CPU form."""
    tokens, heads, kv_heads = 300, 8, 2
    angles = torch.rand(500, 1, head_dim // 2) * 6
    tables = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    caches = torch.randn(2, 30, kv_heads, 16, head_dim).to(dtype)
    slots, positions = torch.randperm(30 * 16)[:tokens], torch.randint(0, 500, (tokens,))
    slots[7] = -1
    results = []
    for device in ("cpu", DEVICE):
        new, cache = (array.to(device, copy=True) for array in (fused, caches))
        key, value = new[:, heads : heads + kv_heads], new[:, heads + kv_heads :]
        turns: Any = [table.to(device) for table in tables]
        kernels_numba.scatter_kv(
            *(key, value, cache[0], cache[1], slots.to(device)),
            rotary=(turns[0], turns[1]),
            positions=positions.to(device),
            query=new[:, :heads],
        )
        results.append((new, cache))
    assert same_bits(results[1][0], results[0][0]), "queries differ from the CPU form's"
    assert same_bits(results[1][1], results[0][1]), "pages differ from the CPU form's"
    return f"{tokens} tokens"


def _codec(name: str, dtype: Any, head_dim: int, plain: bool) -> str:
    """Both directions beside the CPU form: sizes of all orders, some rows with NaN or infinity."""
    own, layers, pages, kv_heads, page_size = codec(name), 2, 12, 3, 16
    rows = torch.randn(layers * 2 * pages * kv_heads * page_size, head_dim)
    rows *= 2.0 ** torch.randint(-14, 9, (len(rows), 1))
    rows[3::50, 0], rows[5::50, 1], rows[7::50, -1], rows[9::50] = torch.nan, torch.inf, -torch.inf, 0
    caches = rows.view(layers, 2, pages, kv_heads, page_size, head_dim).to(dtype)
    ids = torch.randperm(pages)[:8].int().view(4, 2)
    ids[2, 1] = -1
    unit = own.unit_nbytes(2 * page_size, head_dim, caches.element_size())
    encoded = torch.full((4, layers, 2, kv_heads, unit), 7, dtype=torch.uint8)
    on_gpu, back = encoded.to(DEVICE, copy=True), torch.zeros_like(caches)
    kernels_numba.gather_blocks(caches, ids, encoded, codec=own)
    kernels_numba.scatter_blocks(encoded, back, ids, codec=own)
    there = [array.to(DEVICE, copy=True) for array in (caches, ids, torch.zeros_like(caches))]
    whole = (0, layers, 0, kv_heads)
    if plain:
        codec_kernels_cuda.launch_recode_plain(there[0], there[1], on_gpu, whole, own, False)
        codec_kernels_cuda.launch_recode_plain(there[2], there[1], on_gpu, whole, own, True)
    else:
        kernels_numba.gather_blocks(there[0], there[1], on_gpu, codec=own)
        kernels_numba.scatter_blocks(on_gpu, there[2], there[1], codec=own)
    assert torch.equal(on_gpu.cpu(), encoded), "encoded blocks differ from the CPU form's"
    found, wanted = there[2].cpu(), back
    assert torch.equal(found.isnan(), wanted.isnan()), "other numbers come back as NaN than from the CPU form"
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), "decoded pages differ from the CPU form's"
    return f"{on_gpu.numel()} bytes"


def codecs_checks() -> Iterator[Check]:
    """Every codec on every element type, by lanes and by row, to the CPU form's bytes."""
    for name in ("none", "bfloat16", "int8", "int4", "fp8"):
        for dtype, head_dim in ((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64)):
            yield f"codec {name} {dtype} {head_dim}", partial(_codec, name, dtype, head_dim, False)
        yield f"codec {name} torch.bfloat16 96", partial(_codec, name, torch.bfloat16, 96, False)
        if name != "none":
            yield f"codec {name} by row", partial(_codec, name, torch.float16, 20, True)
