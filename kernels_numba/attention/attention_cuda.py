"""Paged attention on CUDA: what attention_decode and attention_prefill launch, and the plain rungs.

Those two hold the interface, the checks and the index mapping. The ladder:
    v1  one thread a number of the output: each computes all scores for itself, head_dim times too often
    v1 shared  one block for a (token, head) row: threads take a key each and share the scores, so that each
        score is computed once; keys and values are read once for each row
    v2  attention_tiles_cuda: one block for a few rows; any element type, head_dim and alignment
    v3  decode: attention_decode_cuda, contexts in pieces    prefill: attention_mma_cuda, tensor cores
    v4  decode: attention_mma_cuda, pieces on tensor cores
All of them run in the simulator and lower to PTX. launch_prefill and launch_decode choose.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kernels_numba.arrays import dtype_name
from kernels_numba.attention.attention_decode_cuda import LOG2_E, launch_split
from kernels_numba.attention.attention_mma_cuda import HEAD_DIMS, bounds, make_attend, prefill_warps
from kernels_numba.attention.attention_rungs import LOWEST, MAX_CHANNELS, NAN, ONE, THREADS, ZERO, rung
from kernels_numba.attention.attention_rungs import MAX_HEAD_DIM as MAX_HEAD_DIM
from kernels_numba.attention.attention_tiles_cuda import launch_tiled
from kernels_numba.checks import NO_WINDOW
from kernels_numba.gpu.backend_cuda import addresses, aligned, compiled, cuda, narrow, on_its_device, widen


def attention_v1(query, key_cache, value_cache, block_tables, query_lens, context_lens, out, scale, window):
    """One thread for each number of out: it computes every score of its row, and keeps nothing for others.

        query, out              (rows, heads, head_dim): the new tokens of all sequences, one after the other;
                                heads // kv_heads neighbouring heads share a kv head
        key_cache, value_cache  (pages, kv_heads, page_size, head_dim)
        block_tables            (batch, max_pages) int32; entries past a sequence's end may hold any number
        query_lens              (batch,) int32: new tokens of a sequence, 0 too; together they are all rows
        context_lens            (batch,) int32: all its tokens. New token i has position context - new + i
        scale, window           factor of the scores; a token sees itself and the window - 1 before it

    Launched with THREADS threads a block, and with one thread for each number of `out` or a few more. Reads
    elements through widen(element), and writes narrow(number, out). A context of 0 gives zeros.
    """
    # labs:begin 1d
    at = cuda.grid(1)
    heads, head_dim = query.shape[1], query.shape[2]
    if at >= query.shape[0] * heads * head_dim:
        return
    row, head, channel = at // (heads * head_dim), at // head_dim % heads, at % head_dim
    page_size = key_cache.shape[2]
    h = head // (heads // key_cache.shape[1])
    b, first = 0, 0
    while row >= first + query_lens[b]:
        first += query_lens[b]
        b += 1
    visible = context_lens[b] - query_lens[b] + (row - first) + 1
    highest, total, value = LOWEST, ZERO, ZERO
    for sweep in range(2):
        for t in range(max(0, visible - window), visible if context_lens[b] > 0 else 0):
            page, s = block_tables[b, t // page_size], t % page_size
            score = ZERO
            for d in range(head_dim):
                score += widen(query[row, head, d]) * widen(key_cache[page, h, s, d])
            if sweep == 0:
                highest = max(highest, score * scale)
            else:
                weight = math.exp(score * scale - highest)
                total += weight
                value += weight * widen(value_cache[page, h, s, channel])
    if total == ZERO:  # no token, or scores of minus infinity only
        value, total = ZERO if context_lens[b] == 0 else NAN, ONE
    out[row, head, channel] = narrow(value / total, out)
    # labs:end 1d


def attention_v1_shared(
    query, key_cache, value_cache, block_tables, query_lens, context_lens, out, scale, window
):
    """One block for out[row, head]: its threads share the scores, and no score is computed twice.

    block x  -> new token `row`     block y -> query head
    thread i -> here: key start + i of the tile while scoring; channels i, i + THREADS, ... while summing
    scores   (THREADS,) float32, shared: one barrier after its writes, one after its reads

    Arguments and results are those of attention_v1. Launched with a grid of (rows, heads) blocks of THREADS
    threads; head_dim is at most MAX_HEAD_DIM, which is THREADS * MAX_CHANNELS.
    """
    # labs:begin 1e
    row, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    head_dim, page_size = query.shape[2], key_cache.shape[2]
    h = head // (query.shape[1] // key_cache.shape[1])
    b, first = 0, 0
    while row >= first + query_lens[b]:
        first += query_lens[b]
        b += 1
    end = context_lens[b] - query_lens[b] + (row - first) + 1 if context_lens[b] > 0 else 0
    scores = cuda.shared.array(THREADS, np.float32)
    sums = cuda.local.array(MAX_CHANNELS, np.float32)
    for c in range(MAX_CHANNELS):
        sums[c] = ZERO
    highest, total = LOWEST, ZERO
    for start in range(max(0, end - window), end, THREADS):
        count = min(THREADS, end - start)
        if thread < count:
            page, s = block_tables[b, (start + thread) // page_size], (start + thread) % page_size
            score = ZERO
            for d in range(head_dim):
                score += widen(query[row, head, d]) * widen(key_cache[page, h, s, d])
            scores[thread] = score * scale
        cuda.syncthreads()
        top = highest
        for k in range(count):
            top = max(top, scores[k])
        shrink = math.exp(highest - top)
        highest, total = top, total * shrink
        for c in range(MAX_CHANNELS):
            sums[c] *= shrink
        for k in range(count):
            page, s = block_tables[b, (start + k) // page_size], (start + k) % page_size
            weight = math.exp(scores[k] - highest)
            total += weight
            for c in range((head_dim - thread + THREADS - 1) // THREADS):
                sums[c] += weight * widen(value_cache[page, h, s, c * THREADS + thread])
        cuda.syncthreads()
    for c in range((head_dim - thread + THREADS - 1) // THREADS):
        mean = sums[c] / total if total > ZERO else NAN  # scores of minus infinity only
        out[row, head, c * THREADS + thread] = narrow(mean if end > 0 else ZERO, out)
    # labs:end 1e


@on_its_device
def launch_prefill(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    tables: Any,
    new: Any,
    lens: Any,
    scale: float,
    out: Any,
    window: int = NO_WINDOW,
    *,
    warps: int = 0,
) -> None:
    """v3 where it fits, else v2, on device arrays that paged_attention_prefill has checked.

    Reads no length on the host, so it neither waits for the device nor breaks the capture of a graph: the
    grid covers the worst case. warps: of a v3 block; 0 chooses them by the group.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, page_size = key_cache.shape[1:3]
    element, group = dtype_name(query), heads // kv_heads
    if element == "float32" or head_dim not in HEAD_DIMS or not aligned(query, key_cache, value_cache, out):
        launch_tiled(query, key_cache, value_cache, tables, new, lens, scale, out, window)
        return
    warps = warps or prefill_warps(group)
    step = warps * 16 // group
    tiles = min(query.shape[0], query.shape[0] // step + lens.shape[0])
    pointers, stream = addresses(query, key_cache, value_cache, tables, new, lens, out)
    sizes = (lens.shape[0], heads, kv_heads, page_size, tables.shape[1], 1)
    attend = make_attend(element, head_dim, False, warps)
    compiled(attend, shared=True, bounds=bounds(warps))[(tiles, kv_heads), warps * 32, stream](
        *pointers, *(np.int64(n) for n in sizes), np.float32(scale * LOG2_E), np.int64(window)
    )


launch_plain = rung(attention_v1, lambda query, *_: -(-math.prod(query.shape) // THREADS))
"""v1, for tests and for comparison."""
launch_shared = rung(attention_v1_shared, lambda query, *_: query.shape[:2])
"""v1 shared, for tests, for comparison and for the labs."""


@on_its_device
def launch_decode(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    tables: Any,
    lens: Any,
    scale: float,
    out: Any,
    window: int = NO_WINDOW,
) -> None:
    """v4 or v3 on device arrays that paged_attention_decode has checked; v2 where the arrays begin at odd
    addresses."""
    if aligned(query, key_cache, value_cache):
        launch_split(query, key_cache, value_cache, tables, lens, scale, out, window)
    else:
        launch_tiled(query, key_cache, value_cache, tables, _ones(lens), lens, scale, out, window)


def _ones(lens: Any) -> Any:
    """A one for each sequence: torch's allocator knows graphs, Numba's are made once and kept."""
    if getattr(lens, "__cuda_ndarray__", False):
        return _numba_ones(lens.shape[0])
    import torch

    return torch.ones_like(lens)


@functools.cache
def _numba_ones(count: int) -> Any:
    return cuda.to_device(np.ones(count, np.int32))
