"""Figures of the CUDA kernels on a GPU: the parts "measure_*" of gpu_report, each figure as a benchmark row.

Needs torch. Ours, the peer and the machine's limit take turns in one run; ours and the peer's are medians,
the limit is its best run. They are timed as graphs; the figures "one call" include what the host does for a
launch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import kernels_numba
from kernels_numba.attention import attention_cuda
from kernels_numba.codecs import codec
from kernels_numba.report.gpu_checks import captured

RUNS = 9
DEVICE = "cuda"
Measure = tuple[str, Callable[[], list[dict[str, Any]]]]
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def graphed(action: Callable[[], object]) -> Callable[[], object]:
    """`action` as a graph; the call itself where it cannot be captured."""
    try:
        return captured(action)
    except RuntimeError:
        torch.cuda.synchronize()
        return action


def seconds(*actions: Callable[[], object]) -> list[list[float]]:
    """Device seconds of RUNS runs of each action, taking turns."""
    times: list[list[float]] = [[] for _ in actions]
    for action in actions:
        action()
    for _ in range(RUNS):
        for action, taken in zip(actions, times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            action()
            end.record()
            torch.cuda.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
    return times


def row(
    name: str, unit: str, work: float, ours: list[float], peer: Any = None, limit: Any = None
) -> dict[str, Any]:
    """A benchmark row; work: bytes / 1e9 or operations / 1e12 of one run; peer: (name, seconds of each run);
    limit: (name, best rate)."""
    mine = work / statistics.median(ours)
    theirs = None if peer is None else work / statistics.median(peer[1])
    return {
        "name": name,
        "unit": unit,
        "ours": mine,
        "peer": None if peer is None else {"name": peer[0], "value": theirs},
        "limit": None if limit is None else {"name": limit[0], "value": limit[1]},
        "ratio_to_peer": None if theirs is None else mine / theirs,
        "ratio_to_limit": None if limit is None else mine / limit[1],
        "runs": len(ours),
    }


def copier(size_bytes: int = 1 << 30) -> tuple[Callable[[], object], float]:
    """A device-to-device copy, and the GB it reads and writes."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * size_bytes / 1e9


def multiplier(size: int = 8192) -> tuple[Callable[[], object], float]:
    """A bfloat16 matrix product, and its 1e12 operations."""
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * size**3 / 1e12


def paged_kv(batch: int, tokens: int, dtype: Any) -> tuple[Any, Any, Any]:
    """(key_cache, value_cache, tables) of sequences of equal length in shuffled pages."""
    count = tokens // PAGE
    caches = [
        torch.randn(batch * count, KV_HEADS, PAGE, HEAD_DIM, device=DEVICE, dtype=dtype) for _ in range(2)
    ]
    tables = torch.randperm(batch * count, device=DEVICE).int().view(batch, count)
    return caches[0], caches[1], tables


def contiguous_kv(batch: int, tokens: int, dtype: Any) -> list[Any]:
    """Keys and values (batch, kv_heads, tokens, head_dim)."""
    return [torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, device=DEVICE, dtype=dtype) for _ in range(2)]


def _decode_rows(batch: int, tokens: int, layers: int, dtype: Any) -> list[dict[str, Any]]:
    """layers: as many caches by turns, so that the L2 cache helps nobody."""
    size = 2 * batch * tokens * KV_HEADS * HEAD_DIM * torch.empty((), dtype=dtype).element_size()
    query = torch.randn(batch, HEADS, HEAD_DIM, device=DEVICE, dtype=dtype)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
    out, scale = torch.empty_like(query), HEAD_DIM**-0.5
    paged = [paged_kv(batch, tokens, dtype) for _ in range(layers)]

    def ours() -> None:
        for keys, values, tables in paged:
            kernels_numba.paged_attention_decode(query, keys, values, tables, lens, scale=scale, out=out)

    contiguous = [contiguous_kv(batch, tokens, dtype) for _ in range(layers)]

    def peer() -> None:
        for keys, values in contiguous:
            scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale, enable_gqa=True)

    copy, copied = copier()
    mine, theirs, eager, bound = seconds(graphed(ours), graphed(peer), ours, copy)
    limit = ("device copy, read and written", copied / min(bound))
    name = f"decode {batch} x {tokens}, {str(dtype)[6:]}, {HEADS}/{KV_HEADS} x {HEAD_DIM}"
    work = size * layers / 1e9
    return [
        row(name, "GB/s", work, mine, ("torch SDPA on contiguous KV", theirs), limit),
        row(f"{name}, one call", "GB/s", work, eager, None, limit),
    ]


def measure_decode() -> Iterator[Measure]:
    """The share of the copy bandwidth at which keys and values are read."""
    yield "decode 32 x 8192", lambda: _decode_rows(32, 8192, 1, torch.bfloat16)
    yield "decode 1 x 32768", lambda: _decode_rows(1, 32768, 6, torch.bfloat16)
    yield "decode 8 x 2048", lambda: _decode_rows(8, 2048, 8, torch.bfloat16)
    yield "decode 8 x 8192 float32", lambda: _decode_rows(8, 8192, 2, torch.float32)


def _prefill_rows(new: int, cached: int) -> list[dict[str, Any]]:
    tokens, dtype, scale = new + cached, torch.bfloat16, HEAD_DIM**-0.5
    keys, values, tables = paged_kv(1, tokens, dtype)
    query = torch.randn(new, HEADS, HEAD_DIM, device=DEVICE, dtype=dtype)
    lengths = [torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (new, tokens)]
    out = torch.empty_like(query)
    arrays: Any = (query, keys, values, tables, *lengths)
    work = 4 * HEADS * HEAD_DIM * (new * cached + new * (new + 1) / 2) / 1e12

    launch = partial(attention_cuda.launch_prefill, *arrays)

    def warps(count: int) -> Callable[[], object]:
        return graphed(partial(launch, scale=scale, out=out, warps=count))

    from torch.nn.attention.bias import causal_lower_right

    dense = query.transpose(0, 1)[None].contiguous()
    flat: Any = [kv.repeat_interleave(HEADS // KV_HEADS, 1) for kv in contiguous_kv(1, tokens, dtype)]
    mask: Any = causal_lower_right(new, tokens)

    def peer() -> None:
        scaled_dot_product_attention(dense, flat[0], flat[1], attn_mask=mask, scale=scale)

    try:
        peer()
    except Exception:  # a torch that has no kernel for this mask: then the same as a table
        mask = torch.ones(new, tokens, dtype=torch.bool, device=DEVICE).tril(cached)

    def public() -> None:
        kernels_numba.paged_attention_prefill(*arrays, scale=scale, out=out)

    multiply, multiplied = multiplier()
    four, eight, theirs, eager, bound = seconds(warps(4), warps(8), graphed(peer), public, multiply)
    limit = ("bfloat16 matrix product", multiplied / min(bound))
    beside = ("torch SDPA on contiguous KV", theirs)
    name = f"prefill {new} new after {cached}, bfloat16, {HEADS}/{KV_HEADS} x {HEAD_DIM}"
    return [
        row(f"{name}, 4 warps", "TFLOP/s", work, four, beside, limit),
        row(f"{name}, 8 warps", "TFLOP/s", work, eight, beside, limit),
        row(f"{name}, one call", "TFLOP/s", work, eager, beside, limit),
    ]


def measure_prefill() -> Iterator[Measure]:
    """The share of the measured matrix rate, beside SDPA."""
    yield "prefill 4096 + 4096", lambda: _prefill_rows(4096, 4096)
    yield "prefill 512 + 7680", lambda: _prefill_rows(512, 7680)


def _mover_rows(layers: int, kv_heads: int, head_dim: int, pages: int) -> list[dict[str, Any]]:
    """Half of the pages, 8 a block, to blocks and back; bytes are counted read and written."""
    shape = (layers, 2, pages, kv_heads, PAGE, head_dim)
    caches = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.randperm(pages, device=DEVICE)[: pages // 2].int().view(-1, 8)
    out = torch.empty(
        (ids.shape[0], layers, 2, kv_heads, 8 * PAGE, head_dim), device=DEVICE, dtype=torch.bfloat16
    )
    work, (copy, copied) = 2 * out.numel() * 2 / 1e9, copier()

    def ours() -> None:
        kernels_numba.gather_blocks(caches, ids, out)

    gather, scatter, eager, bound = seconds(
        graphed(ours), graphed(lambda: kernels_numba.scatter_blocks(out, caches, ids)), ours, copy
    )
    limit = ("device copy", copied / min(bound))
    what = f"{out.numel() * 2 / 2**20:.0f} MiB, {layers} layers, {kv_heads} x {head_dim}"
    return [
        row(f"gather_blocks {what}", "GB/s", work, gather, None, limit),
        row(f"scatter_blocks {what}", "GB/s", work, scatter, None, limit),
        row(f"gather_blocks {what}, one call", "GB/s", work, eager, None, limit),
    ]


def _page_rows(layers: int, pages: int, tokens: int) -> list[dict[str, Any]]:
    caches = torch.randn(layers, 2, pages, KV_HEADS, PAGE, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    order = torch.randperm(pages, device=DEVICE).int()
    sources, targets = order[: pages // 2].clone(), order[pages // 2 :].clone()
    copy, copied = copier()
    work = 2 * caches.numel() / 2 * 2 / 1e9
    keys, values, _ = paged_kv(1, tokens, torch.bfloat16)
    fused = torch.randn(tokens, 2, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.arange(tokens, device=DEVICE)
    angles = torch.rand(tokens, 1, HEAD_DIM // 2, device=DEVICE)
    tables = torch.cat((angles, angles), -1), torch.cat((-angles, angles), -1)
    new: Any = (fused[:, 0], fused[:, 1], keys, values, slots)
    mine, tokens_moved, turned, bound = seconds(
        graphed(lambda: kernels_numba.copy_pages(caches, sources, targets)),
        graphed(lambda: kernels_numba.scatter_kv(*new)),
        graphed(lambda: kernels_numba.scatter_kv(*new, rotary=tables, positions=slots)),
        copy,
    )
    limit = ("device copy", copied / min(bound))
    moved, table_gb = 2 * fused.numel() * 2 / 1e9, 2 * tables[0].numel() * 4 / 1e9
    return [
        row(f"copy_pages {pages // 2} pages, {layers} layers", "GB/s", work, mine, None, limit),
        row(f"scatter_kv {tokens} tokens", "GB/s", moved, tokens_moved, None, limit),
        row(f"scatter_kv {tokens} tokens, turned", "GB/s", moved + table_gb, turned, None, limit),
    ]


def _codec_rows(name: str, layers: int, kv_heads: int, head_dim: int, pages: int) -> list[dict[str, Any]]:
    """Half of the pages, 8 a block, encoded and decoded; bytes are those read and written, of both sizes."""
    own, dtype = codec(name), torch.bfloat16
    caches = torch.randn(layers, 2, pages, kv_heads, PAGE, head_dim, device=DEVICE, dtype=dtype)
    ids = torch.randperm(pages, device=DEVICE)[: pages // 2].int().view(-1, 8)
    shape = (ids.shape[0], layers, 2, kv_heads, own.unit_nbytes(8 * PAGE, head_dim, 2))
    out = torch.empty(shape, device=DEVICE, dtype=torch.uint8)
    copy, copied = copier()
    encode, decode, bound = seconds(
        graphed(lambda: kernels_numba.gather_blocks(caches, ids, out, codec=own)),
        graphed(lambda: kernels_numba.scatter_blocks(out, caches, ids, codec=own)),
        copy,
    )
    limit = ("device copy", copied / min(bound))
    work = (out.numel() + caches.numel() // 2 * 2) / 1e9
    what = f"{name}, {layers} layers, {kv_heads} x {head_dim}, {str(dtype)[6:]}"
    return [
        row(f"encode {what}", "GB/s", work, encode, None, limit),
        row(f"decode {what}", "GB/s", work, decode, None, limit),
    ]


def measure_codecs() -> Iterator[Measure]:
    """The share of the copy bandwidth, beside that of the codec that changes nothing."""
    for name in ("none", "bfloat16", "int8", "int4", "fp8"):
        yield name, partial(_codec_rows, name, 32, 8, 128, 512)


def measure_blocks() -> Iterator[Measure]:
    """The share of the copy bandwidth."""
    yield "movers, 32 layers 8 x 128", lambda: _mover_rows(32, 8, 128, 512)
    yield "movers, 30 layers 3 x 64", lambda: _mover_rows(30, 3, 64, 2048)
    yield "pages and tokens", partial(_page_rows, 32, 256, 1 << 17)
