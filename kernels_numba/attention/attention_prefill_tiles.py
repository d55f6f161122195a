"""The tiles of the prefill attention: rungs v2 and v3 of attention_prefill, which draws the index mapping.

Called by attention_prefill only. The new tokens of a sequence and the query heads of a group are *columns*:
column c is query head c % group of new token c // group. WIDTH columns are a panel. Of a panel, everything
that changes lies in rows of WIDTH numbers:

    queries  (head_dim, WIDTH)   scaled
    scores   (TILE, WIDTH)       of one tile of keys, then the weights
    sums     (head_dim, WIDTH)   of weights times values; divided by `total` at the end
    state    (2, WIDTH)          highest score so far, total weight so far

Up to PANELS panels share a tile of keys and values, which is copied out of the pages (and widened to float32)
once for all of them and stays in the core's own cache.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import numpy as np

from kernels_numba.intrinsics.numerics import LOG2_E, LOWEST, store, take_next, widen
from kernels_numba.intrinsics.register_blocks import BLOCK_COLUMNS, BLOCK_ROWS, multiply_block
from kernels_numba.intrinsics.vectors import LANES, exp2_of_difference, larger, load, plus, put, spread, times
from kernels_numba.runtime import FAST, PART, njit, prange

WIDTH = BLOCK_COLUMNS
PANELS = 4
"""Panels of an item of work at most. More would copy tiles less often, and share the work less evenly."""
ITEMS = 4
"""Items of work a thread to aim at, by fewer panels an item."""
TILE = 64
"""Keys of a tile. At head_dim 64 its keys, values and scores are 16 + 16 + 8 KiB."""

_ZERO, _ONE, _NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)


@njit(**PART, fastmath=FAST)
def _product(in_registers, c, rows, a, a_start, a_row, a_step, b, inner, keep):
    """c[i, :] = keep * c[i, :] + sum over k < inner of a[i, k] * b[k, :], for i < rows.

    b and c are rows of WIDTH numbers; a[i, k] is a[a_start + i * a_row + k * a_step]; keep is 0 or 1.
    Rows of c up to the next multiple of BLOCK_ROWS may be computed as well, and mean nothing.
    """
    if in_registers:  # v3
        for i in range(0, rows, BLOCK_ROWS):
            multiply_block(c, i * WIDTH, a, a_start + i * a_row, a_row, a_step, b, inner, keep)
        return
    for i in range(rows):  # v2
        for at in range(i * WIDTH, (i + 1) * WIDTH if keep == 0 else 0):
            c[at] = _ZERO
        for k in range(inner):
            factor = spread(a[a_start + i * a_row + k * a_step], LANES)
            for x in range(0, WIDTH, LANES):
                product = times(factor, load(b, k * WIDTH + x, LANES))
                put(c, i * WIDTH + x, plus(load(c, i * WIDTH + x, LANES), product))


@njit(**PART, fastmath=FAST)
def _copy_tile(cache, table, shape, h, start, stop, tile):
    """Rows of tokens start..stop-1 of one head, from their pages into `tile`, as float32."""
    kv_heads, page_size, head_dim = shape
    t = start
    while t < stop:
        row = t % page_size
        rows = min(page_size - row, stop - t)
        source = np.uint64(((table[t // page_size] * kv_heads + h) * page_size + row) * head_dim)
        target = np.uint64((t - start) * head_dim)
        for i in range(np.uint64(rows * head_dim)):
            tile[target + i] = widen(cache[source + i])
        t += rows


@njit(**PART, fastmath=FAST)
def _hide(scores, lowest, highest, position, first_column, group, window):
    """LOWEST where a column may not see a token: tokens lowest..highest-1, columns from first_column on.

    The token of column x is at p = position + (first_column + x) // group, and sees p - window < t <= p.
    """
    for t in range(lowest, highest):
        row = (t - lowest) * WIDTH
        seen = min(WIDTH, max(0, (t - position) * group - first_column))
        gone = min(WIDTH, max(0, (t - position + window) * group - first_column))
        for x in range(seen):
            scores[row + x] = LOWEST
        for x in range(gone, WIDTH):
            scores[row + x] = LOWEST


@njit(**PART, fastmath=FAST)
def _soften(scores, rows, state, sums):
    """Online softmax of one tile, by columns: scores become weights, older sums shrink to the new maximum."""
    for x in range(0, WIDTH, LANES):
        old = load(state, x, LANES)
        top = old
        if rows % 2:
            top = larger(top, load(scores, x, LANES))
        for t in range(rows % 2, rows, 2):  # two at a time: each `larger` has to wait for the one before
            pair = larger(load(scores, t * WIDTH + x, LANES), load(scores, t * WIDTH + WIDTH + x, LANES))
            top = larger(top, pair)
        shrink = exp2_of_difference(old, top)
        total = times(load(state, WIDTH + x, LANES), shrink)
        for t in range(rows):
            weight = exp2_of_difference(load(scores, t * WIDTH + x, LANES), top)
            put(scores, t * WIDTH + x, weight)
            total = plus(total, weight)
        put(state, x, top)
        put(state, WIDTH + x, total)
        for at in range(x, sums.size, WIDTH):
            put(sums, at, times(load(sums, at, LANES), shrink))


@njit(**PART, fastmath=FAST)
def _attend(caches, span, scratch, in_registers):
    """One item of work: all keys that the columns of its span may see, tile by tile."""
    keys, values, table, shape, h = caches
    first_column, columns, position, group, window = span
    queries, sums, states, scores, key_tile, value_tile = scratch
    head_dim = shape[2]
    sums[:] = _ZERO
    states[:] = _ZERO
    states[:, :WIDTH] = LOWEST
    first = max(0, position + first_column // group - window + 1)
    end = position + (first_column + columns - 1) // group + 1
    # Tiles begin at multiples of TILE, whatever columns share an item: so no result depends on that.
    for tile_start in range(first // TILE * TILE, end, TILE):
        start, stop = max(first, tile_start), min(end, tile_start + TILE)
        _copy_tile(keys, table, shape, h, start, stop, key_tile)
        _copy_tile(values, table, shape, h, start, stop, value_tile)
        for panel in range((columns + WIDTH - 1) // WIDTH):
            column = first_column + panel * WIDTH
            newest = position + min(first_column + columns - 1, column + WIDTH - 1) // group
            lowest = max(start, position + column // group - window + 1)
            highest = min(stop, newest + 1)
            rows, skipped = highest - lowest, (lowest - start) * head_dim
            if rows <= 0:
                continue
            _product(in_registers, scores, rows, key_tile, skipped, head_dim, 1, queries[panel], head_dim, 0)
            if highest > position + column // group + 1 or lowest <= newest - window:
                _hide(scores, lowest, highest, position, column, group, window)
            _soften(scores, rows, states[panel], sums[panel])
            _product(in_registers, sums[panel], head_dim, value_tile, skipped, 1, head_dim, scores, rows, 1)


@njit(**PART)
def _plan(query_lens, group, kv_heads, workers):
    """(items, 4) rows of sequence, first column, columns, the sequence's first row of query.

    The last columns of a sequence come first: they see the most, and short items even out the end.
    """
    panels = 0
    for new in query_lens:
        panels += (new * group + WIDTH - 1) // WIDTH
    step = WIDTH * min(PANELS, max(1, panels * kv_heads // (ITEMS * workers)))
    count = 0
    for new in query_lens:
        count += (new * group + step - 1) // step
    items = np.empty((count, 4), np.int64)
    i, row = 0, 0
    for b in range(query_lens.shape[0]):
        columns = query_lens[b] * group
        for first in range((columns - 1) // step * step, -1, -step):
            # One by one: for a tuple Numba also compiles the text of an error, which takes 3 s.
            items[i, 0], items[i, 1] = b, first
            items[i, 2], items[i, 3] = min(step, columns - first), row
            i += 1
        row += query_lens[b]
    return items


@njit(**PART)
def _scratch(head_dim):
    """Queries, sums and states by panel; scores and a tile of keys and of values, with room for whole blocks.

    All start at a cache line: a vector that lies in two of them is read twice.
    """
    panel, tile = head_dim * WIDTH, (TILE + BLOCK_ROWS) * head_dim
    scores = (TILE + BLOCK_ROWS) * WIDTH
    whole = np.zeros(16 + PANELS * (2 * panel + 2 * WIDTH) + scores + 2 * tile, np.float32)
    at = (-whole.ctypes.data % 64) // 4
    queries = whole[at : at + PANELS * panel].reshape(PANELS, panel)
    at += PANELS * panel
    sums = whole[at : at + PANELS * panel].reshape(PANELS, panel)
    at += PANELS * panel
    states = whole[at : at + PANELS * 2 * WIDTH].reshape(PANELS, 2 * WIDTH)
    at += PANELS * 2 * WIDTH
    rest = whole[at:]
    return (
        queries,
        sums,
        states,
        rest[:scores],
        rest[scores : scores + tile],
        rest[scores + tile : scores + 2 * tile],
    )


@njit(cache=True, nogil=True, parallel=True)
def prefill_tiles(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_lens,
    context_lens,
    out,
    scale,
    window,
    workers,
    in_registers,
):
    """v2, or v3 where in_registers is true. A worker takes the next item as soon as it is done with one."""
    head_dim = query.shape[2]
    kv_heads, page_size = key_cache.shape[1:3]
    group = query.shape[1] // kv_heads
    factor = np.float32(scale * LOG2_E)  # the softmax is in powers of two
    shape = (kv_heads, page_size, head_dim)
    keys, values = key_cache.reshape(-1), value_cache.reshape(-1)
    items = _plan(query_lens, group, kv_heads, workers)
    counter = np.zeros(1, np.int64)
    for _ in prange(workers):
        scratch = _scratch(head_dim)
        while True:
            i = take_next(counter)
            if i >= items.shape[0] * kv_heads:
                break
            b, column, columns, row = items[i // kv_heads]
            h = i % kv_heads
            position = context_lens[b] - query_lens[b]
            _load_queries(query, row, h, group, column, columns, factor, scratch[0])
            caches = (keys, values, block_tables[b], shape, h)
            span = (column, columns, position, group, window)
            _attend(caches, span, scratch, in_registers)
            _store_sums(scratch[1], scratch[2], row, h, group, column, columns, out)


@njit(**PART, fastmath=FAST)
def _load_queries(query, row, h, group, first_column, columns, factor, queries):
    """queries[panel, d, x] of one item, scaled."""
    for i in range(columns):
        token, head = row + (first_column + i) // group, h * group + (first_column + i) % group
        for d in range(query.shape[2]):
            queries[i // WIDTH, d * WIDTH + i % WIDTH] = widen(query[token, head, d]) * factor


@njit(**PART, fastmath=FAST)
def _store_sums(sums, states, row, h, group, first_column, columns, out):
    """out[row + token, head] = sums / total of each column; NaN where it saw no score above LOWEST: there
    what is hidden, which has that score, was weighed too."""
    for i in range(columns):
        token, head = row + (first_column + i) // group, h * group + (first_column + i) % group
        panel, x = i // WIDTH, i % WIDTH
        share = _ONE / states[panel, WIDTH + x] if states[panel, x] > LOWEST else _NAN
        for d in range(out.shape[2]):
            store(out, (token, head, d), sums[panel, d * WIDTH + x] * share)
