"""Decode attention, the rung that is called (v3): tiles of registers, contexts split over the cores.

Called by attention_decode.py, which draws the index mapping and holds the rungs before. Knows checked arrays
only. What it does about each of the three things that decode waits for:
    arithmetic  every key row that is loaded serves up to four query heads, and the sums stay in registers
                (vectors.py): key rows four at a time, value rows as long as a page lasts
    memory      pages lie anywhere, and the processor's own prefetching ends where a page ends: so the first
                lines of a page are asked for a tile ahead, and the processor finds the rest by itself
    cores       contexts are cut into pieces; whoever is free takes the next, because a core may be busy with
                something else; pieces are merged by their maxima
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.intrinsics.numerics import LOG2_E, LOWEST, exp2_of_negative, store, take_next, widen
from kernels_numba.intrinsics.vectors import (
    add_products,
    larger,
    largest,
    load,
    load_tile,
    prefetch,
    spread_column,
    store_tile,
    store_totals,
    zeros,
)
from kernels_numba.runtime import FAST, PART, njit, prange

LANES = 8
"""Of a vector: every head width is a multiple of it."""
TILE_TOKENS = 128
"""Keys between two updates of the running maximum; keys and values of a tile then stay in a near cache."""
MIN_SPLIT_TOKENS = 256
"""A shorter piece of a context costs more to merge than it wins."""
ALONE_FLOATS = 1 << 17
"""Fewer floats of keys than this are read by one core in the time that a second one needs to join in."""
PREFETCH_LINES = 8
"""Of a page; the processor's own prefetching goes on from there. One core, 9/3 heads x 64: eight
lines cost 5% where the KV is in the second cache and save 40% where
it is in memory; all 64 of them cost 20% and save 27%."""
LINE_BYTES = 64
WIDTH = 4
"""Vectors of each value row that are added at once; with four heads that makes sixteen sums in registers."""

_RULES: Any = {"fastmath": FAST, "error_model": "numpy"}
"""Of all parts here. No errors: where all scores are minus infinity the result is no number, for that
sequence and head."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def _score_kernel(heads):
    """A kernel for `heads` query heads and four key rows: their 4 * heads sums stay in registers."""
    sums = 4 * heads

    @njit(forceinline=True, **PART, **_RULES)
    def score(queries, g, key_cache, page, kv_head, rows, scores, column):
        """scores[g + j, column + i] = queries[g + j] . key row rows[0] + i. Writes whole fours."""
        first, last = rows
        for s in range(first, last, 4):
            # Past the end the last row stands in: what unused rows hold is never read.
            s1, s2, s3 = min(s + 1, last - 1), min(s + 2, last - 1), min(s + 3, last - 1)
            tile = zeros(sums, LANES)
            for d in range(0, key_cache.shape[3], LANES):
                keys = (
                    load(key_cache, (page, kv_head, s, d), LANES),
                    load(key_cache, (page, kv_head, s1, d), LANES),
                    load(key_cache, (page, kv_head, s2, d), LANES),
                    load(key_cache, (page, kv_head, s3, d), LANES),
                )
                tile = add_products(tile, load_tile(queries, (g, d), heads, 1, LANES), keys)
            store_totals(scores, (g, column + s - first), heads, tile)

    return score


def _value_kernel(heads):
    """A kernel for `heads` query heads: a strip of their sums stays in registers while the rows go by."""

    @njit(forceinline=True, **PART, **_RULES)
    def add(weights, g, value_cache, page, kv_head, rows, column, sums):
        """sums[g + j] += weights[g + j, column + i] * value row rows[0] + i."""
        first, last = rows
        head_dim, d = value_cache.shape[3], 0
        while d + WIDTH * LANES <= head_dim:
            tile = load_tile(sums, (g, d), heads, WIDTH, LANES)
            for s in range(first, last):
                values = load_tile(value_cache, (page, kv_head, s, d), 1, WIDTH, LANES)
                tile = add_products(
                    tile, spread_column(weights, (g, column + s - first), heads, LANES), values
                )
            store_tile(sums, (g, d), heads, WIDTH, tile)
            d += WIDTH * LANES
        while d < head_dim:  # what is left when head_dim is no multiple of a strip
            tile = load_tile(sums, (g, d), heads, 1, LANES)
            for s in range(first, last):
                values = load_tile(value_cache, (page, kv_head, s, d), 1, 1, LANES)
                tile = add_products(
                    tile, spread_column(weights, (g, column + s - first), heads, LANES), values
                )
            store_tile(sums, (g, d), heads, 1, tile)
            d += LANES

    return add


_score_4, _score_3, _score_2, _score_1 = (_score_kernel(heads) for heads in (4, 3, 2, 1))
_add_4, _add_3, _add_2, _add_1 = (_value_kernel(heads) for heads in (4, 3, 2, 1))


@njit(**PART, **_RULES)
def _score_page(queries, group, key_cache, page, kv_head, rows, scores, column):
    """The scores of a page's rows for a whole group, four heads at a time."""
    for g in range(0, group, 4):
        if group - g >= 4:
            _score_4(queries, g, key_cache, page, kv_head, rows, scores, column)
        elif group - g == 3:
            _score_3(queries, g, key_cache, page, kv_head, rows, scores, column)
        elif group - g == 2:
            _score_2(queries, g, key_cache, page, kv_head, rows, scores, column)
        else:
            _score_1(queries, g, key_cache, page, kv_head, rows, scores, column)


@njit(**PART, **_RULES)
def _add_page(weights, group, value_cache, page, kv_head, rows, column, sums):
    """The weighed values of a page's rows for a whole group, four heads at a time."""
    for g in range(0, group, 4):
        if group - g >= 4:
            _add_4(weights, g, value_cache, page, kv_head, rows, column, sums)
        elif group - g == 3:
            _add_3(weights, g, value_cache, page, kv_head, rows, column, sums)
        elif group - g == 2:
            _add_2(weights, g, value_cache, page, kv_head, rows, column, sums)
        else:
            _add_1(weights, g, value_cache, page, kv_head, rows, column, sums)


@njit(forceinline=True, **PART, **_RULES)
def _ask_for(cache, page, kv_head):
    """Ask for the first lines of a head's page; nothing waits for them."""
    line = LINE_BYTES // cache.itemsize
    for i in range(0, min(PREFETCH_LINES * line, cache.shape[2] * cache.shape[3]), line):
        prefetch(cache, (page, kv_head, 0, i))


@njit(**PART, **_RULES)
def _soften(scores, group, count, highest, totals, sums):
    """Online softmax of one tile: scores become weights, older sums shrink to the new maximum."""
    for g in range(group):
        for t in range(count, (count + LANES - 1) // LANES * LANES):
            scores[g, t] = LOWEST
        tops = load(scores, (g, 0), LANES)  # Numba's max does not vectorise: it has to mind NaN
        for t in range(LANES, count, LANES):
            tops = larger(tops, load(scores, (g, t), LANES))
        top = max(highest[g], largest(tops))
        shrink = exp2_of_negative(highest[g] - top)
        total = totals[g] * shrink
        for t in range(count):
            scores[g, t] = exp2_of_negative(scores[g, t] - top)
        for t in range(count):
            total += scores[g, t]
        highest[g], totals[g] = top, total
        for d in range(sums.shape[1]):
            sums[g, d] *= shrink


@njit(**PART, **_RULES)
def _decode_piece(queries, group, key_cache, value_cache, table, kv_head, first, last, scores, part):
    """A group over the tokens [first, last); part = (highest, totals, sums)."""
    page_size = key_cache.shape[2]
    highest, totals, sums = part
    highest[:], totals[:], sums[:] = LOWEST, _ZERO, _ZERO
    tile_pages = max(1, TILE_TOKENS // page_size)
    start = first
    while start < last:
        first_page = start // page_size
        stop = min(last, (first_page + tile_pages) * page_size)
        for i in range(first_page, (stop - 1) // page_size + 1):
            begin = max(start, i * page_size)
            rows = (begin - i * page_size, min(stop - i * page_size, page_size))
            _ask_for(value_cache, table[i], kv_head)
            _score_page(queries, group, key_cache, table[i], kv_head, rows, scores, begin - start)
        _soften(scores, group, stop - start, highest, totals, sums)
        for i in range(first_page, (stop - 1) // page_size + 1):
            begin = max(start, i * page_size)
            rows = (begin - i * page_size, min(stop - i * page_size, page_size))
            if (i + tile_pages) * page_size < last:
                _ask_for(key_cache, table[i + tile_pages], kv_head)
            _add_page(scores, group, value_cache, table[i], kv_head, rows, begin - start, sums)
        start = stop


@njit(**PART, **_RULES)
def _plan_pieces(context_lens, window, kv_heads, page_size, split, workers):
    """Pieces of contexts: (pieces, 3) rows of sequence, first token, last token.

    split   0: pieces of equal length, a few per worker. Else they end at multiples of it (of whole pages),
            counted from the first token of the sequence: then no other sequence changes them.
    """
    tokens = 0
    for length in context_lens:
        tokens += min(length, window)
    piece = split if split else max(MIN_SPLIT_TOKENS, tokens * kv_heads // (4 * workers))
    piece = (piece + page_size - 1) // page_size * page_size
    unit = piece if split else page_size
    pieces = np.empty((context_lens.shape[0] * 2 + tokens // piece, 3), np.int64)
    count = 0
    for b in range(context_lens.shape[0]):
        length = context_lens[b]
        begin = max(0, length - window)
        for first in range(begin // unit * unit, length, piece):
            pieces[count, 0], pieces[count, 1] = b, max(first, begin)
            pieces[count, 2] = min(first + piece, length)
            count += 1
    return pieces[:count]


@njit(cache=True, nogil=True, **_RULES)
def merge_pieces(pieces, highest, totals, sums, out):
    """out = the pieces of each sequence, weighed by what their maxima say; zeros where there is no piece.

    pieces   their first column is the sequence; those of one sequence follow each other, as its tokens do
    """
    heads, head_dim = out.shape[1:]
    group = heads // highest.shape[1]
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


@njit(**PART, **_RULES)
def _work(taken, pieces, query, key_cache, value_cache, block_tables, factor, highest, totals, sums):
    """Take (piece of a context, kv head) after (piece, kv head) until none is left."""
    head_dim = query.shape[2]
    kv_heads, page_size = key_cache.shape[1:3]
    group = query.shape[1] // kv_heads
    scores = np.empty((group, max(TILE_TOKENS, page_size) + LANES), np.float32)
    queries = np.empty((group, head_dim), np.float32)
    item = take_next(taken)
    while item < pieces.shape[0] * kv_heads:
        p, h = item // kv_heads, item % kv_heads
        b = pieces[p, 0]
        for g in range(group):
            for d in range(head_dim):
                queries[g, d] = widen(query[b, h * group + g, d]) * factor
        part = (highest[p, h], totals[p, h], sums[p, h])
        first, last = pieces[p, 1], pieces[p, 2]
        _decode_piece(queries, group, key_cache, value_cache, block_tables[b], h, first, last, scores, part)
        item = take_next(taken)


@njit(cache=True, nogil=True, parallel=True)
def decode_parts_v3(query, key_cache, value_cache, block_tables, context_lens, scale, window, split, workers):
    """Plan the pieces and let the workers take them. `split` as for _plan_pieces.

    Returns pieces (p, 3), and of each its highest scores and totals (p, kv_heads, group) and sums (p,
    kv_heads, group, head_dim) float32, for merge_pieces.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, page_size = key_cache.shape[1:3]
    group = heads // kv_heads
    pieces = _plan_pieces(context_lens, window, kv_heads, page_size, split, workers)
    highest = np.empty((pieces.shape[0], kv_heads, group), np.float32)
    totals = np.empty((pieces.shape[0], kv_heads, group), np.float32)
    sums = np.empty((pieces.shape[0], kv_heads, group, head_dim), np.float32)
    factor = np.float32(scale * LOG2_E)  # the softmax is in powers of two
    tokens = 0
    for p in range(pieces.shape[0]):
        tokens += pieces[p, 2] - pieces[p, 1]
    taken = np.zeros(1, np.int64)
    if tokens * kv_heads * head_dim < ALONE_FLOATS:
        workers = 1
    if workers == 1:  # a parallel region would wake the other threads even for one worker
        _work(taken, pieces, query, key_cache, value_cache, block_tables, factor, highest, totals, sums)
    else:
        for _ in prange(workers):
            _work(taken, pieces, query, key_cache, value_cache, block_tables, factor, highest, totals, sums)
    return pieces, highest, totals, sums


@njit(cache=True, nogil=True)
def decode_v3(query, key_cache, value_cache, block_tables, context_lens, out, scale, window, split, workers):
    """All pieces of all contexts, merged into `out`. `split` as for _plan_pieces."""
    pieces, highest, totals, sums = decode_parts_v3(
        query, key_cache, value_cache, block_tables, context_lens, scale, window, split, workers
    )
    merge_pieces(pieces, highest, totals, sums, out)
