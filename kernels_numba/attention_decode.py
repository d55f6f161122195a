"""Paged attention for decode: one new token a sequence over keys and values that lie in pages.

Called by the model's forward pass once a layer and step. Knows arrays, not requests. The ladder:
    v0  NumPy in float64, the oracle of the tests
    v1  plain loops, one (sequence, head) after the other: every query head reads the keys for itself
    v2  query heads of a group share each key row; long contexts are split, so that a small batch still fills
        the cores; all inner loops vectorise. Measured: docs/explain/paged-attention.md.

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
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.checks import check_attention, check_tables, raise_for_table
from kernels_numba.numerics import LOG2_E, LOWEST, exp2_of_negative, store, widen
from kernels_numba.runtime import FAST, PARALLEL_CALL, get_num_threads, njit, prange

TILE_TOKENS = 128
"""Keys between two updates of the running maximum; the scores of a group then stay in the nearest cache."""
MIN_SPLIT_TOKENS = 256
"""A shorter piece of a context costs more to merge than it wins."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def paged_attention_decode(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    scale: float,
    out: Any = None,
) -> Any:
    """Attention of one new token a sequence; returns `out`, of the query's kind, shape and dtype.

        query                   (batch, heads, head_dim) float32 or bfloat16
        key_cache, value_cache  (pages, kv_heads, page_size, head_dim), the query's dtype; the new token is in
        block_tables            (batch, max_pages) int32; entries past a sequence's end are never read
        context_lens            (batch,) int32; 0 gives a row of zeros
        scale                   factor of the scores, usually head_dim ** -0.5
        out                     optional; written in place

    NumPy arrays and torch CPU tensors may be mixed and run on the CPU; torch CUDA tensors and Numba device
    arrays run on the GPU, on torch's current stream. bfloat16 is ml_dtypes.bfloat16 or uint16 in NumPy.
    What unused pages and slots hold never matters. Sums are in float32.

    Raises ShapeError, DtypeError, LayoutError, KindError, RangeError (errors.py); RangeError (a page id or a
    length out of range) on the CPU only.
    """
    out = arrays.empty_like(query) if out is None else out
    device = check_attention(query, key_cache, value_cache, block_tables, context_lens, out)
    arrays.check_shape("block_tables", block_tables, query.shape[0], "max_pages")
    arrays.check_shape("context_lens", context_lens, query.shape[0])
    if query.shape[0] == 0:
        return out
    if device == arrays.CUDA:
        from kernels_numba.attention_cuda import launch_decode

        launch_decode(query, key_cache, value_cache, block_tables, context_lens, scale, out)
        return out
    views = [arrays.as_numpy(a) for a in (query, key_cache, value_cache, block_tables, context_lens, out)]
    raise_for_table(
        check_tables(views[3], views[4], *views[1].shape[::2]), views[3], views[4], views[1].shape
    )
    with PARALLEL_CALL:
        _decode_v2(*views, float(scale), get_num_threads())
    return out


def decode_v0(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    scale: float,
) -> np.ndarray:
    """The oracle: gather a sequence's keys and values, then softmax(q K^T scale) V in float64."""
    group = query.shape[1] // key_cache.shape[1]
    page_size = key_cache.shape[2]
    out = np.zeros(query.shape)
    for b, length in enumerate(context_lens):
        pages = block_tables[b, : -(-length // page_size)]
        for head in range(query.shape[1] if length else 0):
            keys = key_cache[pages, head // group].reshape(-1, query.shape[2])[:length].astype(np.float64)
            values = value_cache[pages, head // group].reshape(-1, query.shape[2])[:length].astype(np.float64)
            scores = keys @ query[b, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[b, head] = weights @ values / weights.sum()
    return out


@njit(cache=True, nogil=True)
def decode_v1(query, key_cache, value_cache, block_tables, context_lens, out, scale):
    """Plain: one (sequence, head) after the other, in two passes over the scores."""
    batch, heads, head_dim = query.shape
    page_size = key_cache.shape[2]
    group = heads // key_cache.shape[1]
    for b in range(batch):
        length = context_lens[b]
        scores = np.empty(length, np.float32)
        for head in range(heads):
            highest = LOWEST
            for t in range(length):
                page, row = block_tables[b, t // page_size], t % page_size
                dot = _ZERO
                for d in range(head_dim):
                    dot += widen(query[b, head, d]) * widen(key_cache[page, head // group, row, d])
                scores[t] = dot * np.float32(scale)
                highest = max(highest, scores[t])
            total = _ZERO
            for t in range(length):
                scores[t] = np.exp(scores[t] - highest)
                total += scores[t]
            for d in range(head_dim):
                value = _ZERO
                for t in range(length):
                    page, row = block_tables[b, t // page_size], t % page_size
                    value += scores[t] * widen(value_cache[page, head // group, row, d])
                store(out, (b, head, d), value / total if length > 0 else _ZERO)


@njit(cache=True, nogil=True, fastmath=FAST)
def _score_rows(queries, group, key_cache, page, kv_head, rows, scores, column):
    """scores[g, column + s] = queries[g] . key row s, for all g: a key row is read once per four heads."""
    head_dim = key_cache.shape[3]
    for s in range(rows):
        g = 0
        while g < group:
            left = group - g
            if left >= 4:
                a0, a1, a2, a3 = _ZERO, _ZERO, _ZERO, _ZERO
                for d in range(head_dim):
                    key = widen(key_cache[page, kv_head, s, d])
                    a0 += queries[g, d] * key
                    a1 += queries[g + 1, d] * key
                    a2 += queries[g + 2, d] * key
                    a3 += queries[g + 3, d] * key
                scores[g, column + s], scores[g + 1, column + s] = a0, a1
                scores[g + 2, column + s], scores[g + 3, column + s] = a2, a3
                g += 4
            elif left == 3:
                a0, a1, a2 = _ZERO, _ZERO, _ZERO
                for d in range(head_dim):
                    key = widen(key_cache[page, kv_head, s, d])
                    a0 += queries[g, d] * key
                    a1 += queries[g + 1, d] * key
                    a2 += queries[g + 2, d] * key
                scores[g, column + s], scores[g + 1, column + s], scores[g + 2, column + s] = a0, a1, a2
                g += 3
            else:
                a0 = _ZERO
                for d in range(head_dim):
                    a0 += queries[g, d] * widen(key_cache[page, kv_head, s, d])
                scores[g, column + s] = a0
                g += 1


@njit(cache=True, nogil=True, fastmath=FAST)
def _add_values(weights, group, value_cache, page, kv_head, rows, column, sums):
    """sums[g] += weights[g, column + s] * value row s; four rows at a time save three loads of the sums."""
    head_dim = value_cache.shape[3]
    for g in range(group):
        s = 0
        while s + 4 <= rows:
            w0, w1 = weights[g, column + s], weights[g, column + s + 1]
            w2, w3 = weights[g, column + s + 2], weights[g, column + s + 3]
            for d in range(head_dim):
                sums[g, d] += (
                    w0 * widen(value_cache[page, kv_head, s, d])
                    + w1 * widen(value_cache[page, kv_head, s + 1, d])
                    + w2 * widen(value_cache[page, kv_head, s + 2, d])
                    + w3 * widen(value_cache[page, kv_head, s + 3, d])
                )
            s += 4
        while s < rows:
            w0 = weights[g, column + s]
            for d in range(head_dim):
                sums[g, d] += w0 * widen(value_cache[page, kv_head, s, d])
            s += 1


@njit(cache=True, nogil=True, fastmath=FAST)
def _soften(scores, group, count, highest, totals, sums):
    """Online softmax of one tile: scores become weights, older sums shrink to the new maximum."""
    for g in range(group):
        top = highest[g]
        for t in range(count):
            top = max(top, scores[g, t])
        shrink = exp2_of_negative(highest[g] - top)
        total = totals[g] * shrink
        for t in range(count):
            scores[g, t] = exp2_of_negative(scores[g, t] - top)
        for t in range(count):
            total += scores[g, t]
        highest[g], totals[g] = top, total
        for d in range(sums.shape[1]):
            sums[g, d] *= shrink


@njit(cache=True, nogil=True, fastmath=FAST)
def _decode_piece(queries, group, key_cache, value_cache, table, kv_head, first, last, scores, part):
    """A group over tokens [first, last), first on a page border; part = (highest, totals, sums)."""
    page_size = key_cache.shape[2]
    highest, totals, sums = part
    highest[:], totals[:], sums[:] = LOWEST, _ZERO, _ZERO
    tile_pages = max(1, TILE_TOKENS // page_size)
    start = first
    while start < last:
        stop = min(last, start + tile_pages * page_size)
        for t in range(start, stop, page_size):
            rows = min(page_size, stop - t)
            _score_rows(queries, group, key_cache, table[t // page_size], kv_head, rows, scores, t - start)
        _soften(scores, group, stop - start, highest, totals, sums)
        for t in range(start, stop, page_size):
            rows = min(page_size, stop - t)
            _add_values(scores, group, value_cache, table[t // page_size], kv_head, rows, t - start, sums)
        start = stop


@njit(cache=True, nogil=True)
def _plan_pieces(context_lens, kv_heads, page_size, workers):
    """Pieces of equal length, a few per worker: (pieces, 3) rows of sequence, first token, last token."""
    tokens = 0
    for length in context_lens:
        tokens += length
    piece = max(MIN_SPLIT_TOKENS, tokens * kv_heads // (4 * workers))
    piece = (piece + page_size - 1) // page_size * page_size
    count = 0
    for length in context_lens:
        count += (length + piece - 1) // piece
    pieces = np.empty((count, 3), np.int64)
    i = 0
    for b in range(context_lens.shape[0]):
        for first in range(0, context_lens[b], piece):
            pieces[i, 0], pieces[i, 1], pieces[i, 2] = b, first, min(first + piece, context_lens[b])
            i += 1
    return pieces


@njit(cache=True, nogil=True, fastmath=FAST)
def _merge_pieces(pieces, highest, totals, sums, group, out):
    """out = the pieces of each sequence, weighed by what their maxima say; zeros where there is no piece."""
    heads, head_dim = out.shape[1:]
    merged = np.empty(head_dim, np.float32)
    i = 0
    for b in range(out.shape[0]):
        begin = i
        while i < pieces.shape[0] and pieces[i, 0] == b:
            i += 1
        for head in range(heads):
            h, g = head // group, head % group
            top, total = LOWEST, _ZERO
            merged[:] = _ZERO
            for p in range(begin, i):
                top = max(top, highest[p, h, g])
            for p in range(begin, i):
                weight = exp2_of_negative(highest[p, h, g] - top)
                total += weight * totals[p, h, g]
                for d in range(head_dim):
                    merged[d] += weight * sums[p, h, g, d]
            share = _ONE / total if i > begin else _ZERO
            for d in range(head_dim):
                store(out, (b, head, d), merged[d] * share)


@njit(cache=True, nogil=True, parallel=True)
def _decode_v2(query, key_cache, value_cache, block_tables, context_lens, out, scale, workers):
    """Deals (piece of a context, kv head) to the workers like cards, then merges the pieces."""
    heads, head_dim = query.shape[1:]
    kv_heads, page_size = key_cache.shape[1:3]
    group = heads // kv_heads
    pieces = _plan_pieces(context_lens, kv_heads, page_size, workers)
    highest = np.empty((pieces.shape[0], kv_heads, group), np.float32)
    totals = np.empty((pieces.shape[0], kv_heads, group), np.float32)
    sums = np.empty((pieces.shape[0], kv_heads, group, head_dim), np.float32)
    factor = np.float32(scale * LOG2_E)  # the softmax is in powers of two
    for worker in prange(workers):
        scores = np.empty((group, max(TILE_TOKENS, page_size)), np.float32)
        queries = np.empty((group, head_dim), np.float32)
        for item in range(worker, pieces.shape[0] * kv_heads, workers):
            p, h = item // kv_heads, item % kv_heads
            b = pieces[p, 0]
            for g in range(group):
                for d in range(head_dim):
                    queries[g, d] = widen(query[b, h * group + g, d]) * factor
            part = (highest[p, h], totals[p, h], sums[p, h])
            first, last = pieces[p, 1], pieces[p, 2]
            _decode_piece(
                queries, group, key_cache, value_cache, block_tables[b], h, first, last, scores, part
            )
    _merge_pieces(pieces, highest, totals, sums, group, out)
