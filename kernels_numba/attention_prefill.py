"""Paged attention for prefill: many new tokens a sequence, after a prefix that may be cached already.

Called by the model's forward pass once a layer and chunk. Knows arrays, not requests. The ladder:
    v0  NumPy in float64, the oracle of the tests
    v1  plain loops, one (token, head) after the other
    v2  tiles with online softmax. The new tokens of a tile and all query heads of a group lie side by side as
        up to LANES columns; keys and values are then read as single numbers straight from their pages, each
        once for all columns, and every inner loop runs along the columns. Nothing is gathered or transposed
        but the queries. Measured: docs/explain/paged-attention.md.

Index mapping:

    query       (sum of query_lens, heads, head_dim)   the new tokens of all sequences, one after the other
    key_cache   (pages, kv_heads, page_size, head_dim)
    sequence b: context_lens[b] tokens, the last query_lens[b] of them new and already in the cache

    new token i of b --- position p = context_lens[b] - query_lens[b] + i, sees tokens 0 .. p
    column c of a tile --+- c // group -> new token of the tile
                         `- c %  group -> query head of the group
    token t -+- t // page_size -> logical page -- block_tables[b] -> page -+-> key_cache[page, h, s, :]
             `- t %  page_size -> row s -----------------------------------+

    scores (tokens, columns) = keys (tokens, head_dim)    @ queries (head_dim, columns)
    sums (head_dim, columns) += values^T (head_dim, tokens) @ weights (tokens, columns)   the same loop twice
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.checks import check_attention, check_tables, raise_for_table
from kernels_numba.errors import RangeError
from kernels_numba.numerics import LOG2_E, LOWEST, exp2_of_negative, store, widen
from kernels_numba.runtime import FAST, PARALLEL_CALL, get_num_threads, njit, prange

LANES = 128
"""Columns of a tile. A constant of the compilation, so that rows of the scratch lie at known distances and
the loops vectorise without checks for overlap; queries, scores and sums (32 KiB each) fit the L2."""
TILE_TOKENS = 64
"""Keys of a tile, in whole pages (one page where it is longer)."""

_ROW, _ROW_2, _ROW_3 = np.uint64(LANES), np.uint64(2 * LANES), np.uint64(3 * LANES)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def paged_attention_prefill(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    query_lens: Any,
    context_lens: Any,
    *,
    scale: float,
    out: Any = None,
) -> Any:
    """Causal attention of new tokens over their prefix and themselves; returns `out`, like the query.

        query                   (sum of query_lens, heads, head_dim) float32 or bfloat16
        key_cache, value_cache  (pages, kv_heads, page_size, head_dim), the query's dtype; new tokens are in
        block_tables            (batch, max_pages) int32; entries past a sequence's end are never read
        query_lens              (batch,) int32, new tokens; 0 is allowed
        context_lens            (batch,) int32, all tokens, the new ones included
        scale                   factor of the scores, usually head_dim ** -0.5
        out                     optional; written in place

    Kinds of arrays, dtypes and errors as for paged_attention_decode. RangeError also when a query is longer
    than its context, or when the query lengths do not add up to the rows of `query`; on the CPU only.
    """
    out = arrays.empty_like(query) if out is None else out
    device = check_attention(query, key_cache, value_cache, block_tables, context_lens, out)
    arrays.common_device({"query": query, "query_lens": query_lens})
    arrays.check_integer("query_lens", query_lens, "int32")
    arrays.check_shape("query_lens", query_lens, context_lens.shape[0])
    arrays.check_shape("block_tables", block_tables, context_lens.shape[0], "max_pages")
    arrays.check_contiguous("query_lens", query_lens)
    if query.shape[0] == 0:
        return out
    if device == arrays.CUDA:
        from kernels_numba.attention_cuda import launch_prefill

        launch_prefill(query, key_cache, value_cache, block_tables, query_lens, context_lens, scale, out)
        return out
    q, keys, values, tables, new, lens, result = (
        arrays.as_numpy(a)
        for a in (query, key_cache, value_cache, block_tables, query_lens, context_lens, out)
    )
    raise_for_table(check_tables(tables, lens, *keys.shape[::2]), tables, lens, keys.shape)
    _check_lengths(new, lens, q.shape[0])
    with PARALLEL_CALL:
        _prefill_v2(q, keys, values, tables, new, lens, result, float(scale), get_num_threads())
    return out


def _check_lengths(new: np.ndarray, lens: np.ndarray, rows: int) -> None:
    """RangeError when the lengths contradict each other."""
    wrong = np.flatnonzero((new < 0) | (new > lens))
    if wrong.size:
        b = int(wrong[0])
        raise RangeError(f"query_lens[{b}]", int(new[b]), f"0 to its context_lens, {int(lens[b])}")
    if int(new.sum()) != rows:
        raise RangeError("sum(query_lens)", int(new.sum()), f"the rows of query, {rows}")


def prefill_v0(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_tables: np.ndarray,
    query_lens: np.ndarray,
    context_lens: np.ndarray,
    scale: float,
) -> np.ndarray:
    """The oracle: every new token is one decode step over the tokens up to itself, in float64."""
    from kernels_numba.attention_decode import decode_v0

    sequence = np.repeat(np.arange(len(query_lens)), query_lens)
    visible = [n for new, all_ in zip(query_lens, context_lens) for n in range(all_ - new + 1, all_ + 1)]
    return decode_v0(
        query, key_cache, value_cache, block_tables[sequence], np.array(visible, np.int64), scale
    )


@njit(cache=True, nogil=True)
def prefill_v1(query, key_cache, value_cache, block_tables, query_lens, context_lens, out, scale):
    """Plain: one (token, head) after the other, the softmax over all scores of the token."""
    heads, head_dim = query.shape[1:]
    page_size = key_cache.shape[2]
    group = heads // key_cache.shape[1]
    row = 0
    for b in range(query_lens.shape[0]):
        scores = np.empty(context_lens[b], np.float32)
        for position in range(context_lens[b] - query_lens[b], context_lens[b]):
            for head in range(heads):
                highest, total = LOWEST, _ZERO
                for t in range(position + 1):
                    page, s = block_tables[b, t // page_size], t % page_size
                    dot = _ZERO
                    for d in range(head_dim):
                        dot += widen(query[row, head, d]) * widen(key_cache[page, head // group, s, d])
                    scores[t] = dot * np.float32(scale)
                    highest = max(highest, scores[t])
                for t in range(position + 1):
                    scores[t] = np.exp(scores[t] - highest)
                    total += scores[t]
                for d in range(head_dim):
                    value = _ZERO
                    for t in range(position + 1):
                        page, s = block_tables[b, t // page_size], t % page_size
                        value += scores[t] * widen(value_cache[page, head // group, s, d])
                    store(out, (row, head, d), value / total)
            row += 1


@njit(cache=True, nogil=True, fastmath=FAST)
def _add_product(c, c_row, rows, a, a_start, a_row, a_step, inner, b, b_row, lanes):
    """c[c_row + i, :] += a[i, k] * b[b_row + k, :] for i < rows, k < inner; 4 x 4 numbers of `a` at a time.

    b and c are scratch, flat, LANES columns a row; a[i, k] = a[a_start + i * a_row + k * a_step] is a page.
    Indices of scratch are unsigned: Numba asks of a signed one whether it counts from the end, and the loop
    would not vectorise.
    """
    columns = np.uint64(lanes)
    i = 0
    while i + 4 <= rows:
        k = 0
        c0 = np.uint64((c_row + i) * LANES)
        while k + 4 <= inner:
            at, b0 = a_start + i * a_row + k * a_step, np.uint64((b_row + k) * LANES)
            a00, a01 = widen(a[at]), widen(a[at + a_step])
            a02, a03 = widen(a[at + 2 * a_step]), widen(a[at + 3 * a_step])
            at += a_row
            a10, a11 = widen(a[at]), widen(a[at + a_step])
            a12, a13 = widen(a[at + 2 * a_step]), widen(a[at + 3 * a_step])
            at += a_row
            a20, a21 = widen(a[at]), widen(a[at + a_step])
            a22, a23 = widen(a[at + 2 * a_step]), widen(a[at + 3 * a_step])
            at += a_row
            a30, a31 = widen(a[at]), widen(a[at + a_step])
            a32, a33 = widen(a[at + 2 * a_step]), widen(a[at + 3 * a_step])
            for x in range(columns):
                v0, v1 = b[b0 + x], b[b0 + _ROW + x]
                v2, v3 = b[b0 + _ROW_2 + x], b[b0 + _ROW_3 + x]
                c[c0 + x] += a00 * v0 + a01 * v1 + a02 * v2 + a03 * v3
                c[c0 + _ROW + x] += a10 * v0 + a11 * v1 + a12 * v2 + a13 * v3
                c[c0 + _ROW_2 + x] += a20 * v0 + a21 * v1 + a22 * v2 + a23 * v3
                c[c0 + _ROW_3 + x] += a30 * v0 + a31 * v1 + a32 * v2 + a33 * v3
            k += 4
        while k < inner:
            at, b0 = a_start + i * a_row + k * a_step, np.uint64((b_row + k) * LANES)
            a00, a10 = widen(a[at]), widen(a[at + a_row])
            a20, a30 = widen(a[at + 2 * a_row]), widen(a[at + 3 * a_row])
            for x in range(columns):
                v0 = b[b0 + x]
                c[c0 + x] += a00 * v0
                c[c0 + _ROW + x] += a10 * v0
                c[c0 + _ROW_2 + x] += a20 * v0
                c[c0 + _ROW_3 + x] += a30 * v0
            k += 1
        i += 4
    while i < rows:
        c0 = np.uint64((c_row + i) * LANES)
        for k in range(inner):
            a00, b0 = widen(a[a_start + i * a_row + k * a_step]), np.uint64((b_row + k) * LANES)
            for x in range(columns):
                c[c0 + x] += a00 * b[b0 + x]
        i += 1


@njit(cache=True, nogil=True, fastmath=FAST)
def _soften(scores, count, lanes, state, sums, head_dim):
    """Online softmax of one tile, by columns: scores become weights, older sums shrink to the new maximum.

    state is flat scratch of three rows: highest score, total weight, and the factor by which to shrink.
    """
    columns = np.uint64(lanes)
    for x in range(columns):
        top = state[x]
        state[_ROW_2 + x] = top
    for t in range(count):
        row = np.uint64(t * LANES)
        for x in range(columns):
            state[x] = max(state[x], scores[row + x])
    for x in range(columns):
        shrink = exp2_of_negative(state[_ROW_2 + x] - state[x])
        state[_ROW_2 + x] = shrink
        state[_ROW + x] *= shrink
    for t in range(count):
        row = np.uint64(t * LANES)
        for x in range(columns):
            weight = exp2_of_negative(scores[row + x] - state[x])
            scores[row + x] = weight
            state[_ROW + x] += weight
    for d in range(head_dim):
        row = np.uint64(d * LANES)
        for x in range(columns):
            sums[row + x] *= state[_ROW_2 + x]


@njit(cache=True, nogil=True, fastmath=FAST)
def _attend_tile(queries, keys, values, table, shape, h, position, tokens, group, lanes, scratch):
    """All keys that new tokens from `position` on may see, by tiles, into scratch = (scores, sums, state)."""
    kv_heads, page_size, head_dim = shape
    scores, sums, state = scratch
    sums[:] = _ZERO
    state[:LANES] = LOWEST
    state[LANES:] = _ZERO
    end = position + tokens
    tile = max(1, TILE_TOKENS // page_size) * page_size
    for start in range(0, end, tile):
        stop = min(end, start + tile)
        scores[: (stop - start) * LANES] = _ZERO
        for t in range(start, stop, page_size):
            rows = min(page_size, stop - t)
            at = (table[t // page_size] * kv_heads + h) * page_size * head_dim
            _add_product(scores, t - start, rows, keys, at, head_dim, 1, head_dim, queries, 0, lanes)
        for t in range(max(start, position + 1), stop):  # token t is hidden from the columns of earlier ones
            for x in range((t - position) * group):
                scores[(t - start) * LANES + x] = LOWEST
        _soften(scores, stop - start, lanes, state, sums, head_dim)
        for t in range(start, stop, page_size):
            rows = min(page_size, stop - t)
            at = (table[t // page_size] * kv_heads + h) * page_size * head_dim
            _add_product(sums, 0, head_dim, values, at, 1, head_dim, rows, scores, t - start, lanes)


@njit(cache=True, nogil=True)
def _plan_tiles(query_lens, group, kv_heads, workers):
    """(tiles, 4) rows of sequence, first new token in it, tokens, row of query; long contexts first."""
    tokens = 0
    for new in query_lens:
        tokens += new
    most = max(1, LANES // group)
    step = min(most, max(1, 32 // group, tokens * kv_heads // (4 * workers)))
    count = 0
    for new in query_lens:
        count += (new + step - 1) // step
    tiles = np.empty((count, 4), np.int64)
    i, row = 0, 0
    for b in range(query_lens.shape[0]):
        first = (query_lens[b] - 1) // step * step
        while first >= 0 and query_lens[b] > 0:
            tiles[i, 0], tiles[i, 1], tiles[i, 3] = b, first, row + first
            tiles[i, 2] = min(step, query_lens[b] - first)
            i += 1
            first -= step
        row += query_lens[b]
    return tiles


@njit(cache=True, nogil=True, parallel=True)
def _prefill_v2(query, key_cache, value_cache, block_tables, query_lens, context_lens, out, scale, workers):
    """Deals (tile of new tokens, kv head) to the workers like cards."""
    heads, head_dim = query.shape[1:]
    kv_heads, page_size = key_cache.shape[1:3]
    group = heads // kv_heads
    factor = np.float32(scale * LOG2_E)  # the softmax is in powers of two
    keys, values = key_cache.reshape(-1), value_cache.reshape(-1)
    tiles = _plan_tiles(query_lens, group, kv_heads, workers)
    for worker in prange(workers):
        queries = np.zeros(head_dim * LANES, np.float32)
        sums = np.empty(head_dim * LANES, np.float32)
        scores = np.empty(max(TILE_TOKENS, page_size) * LANES, np.float32)
        state = np.empty(3 * LANES, np.float32)
        for item in range(worker, tiles.shape[0] * kv_heads, workers):
            i, h = item // kv_heads, item % kv_heads
            b, tokens, row = tiles[i, 0], tiles[i, 2], tiles[i, 3]
            _load_queries(query, row, tokens, h, group, factor, queries)
            position = context_lens[b] - query_lens[b] + tiles[i, 1]
            lanes = (tokens * group + 15) // 16 * 16  # whole vectors; the columns too many are ignored
            shape, scratch = (kv_heads, page_size, head_dim), (scores, sums, state)
            _attend_tile(
                queries, keys, values, block_tables[b], shape, h, position, tokens, group, lanes, scratch
            )
            _store_sums(sums, state, row, tokens, h, group, out)


@njit(cache=True, nogil=True, fastmath=FAST)
def _load_queries(query, row, tokens, h, group, factor, queries):
    """queries[d, column] of one tile, scaled."""
    for i in range(tokens):
        for g in range(group):
            for d in range(query.shape[2]):
                queries[d * LANES + i * group + g] = widen(query[row + i, h * group + g, d]) * factor


@njit(cache=True, nogil=True, fastmath=FAST)
def _store_sums(sums, state, row, tokens, h, group, out):
    """out[row + token, head] = sums / total of each column."""
    for i in range(tokens):
        for g in range(group):
            share = _ONE / state[LANES + i * group + g]
            for d in range(out.shape[2]):
                store(out, (row + i, h * group + g, d), sums[d * LANES + i * group + g] * share)
