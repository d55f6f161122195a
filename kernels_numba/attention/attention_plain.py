"""Cores of the plain rungs of paged attention: what one row of the output asks for.

Called by the naive rungs of attention_decode and attention_prefill, which loop over sequences, tokens and
heads. The index mapping stands there. Knows one sequence and one head at a time, and nothing of batches.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201

from __future__ import annotations

import numpy as np

from kernels_numba.intrinsics.numerics import LOWEST, store, widen
from kernels_numba.runtime import FAST, njit

_ZERO = np.float32(0.0)


def gathered(cache: np.ndarray, table: np.ndarray, first: int, end: int) -> np.ndarray:
    """Return the rows of tokens first .. end - 1 of one sequence, in order, out of the pages.

        cache   (pages, kv_heads, page_size, head_dim), any element type
        table   (max_pages,) int32, logical page -> physical page; token t lies in logical page t // page_size
        first   0 <= first <= end

    The result has shape (end - first, kv_heads, head_dim) and the cache's element type. Entries of the table
    that belong to no page of these tokens may hold any number, and are not used as an index.
    """
    # labs:begin 1a
    t = np.arange(first, end)
    page_size = cache.shape[2]
    return cache[table[t // page_size], :, t % page_size]
    # labs:end 1a


@njit(cache=True, nogil=True, fastmath=FAST)
def add_tokens(scores, values, highest, total, sums):
    """Take some tokens into an online softmax; return the new (highest, total), and change `sums` in place.

        scores          (tokens,) float32, of the tokens that come in; at least one
        values          (tokens, head_dim), their values, read through `widen`
        highest, total  float32, before them: the highest score, and the sum of exp(score - highest)
        sums            (head_dim,) float32: the sum of exp(score - highest) * value

    Before the first tokens highest is LOWEST, and total and sums are 0. After the last ones sums / total is
    the result. No power is ever above exp(0), so nothing overflows.
    """
    # labs:begin 1b
    top = highest
    for score in scores:
        top = max(top, score)
    shrink = np.exp(highest - top)  # what the older tokens count for under the new maximum
    total *= shrink
    for d in range(sums.shape[0]):
        sums[d] *= shrink
    for i in range(scores.shape[0]):
        weight = np.exp(scores[i] - top)
        total += weight
        for d in range(sums.shape[0]):
            sums[d] += weight * widen(values[i, d])
    return top, total
    # labs:end 1b


@njit(cache=True, nogil=True)
def attend(query, keys, values, table, first, end, scale, scores, out):
    """Plain attention of one row: the softmax over tokens first .. end - 1 of one sequence.

    query         (head_dim,), read through `widen`, as keys and values are
    keys, values  (pages, page_size, head_dim), the cache of the kv head that this row looks at
    table         (max_pages,) int32, logical page -> physical page; other entries may hold any number
    scale         factor of the scores
    scores        (at least end - first,) float32, scratch for the scores; what it holds does not matter
    out           (head_dim,), written through `store(out, d, value)`; zeros when there are no tokens

    Scores of any size are allowed: the highest one is subtracted before a power is taken.
    """
    # labs:begin 1c
    page_size, head_dim = keys.shape[1:]
    highest, total = LOWEST, _ZERO
    for t in range(first, end):
        page, row = table[t // page_size], t % page_size
        dot = _ZERO
        for d in range(head_dim):
            dot += widen(query[d]) * widen(keys[page, row, d])
        scores[t - first] = dot * np.float32(scale)
        highest = max(highest, scores[t - first])
    for i in range(end - first):
        scores[i] = np.exp(scores[i] - highest)
        total += scores[i]
    for d in range(head_dim):
        value = _ZERO
        for t in range(first, end):
            page, row = table[t // page_size], t % page_size
            value += scores[t - first] * widen(values[page, row, d])
        store(out, d, value / total if end > first else _ZERO)
    # labs:end 1c
