"""Paged attention for prefill: many new tokens a sequence, after a prefix that may be cached already.

Called by the model's forward pass once a layer and chunk. Knows arrays, not requests. The ladder, in
milliseconds for 512 new float32 tokens after 1,536, 9/3 heads x 64, two threads of a Xeon with AVX-512:
    v0          NumPy in float64, the oracle of the tests
    v1  2,290   plain loops, one (token, head) after the other, one thread; each head fetches all keys
    v2     21   tiles with online softmax, in attention_prefill_tiles: each key serves many columns at once
                (see below) and each number of it a whole vector of them. Two threads
    v3      8.6 the same, but blocks of the two products stay in registers from the first term to the last,
                where v2 reads and writes the block once a term. torch, on gathered keys: 15

Index mapping:

    query       (sum of query_lens, heads, head_dim)   the new tokens of all sequences, one after the other
    key_cache   (pages, kv_heads, page_size, head_dim)
    sequence b: context_lens[b] tokens, the last query_lens[b] of them new and already in the cache

    new token i of b --- position p = context_lens[b] - query_lens[b] + i, sees tokens p - window < t <= p
    column c of b ------+- c // group -> new token of b
                        `- c %  group -> query head of the group
    token t -+- t // page_size -> logical page -- block_tables[b] -> page -+-> key_cache[page, h, s, :]
             `- t %  page_size -> row s -----------------------------------+

    scores (tokens, columns) = keys (tokens, head_dim)      @ queries (head_dim, columns)
    sums (head_dim, columns) += values^T (head_dim, tokens) @ weights (tokens, columns)   one product, twice
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.attention.attention_plain import attend, gathered
from kernels_numba.attention.attention_prefill_tiles import prefill_tiles
from kernels_numba.checks import NO_WINDOW, check_attention, check_tables, check_window, raise_for_table
from kernels_numba.errors import RangeError
from kernels_numba.runtime import PARALLEL_CALL, get_num_threads, njit


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
    window: int | None = None,
) -> Any:
    """Causal attention of new tokens over their prefix and themselves; returns `out`, like the query.

        query                   (sum of query_lens, heads, head_dim) float32, float16 or bfloat16
        key_cache, value_cache  (pages, kv_heads, page_size, head_dim), the query's dtype; new tokens are in
        block_tables            (batch, max_pages) int32; entries past a sequence's end are never read, nor
                                those of pages that lie before the windows of all its new tokens
        query_lens              (batch,) int32, new tokens; 0 is allowed
        context_lens            (batch,) int32, all tokens, the new ones included
        scale                   factor of the scores, usually head_dim ** -0.5
        out                     optional; written in place
        window                  a token sees itself and the window - 1 tokens before it; None: all of them

    Kinds of arrays, dtypes and errors as for paged_attention_decode. RangeError also when a query is longer
    than its context, or when the query lengths do not add up to the rows of `query`; on the CPU only.
    """
    out = arrays.empty_like(query) if out is None else out
    reach = check_window(window)
    device = check_attention(query, key_cache, value_cache, block_tables, context_lens, out)
    arrays.common_device({"query": query, "query_lens": query_lens})
    arrays.check_integer("query_lens", query_lens, "int32")
    arrays.check_shape("query_lens", query_lens, context_lens.shape[0])
    arrays.check_shape("block_tables", block_tables, context_lens.shape[0], "max_pages")
    arrays.check_contiguous("query_lens", query_lens)
    if query.shape[0] == 0:
        return out
    if device == arrays.CUDA:
        from kernels_numba.attention.attention_cuda import launch_prefill

        launch_prefill(
            query, key_cache, value_cache, block_tables, query_lens, context_lens, scale, out, reach
        )
        return out
    q, keys, values, tables, new, lens, result = (
        arrays.as_numpy(a)
        for a in (query, key_cache, value_cache, block_tables, query_lens, context_lens, out)
    )
    check_pages(tables, new, lens, keys.shape, reach)
    check_lengths(new, lens, q.shape[0])
    with PARALLEL_CALL:
        prefill_tiles(
            q, keys, values, tables, new, lens, result, float(scale), reach, get_num_threads(), True
        )
    return out


def check_pages(
    tables: np.ndarray, new: np.ndarray, lens: np.ndarray, cache: tuple[int, ...], reach: int
) -> None:
    """RangeError for a page id or a length out of range; entries that no new token sees are not looked at.

    cache   shape of the key cache; reach: the window
    """
    ends = lens.astype(np.int64)
    read_from = np.where(new, ends - new - reach + 1, ends + cache[2])
    raise_for_table(check_tables(tables, lens, cache[0], cache[2], read_from), tables, lens, cache)


def check_lengths(new: np.ndarray, lens: np.ndarray, rows: int) -> None:
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
    window: int = NO_WINDOW,
) -> np.ndarray:
    """The oracle: the visible tokens out of the pages, then one new token after the other, in float64."""
    group = query.shape[1] // key_cache.shape[1]
    out, row = np.zeros(query.shape), 0
    for b, (new, tokens) in enumerate(zip(query_lens.tolist(), context_lens.tolist())):
        first = max(0, tokens - new - window + 1)
        place = (block_tables[b], first, tokens if new else first)
        keys, values = (
            np.repeat(gathered(cache, *place), group, 1).astype(float) for cache in (key_cache, value_cache)
        )
        for position in range(tokens - new, tokens):
            seen = slice(max(0, position - window + 1) - first, position + 1 - first)
            scores = np.einsum("hd,thd->th", query[row].astype(float), keys[seen]) * scale
            weights = np.exp(scores - scores.max(axis=0))
            out[row] = np.einsum("th,thd->hd", weights / weights.sum(axis=0), values[seen])
            row += 1
    return out


@njit(cache=True, nogil=True)
def prefill_v1(query, key_cache, value_cache, block_tables, query_lens, context_lens, out, scale, window):
    """Plain: one (token, head) after the other, the softmax over all scores of the token."""
    group = query.shape[1] // key_cache.shape[1]
    row = 0
    for b in range(query_lens.shape[0]):
        scores = np.empty(context_lens[b], np.float32)
        for position in range(context_lens[b] - query_lens[b], context_lens[b]):
            first, end = max(0, position - window + 1), position + 1
            for head in range(query.shape[1]):
                keys, values = key_cache[:, head // group], value_cache[:, head // group]
                attend(
                    query[row, head], keys, values, block_tables[b], first, end, scale, scores, out[row, head]
                )
            row += 1
