"""Paged attention on tensor cores: bfloat16 and float16, head_dim 64 and 128; for prefill and for decode.

Launched by attention_cuda (prefill, v3) and attention_decode_cuda (decode, v4). Knows addresses only.

    block (prefill) x -> tile of tokens of one sequence, longest contexts first    y -> kv head
    block (decode)  x -> piece of the context    y -> kv head    z -> sequence
    row r of the block -> new token r // group of the tile, query head r % group: all heads of the group share
                          the keys and values that the block reads
    warp w -> rows 16 w .. 16 w + 15; lane i -> rows i // 4 and i // 4 + 8 of them

A tile of keys and of values, up to 8 KiB each, is copied to shared memory (cp.async) while the tile before it
is computed with. Per tile and warp: scores (16, TILE) = Q K^T, online softmax in registers, sums += P V; the
scores' registers are already laid out as P must be. A chunk of 16 bytes lies at column chunk ^ (row % 8) of
its row, so that neither the copies nor ldmatrix meet a bank twice.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN202

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kernels_numba.gpu.backend_cuda import (
    CHUNK_ALIGNMENT,
    broadcast,
    check_shared,
    copy_async,
    copy_commit,
    copy_wait,
    cuda,
    divide,
    exp2,
    larger,
    load_int32,
    load_matrices,
    load_transposed,
    load_word,
    mma_bfloat16,
    mma_float16,
    pack_bfloat16,
    pack_float16,
    store_float,
    store_word,
    warp_max,
    warp_sum,
)

TILE_BYTES = 8192
"""A tile of keys. Two stages of keys and values then take 32 KiB of shared memory; Numba can ask for 48."""
WARP_TOKENS = 32
"""Keys of a tile that one warp can look up, one a lane: the whole tile of decode's single warp."""
HEAD_DIMS = (64, 128)
PIECE_STEP = 64
"""Tokens: pieces of a context are whole tiles of every head_dim."""
MIN_PIECE = 128
"""Tokens; a shorter piece of a context costs more to merge than it wins."""
LOWEST = np.float32(-1e30)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NAN = np.float32(np.nan)


def prefill_warps(group: int) -> int:
    """Warps of a prefill block, 16 rows each. group: query heads of a kv head."""
    return 4 if group <= 64 else 8


def decode_warps(group: int) -> int:
    """Warps of a decode block, whose rows are one token's group."""
    return 1 << (-(-group // 16) - 1).bit_length()


def bounds(warps: int) -> tuple[int, int]:
    """Threads of a block, and blocks that must find room on a multiprocessor: 12 warps, so 168 registers a
    thread. With head_dim 128 the sums, scores and queries alone are 112, and 128 registers spill."""
    return 32 * warps, max(1, 12 // warps)


@functools.cache
def make_attend(element: str, head_dim: int, split: bool, warps: int) -> Any:
    """The kernel of one element type, head_dim and number of warps.

    split: one new token a sequence, pieces of its context, and `out` receives their unnormalised sums, maxima
    and totals, for the merge of attention_decode_cuda.
    """
    pack = {"bfloat16": pack_bfloat16, "float16": pack_float16}[element]
    mma = {"bfloat16": mma_bfloat16, "float16": mma_float16}[element]
    chunks, row_bytes = head_dim // 8, head_dim * 2
    chunk_bits = chunks.bit_length() - 1
    tile_tokens = WARP_TOKENS if split else TILE_BYTES // row_bytes
    tile_chunks = tile_tokens * chunks
    stage_chunks, shared_chunks = 2 * tile_chunks, 4 * tile_chunks
    check_shared(shared_chunks * 16)
    steps, column_tiles = head_dim // 16, tile_tokens // 8  # of 16 channels; of 8 keys
    rows_here, rows_at_once = tile_tokens // warps, 32 // chunks  # of a tile: what a warp copies; at a time
    fragments, score_shape, sum_shape = (steps, 4), (column_tiles, 4), (head_dim // 8, 4)

    def attend(
        query,
        key_cache,
        value_cache,
        tables,
        query_lens,
        context_lens,
        out,
        batch,
        heads,
        kv_heads,
        page_size,
        max_pages,
        splits,
        scale,
        window,
    ):
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        h = cuda.blockIdx.y
        group = divide(heads, kv_heads)

        # my rows' tokens: `tokens` of sequence b from row `first_row` of the query, at `position` in it
        if split:
            b, tokens, first_row = cuda.blockIdx.z, 1, cuda.blockIdx.z
            context = load_int32(context_lens, b * 4)
            position = context - 1
            visible = min(context, window)
            piece = max(
                MIN_PIECE, divide(visible + splits * PIECE_STEP - 1, splits * PIECE_STEP) * PIECE_STEP
            )
            begin = context - visible + cuda.blockIdx.x * piece
            end = min(context, begin + piece)
        else:
            step = divide(warps * 16, group)
            tile, b, first_row = cuda.gridDim.x - 1 - cuda.blockIdx.x, 0, 0
            new = load_int32(query_lens, 0)
            tiles_here = divide(new + step - 1, step)
            while tile >= tiles_here:
                tile -= tiles_here
                first_row += new
                b += 1
                if b == batch:
                    return
                new = load_int32(query_lens, b * 4)
                tiles_here = divide(new + step - 1, step)
            tokens = min(step, new - tile * step)
            first_row += tile * step
            position = load_int32(context_lens, b * 4) - new + tile * step
            begin = max(0, position - window + 1)
            end = position + tokens
        if begin >= end:
            return

        # rows past the last one repeat it and store nothing
        rows = tokens * group
        row_0, row_1 = warp * 16 + (lane >> 2), warp * 16 + (lane >> 2) + 8
        token_0, token_1 = divide(min(row_0, rows - 1), group), divide(min(row_1, rows - 1), group)
        head_0 = min(row_0, rows - 1) - token_0 * group
        head_1 = min(row_1, rows - 1) - token_1 * group
        at_0 = (first_row + token_0) * heads + h * group + head_0
        at_1 = (first_row + token_1) * heads + h * group + head_1
        limit_0, limit_1 = min(end, position + token_0 + 1), min(end, position + token_1 + 1)
        floor_0, floor_1 = position + token_0 - window, position + token_1 - window
        word = (lane & 3) * 4

        queries = cuda.local.array(fragments, np.uint32)
        for s in range(steps):
            queries[s, 0] = load_word(query, at_0 * row_bytes + s * 32 + word)
            queries[s, 1] = load_word(query, at_1 * row_bytes + s * 32 + word)
            queries[s, 2] = load_word(query, at_0 * row_bytes + s * 32 + word + 16)
            queries[s, 3] = load_word(query, at_1 * row_bytes + s * 32 + word + 16)
        scores = cuda.local.array(score_shape, np.float32)
        sums = cuda.local.array(sum_shape, np.float32)
        for n in range(head_dim // 8):
            for e in range(4):
                sums[n, e] = ZERO
        highest_0, highest_1, total_0, total_1 = LOWEST, LOWEST, ZERO, ZERO

        stages = cuda.shared.array(shared_chunks, np.complex128, CHUNK_ALIGNMENT)  # 2 x (keys, values)
        tiles = divide(end - begin + tile_tokens - 1, tile_tokens)
        column = lane & (chunks - 1)
        source = np.int32(-1)
        for i in range(-2, tiles):
            # copy tile i + 1; look up where the rows of tile i + 2 lie; compute with tile i
            if 0 <= i + 1 < tiles:
                stage = ((i + 1) & 1) * stage_chunks
                for j in range(rows_here // rows_at_once):
                    row = j * rows_at_once + (lane >> chunk_bits)
                    taken = broadcast(source, row)
                    row += warp * rows_here
                    target = stage + row * chunks + (column ^ (row & 7))
                    there = 16 if taken >= 0 else 0
                    offset = max(0, taken) * row_bytes + column * 16
                    copy_async(stages, target, key_cache, offset, there)
                    copy_async(stages, target + tile_chunks, value_cache, offset, there)
            copy_commit()
            source = np.int32(-1)
            t = begin + (i + 2) * tile_tokens + warp * rows_here + lane
            if lane < rows_here and t < end:
                logical = divide(t, page_size)
                page = load_int32(tables, (b * max_pages + logical) * 4)
                source = np.int32((page * kv_heads + h) * page_size + t - logical * page_size)
            if i >= 0:
                copy_wait(1)
                cuda.syncthreads()
                keys = (i & 1) * stage_chunks
                values = keys + tile_chunks
                # scores = Q K^T, 16 keys at a time
                for n in range(column_tiles):
                    for e in range(4):
                        scores[n, e] = ZERO
                for s in range(steps):
                    q0, q1, q2, q3 = queries[s, 0], queries[s, 1], queries[s, 2], queries[s, 3]
                    at = keys + ((lane >> 4) * 8 + (lane & 7)) * chunks
                    at += (2 * s + ((lane >> 3) & 1)) ^ (lane & 7)
                    for n in range(column_tiles // 2):
                        k = load_matrices(stages, at + n * 16 * chunks)
                        x = (scores[2 * n, 0], scores[2 * n, 1], scores[2 * n, 2], scores[2 * n, 3])
                        m = 2 * n + 1
                        y = (scores[m, 0], scores[m, 1], scores[m, 2], scores[m, 3])
                        x = mma(x, q0, q1, q2, q3, k[0], k[1])
                        y = mma(y, q0, q1, q2, q3, k[2], k[3])
                        for e in range(4):
                            scores[2 * n, e] = x[e]
                            scores[m, e] = y[e]
                for n in range(column_tiles):
                    for e in range(4):
                        scores[n, e] *= scale
                # masks, where the tile crosses a border
                start = begin + i * tile_tokens
                if start + tile_tokens > min(end, position + 1) or start <= position + tokens - 1 - window:
                    for n in range(column_tiles):
                        for e in range(2):
                            t = start + n * 8 + (lane & 3) * 2 + e
                            if t >= limit_0 or t <= floor_0:
                                scores[n, e] = LOWEST
                            if t >= limit_1 or t <= floor_1:
                                scores[n, 2 + e] = LOWEST
                # online softmax in powers of two
                top_0, top_1 = highest_0, highest_1
                for n in range(column_tiles):
                    top_0 = larger(top_0, larger(scores[n, 0], scores[n, 1]))
                    top_1 = larger(top_1, larger(scores[n, 2], scores[n, 3]))
                top_0, top_1 = warp_max(top_0, 4), warp_max(top_1, 4)
                shrink_0, shrink_1 = exp2(highest_0 - top_0), exp2(highest_1 - top_1)
                highest_0, highest_1 = top_0, top_1
                total_0 *= shrink_0
                total_1 *= shrink_1
                for n in range(column_tiles):
                    for e in range(2):
                        scores[n, e] = exp2(scores[n, e] - top_0)
                        scores[n, 2 + e] = exp2(scores[n, 2 + e] - top_1)
                        total_0 += scores[n, e]
                        total_1 += scores[n, 2 + e]
                for n in range(head_dim // 8):
                    for e in range(2):
                        sums[n, e] *= shrink_0
                        sums[n, 2 + e] *= shrink_1
                # sums += P V, 16 keys and 16 channels at a time
                for s in range(column_tiles // 2):
                    p0 = pack(scores[2 * s, 0], scores[2 * s, 1])
                    p1 = pack(scores[2 * s, 2], scores[2 * s, 3])
                    p2 = pack(scores[2 * s + 1, 0], scores[2 * s + 1, 1])
                    p3 = pack(scores[2 * s + 1, 2], scores[2 * s + 1, 3])
                    at = values + (s * 16 + (lane & 15)) * chunks + ((lane >> 4) ^ (lane & 7))
                    for n in range(steps):
                        v = load_transposed(stages, at ^ (2 * n))
                        x = (sums[2 * n, 0], sums[2 * n, 1], sums[2 * n, 2], sums[2 * n, 3])
                        y = (sums[2 * n + 1, 0], sums[2 * n + 1, 1], sums[2 * n + 1, 2], sums[2 * n + 1, 3])
                        x = mma(x, p0, p1, p2, p3, v[0], v[1])
                        y = mma(y, p0, p1, p2, p3, v[2], v[3])
                        for e in range(4):
                            sums[2 * n, e] = x[e]
                            sums[2 * n + 1, e] = y[e]
                cuda.syncthreads()

        total_0, total_1 = warp_sum(total_0, 4), warp_sum(total_1, 4)
        if split:
            part_0, part_1 = at_0 * splits + cuda.blockIdx.x, at_1 * splits + cuda.blockIdx.x
            numbers = batch * heads * splits * head_dim * 4
            if row_0 < rows:
                for n in range(head_dim // 8):
                    for e in range(2):
                        store_float(out, (part_0 * head_dim + n * 8 + (lane & 3) * 2 + e) * 4, sums[n, e])
                store_float(out, numbers + part_0 * 8, highest_0)
                store_float(out, numbers + part_0 * 8 + 4, total_0)
            if row_1 < rows:
                for n in range(head_dim // 8):
                    for e in range(2):
                        store_float(out, (part_1 * head_dim + n * 8 + (lane & 3) * 2 + e) * 4, sums[n, 2 + e])
                store_float(out, numbers + part_1 * 8, highest_1)
                store_float(out, numbers + part_1 * 8 + 4, total_1)
        else:
            # NaN where no score was above LOWEST: what is hidden, which has that score, was weighed too
            share_0 = ONE / total_0 if highest_0 > LOWEST else NAN
            share_1 = ONE / total_1 if highest_1 > LOWEST else NAN
            for n in range(head_dim // 8):
                if row_0 < rows:
                    both = pack(sums[n, 0] * share_0, sums[n, 1] * share_0)
                    store_word(out, at_0 * row_bytes + n * 16 + word, both)
                if row_1 < rows:
                    both = pack(sums[n, 2] * share_1, sums[n, 3] * share_1)
                    store_word(out, at_1 * row_bytes + n * 16 + word, both)

    return attend
