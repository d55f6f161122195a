"""Paged attention for decode: one new token a sequence over keys and values that lie in pages.

Called by the model's forward pass once a layer and step. Knows arrays, not requests. The ladder:
    v0  NumPy in float64, the oracle of the tests
    v1  plain loops, one (sequence, head) after the other: every query head reads the keys for itself
    v2  query heads of a group share each key row, in one pass over the pages (online softmax)
        the cores of these three lie in attention_plain.py
    v3  attention_decode_tiles.py: sums in registers, prefetched pages, contexts split over the cores
Milliseconds, float32, 2 cores with AVX-512, 8 x 2048 tokens, 9/3 heads x 64; 4 x 4096, 32/8 x 128:
    v1 47 and 551, v2 2.7 and 22 (one core); v3 1.35 and 15 on one core, 0.77 and 7.4 on two

Index mapping, the same in every rung:

    query        (batch, heads, head_dim)                    out has its shape
    key_cache    (pages, kv_heads, page_size, head_dim)      value_cache as well
    block_tables (batch, max_pages) int32                    logical page -> physical page
    context_lens (batch,) int32                              tokens to look at, the newest included

    head --- // group, group = heads // kv_heads ----------------> kv head h -+
    token t -+- t // page_size -> logical page -- block_tables[b] -> page p --+-> key_cache[p, h, s, :]
             `- t %  page_size -> row s --------------------------------------+
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.attention.attention_decode_tiles import decode_v3
from kernels_numba.attention.attention_plain import add_tokens, attend, gathered
from kernels_numba.checks import (
    NO_WINDOW,
    check_attention,
    check_tables,
    check_window,
    plain_views,
    raise_for_table,
)
from kernels_numba.errors import RangeError
from kernels_numba.intrinsics.numerics import LOWEST, store, widen
from kernels_numba.runtime import FAST, PARALLEL_CALL, get_num_threads, njit

_ZERO = np.float32(0.0)
_ALL = np.empty(0, np.int64)


def paged_attention_decode(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    scale: float,
    out: Any = None,
    window: int | None = None,
    split: int = 0,
) -> Any:
    """Attention of one new token a sequence; returns `out`, of the query's kind, shape and dtype.

        query                   (batch, heads, head_dim) float32, float16 or bfloat16
        key_cache, value_cache  (pages, kv_heads, page_size, head_dim), the query's dtype; the new token is in
        block_tables            (batch, max_pages) int32; entries past a sequence's end, and of pages
                                wholly before its window, are never read
        context_lens            (batch,) int32; 0 gives a row of zeros
        scale                   factor of the scores, usually head_dim ** -0.5
        out                     optional; written in place
        window                  optional; tokens that are looked at, the newest ones
        split                   on the CPU. 0: contexts are shared out over the threads as suits this batch.
                                Else they are summed in pieces that end at multiples of so many tokens (of
                                whole pages): the bits of a sequence then do not depend on the other
                                sequences, the threads or the pages

    NumPy arrays and torch CPU tensors may be mixed and run on the CPU; torch CUDA tensors and Numba device
    arrays run on the GPU, on torch's current stream. bfloat16 is ml_dtypes.bfloat16 or uint16 in NumPy.
    What unused pages and slots hold never matters; of a sequence and head that see a score which is NaN or
    plus infinity, or only minus infinity, the result is NaN (no error). Sums are in float32.

    Raises ShapeError, DtypeError, LayoutError, KindError, RangeError (errors.py); RangeError (a page id or a
    length out of range) on the CPU only.
    """
    out = arrays.empty_like(query) if out is None else out
    limit = check_window(window)
    views = plain_views(query, key_cache, value_cache, block_tables, context_lens, out)
    device = arrays.CPU
    if views is None:
        device = check_attention(query, key_cache, value_cache, block_tables, context_lens, out)
    batch = query.shape[0]
    if views is None or views[3].shape[:-1] != (batch,) or views[4].shape != (batch,):
        arrays.check_shape("block_tables", block_tables, batch, "max_pages")
        arrays.check_shape("context_lens", context_lens, batch)
    if batch == 0:
        return out
    if split < 0 or (split and device == arrays.CUDA):
        raise RangeError("split", split, "0, or on the CPU a number of tokens")
    if device == arrays.CUDA:
        from kernels_numba.attention.attention_cuda import launch_decode

        launch_decode(query, key_cache, value_cache, block_tables, context_lens, scale, out, limit)
        return out
    if views is None:
        views = [arrays.as_numpy(a) for a in (query, key_cache, value_cache, block_tables, context_lens, out)]
    lens, cache = views[4], views[1].shape
    read_from = _ALL if limit == NO_WINDOW else lens.astype(np.int64) - limit
    raise_for_table(check_tables(views[3], lens, cache[0], cache[2], read_from), views[3], lens, cache)
    with PARALLEL_CALL:
        decode_v3(*views, float(scale), limit, split, get_num_threads())
    return out


def decode_v0(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    scale: float,
    window: int = NO_WINDOW,
) -> np.ndarray:
    """The oracle: gather a sequence's keys and values, then softmax(q K^T scale) V in float64."""
    group = query.shape[1] // key_cache.shape[1]
    out = np.zeros(query.shape)
    for b, length in enumerate(context_lens):
        first = max(0, length - window)
        keys, values = (
            gathered(cache, block_tables[b], first, length).astype(np.float64)
            for cache in (key_cache, value_cache)
        )
        for head in range(query.shape[1] if length else 0):
            scores = keys[:, head // group] @ query[b, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[b, head] = weights @ values[:, head // group] / weights.sum()
    return out


@njit(cache=True, nogil=True)
def decode_v1(query, key_cache, value_cache, block_tables, context_lens, out, scale, window):
    """Plain: one (sequence, head) after the other, in two passes over the scores."""
    group = query.shape[1] // key_cache.shape[1]
    for b in range(query.shape[0]):
        length = context_lens[b]
        first = max(0, length - window)
        scores = np.empty(length, np.float32)
        for head in range(query.shape[1]):
            keys, values = key_cache[:, head // group], value_cache[:, head // group]
            attend(query[b, head], keys, values, block_tables[b], first, length, scale, scores, out[b, head])


@njit(cache=True, nogil=True, fastmath=FAST)
def decode_v2(query, key_cache, value_cache, block_tables, context_lens, out, scale, window):
    """Grouped: a group's heads take turns on each row while it is near; the softmax grows page by page."""
    heads, head_dim = query.shape[1:]
    kv_heads, page_size = key_cache.shape[1:3]
    group = heads // kv_heads
    scores = np.empty((group, page_size), np.float32)
    highest, totals = np.empty(group, np.float32), np.empty(group, np.float32)
    sums = np.empty((group, head_dim), np.float32)
    for b in range(query.shape[0]):
        length = context_lens[b]
        begin = max(0, length - window)
        for h in range(kv_heads):
            highest[:], totals[:], sums[:] = LOWEST, _ZERO, _ZERO
            for i in range(begin // page_size, (length + page_size - 1) // page_size):
                page = block_tables[b, i]
                first, last = max(0, begin - i * page_size), min(page_size, length - i * page_size)
                for s in range(first, last):
                    for g in range(group):
                        dot = _ZERO
                        for d in range(head_dim):
                            dot += widen(query[b, h * group + g, d]) * widen(key_cache[page, h, s, d])
                        scores[g, s] = dot * np.float32(scale)
                rows = value_cache[page, h, first:last]
                for g in range(group):
                    highest[g], totals[g] = add_tokens(
                        scores[g, first:last], rows, highest[g], totals[g], sums[g]
                    )
            for g in range(group):
                for d in range(head_dim):
                    store(out, (b, h * group + g, d), sums[g, d] / totals[g] if length > 0 else _ZERO)
