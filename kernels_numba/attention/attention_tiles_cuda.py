"""Paged attention on CUDA, v2: one block for a few (token, head) rows of one kv head, in tiles of keys.

The threads of a block take a key each for the scores, then a channel each for the sums. Keys and values are
read once for all rows of a block; the softmax goes on from tile to tile. Any element type, head_dim and
alignment; decode is prefill of one new token. Launched by attention_cuda, which describes the ladder.

    block x  -> tile of TILE_ROWS // heads_here new tokens of one sequence (blocks too many return at once)
    block y  -> kv head h          block z -> which query heads of its group
    thread i -> key i of the tile while scoring; channels i, i + THREADS, ... of head_dim while summing
    row r    -> new token r // heads_here, query head r % heads_here of this block
"""

# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels_numba.attention.attention_rungs import (
    LOWEST,
    MAX_CHANNELS,
    MAX_HEAD_DIM,
    NAN,
    ONE,
    THREADS,
    ZERO,
    rung,
)
from kernels_numba.gpu.backend_cuda import cuda, narrow, widen

TILE_ROWS = 16
"""Rows of a block: the sums of 16 rows x 256 channels are 64 numbers a thread."""


def attention_v2(query, key_cache, value_cache, block_tables, query_lens, context_lens, out, scale, window):
    """One block for a few rows of one sequence and kv head; see the head of the file."""
    thread = cuda.threadIdx.x
    head_dim, page_size = query.shape[2], key_cache.shape[2]
    group = query.shape[1] // key_cache.shape[1]
    heads_here = min(group, TILE_ROWS)
    first_head = cuda.blockIdx.y * group + cuda.blockIdx.z * heads_here
    heads_left = min(heads_here, group - cuda.blockIdx.z * heads_here)
    step = TILE_ROWS // heads_here

    # which sequence, and which of its new tokens
    b, tile, first_row = 0, cuda.blockIdx.x, 0
    while b < query_lens.shape[0] and tile >= (query_lens[b] + step - 1) // step:
        tile -= (query_lens[b] + step - 1) // step
        first_row += query_lens[b]
        b += 1
    if b == query_lens.shape[0]:
        return
    first_token = tile * step
    rows = min(step, query_lens[b] - first_token) * heads_here
    position = context_lens[b] - query_lens[b] + first_token
    end = min(context_lens[b], position + step)

    queries = cuda.shared.array((TILE_ROWS, MAX_HEAD_DIM), np.float32)
    scores = cuda.shared.array((TILE_ROWS, THREADS), np.float32)
    sums = cuda.local.array((TILE_ROWS, MAX_CHANNELS), np.float32)
    highest = cuda.local.array(TILE_ROWS, np.float32)
    totals = cuda.local.array(TILE_ROWS, np.float32)
    for r in range(rows):
        highest[r], totals[r] = LOWEST, ZERO
        for c in range(MAX_CHANNELS):
            sums[r, c] = ZERO
        token, head = first_row + first_token + r // heads_here, r % heads_here
        for d in range(thread, head_dim, THREADS):
            if head < heads_left:
                queries[r, d] = widen(query[token, first_head + head, d]) * scale
            else:
                queries[r, d] = ZERO
    cuda.syncthreads()

    for start in range(max(0, position - window + 1), end, THREADS):
        count = min(THREADS, end - start)
        t = start + thread
        if thread < count:  # my key, against every row
            page, s = block_tables[b, t // page_size], t % page_size
            for r in range(rows):
                score = ZERO
                for d in range(head_dim):
                    score += queries[r, d] * widen(key_cache[page, cuda.blockIdx.y, s, d])
                last = position + r // heads_here
                scores[r, thread] = score if t <= last and t > last - window else LOWEST
        cuda.syncthreads()
        for r in range(rows):  # every thread finds the same maxima: no exchange is needed
            top = highest[r]
            for k in range(count):
                top = max(top, scores[r, k])
            shrink = math.exp(highest[r] - top)
            highest[r] = top
            totals[r] *= shrink
            for c in range(MAX_CHANNELS):
                sums[r, c] *= shrink
        cuda.syncthreads()
        if thread < count:
            for r in range(rows):
                hidden = scores[r, thread] == LOWEST
                scores[r, thread] = ZERO if hidden else math.exp(scores[r, thread] - highest[r])
        cuda.syncthreads()
        for k in range(count):
            page, s = block_tables[b, (start + k) // page_size], (start + k) % page_size
            for r in range(rows):
                totals[r] += scores[r, k]
            for c in range((head_dim - thread + THREADS - 1) // THREADS):
                value = widen(value_cache[page, cuda.blockIdx.y, s, c * THREADS + thread])
                for r in range(rows):
                    sums[r, c] += scores[r, k] * value
        cuda.syncthreads()

    for r in range(rows):
        token, head = first_row + first_token + r // heads_here, r % heads_here
        if head < heads_left:
            share = ZERO if context_lens[b] == 0 else NAN  # no token, or scores of minus infinity only
            if totals[r] > ZERO:
                share = ONE / totals[r]
            for c in range((head_dim - thread + THREADS - 1) // THREADS):
                channel = c * THREADS + thread
                out[token, first_head + head, channel] = narrow(sums[r, c] * share, out)


def _grid_of_tiles(query: Any, key_cache: Any, lens: Any) -> tuple[int, int, int]:
    group = query.shape[1] // key_cache.shape[1]
    heads_here = min(group, TILE_ROWS)
    step = TILE_ROWS // heads_here
    tiles = min(query.shape[0], query.shape[0] // step + lens.shape[0])
    return tiles, key_cache.shape[1], -(-group // heads_here)


launch_tiled = rung(attention_v2, _grid_of_tiles)
"""v2."""
