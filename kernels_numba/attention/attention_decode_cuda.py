"""Decode on CUDA, split over the context: pieces of each context side by side, then a merge (flash-decoding).

Launched by attention_decode, which holds the interface and the index mapping. Two kernels, both captured by a
graph: no length is read on the host, the workspace comes from torch. The ladder goes on from attention_cuda:
    v3  one warp for a piece of a context and up to four query heads of a group: 16-byte loads, the lanes of a
        key add up their channels' products, online softmax in registers. Any element type and head_dim
    v4  attention_mma_cuda for bfloat16 and float16 of head_dim 64 and 128: all query heads of a group at once
        on tensor cores, keys and values on their way in shared memory instead of registers

    v3: block x -> piece of the context, y -> (kv head, four query heads), z -> sequence; block = one warp
        lane -> chunk lane % LANES of the row (16 bytes), key lane // LANES of the 32 // LANES keys at a time

    pieces  (batch, heads, splits, head_dim) float32 sums, then (batch, heads, splits, 2): maximum, total.
            A sequence's pieces are of equal length, as many of the `splits` as that takes.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN202

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kernels_numba.arrays import dtype_name
from kernels_numba.attention.attention_mma_cuda import (
    HEAD_DIMS,
    LOWEST,
    MIN_PIECE,
    NAN,
    ONE,
    PIECE_STEP,
    ZERO,
    decode_warps,
    make_attend,
)
from kernels_numba.checks import NO_WINDOW
from kernels_numba.gpu.backend_cuda import (
    UNPACK,
    addresses,
    broadcast,
    compiled,
    cuda,
    divide,
    exp2,
    larger,
    load16,
    load_float,
    load_int32,
    multiprocessors,
    on_its_device,
    store_bfloat16,
    store_float,
    store_float16,
    warp_max,
    warp_sum,
    workspace,
)

LOG2_E = 1.4426950408889634
HEADS_AT_ONCE = 4
"""Query heads of a v3 block: their queries and sums are 64 registers at most."""
BLOCKS = {"v3": 16, "v4": 3}
"""Blocks for each multiprocessor. More find room, but more pieces take longer to merge than they win: on an
H100 six blocks of v4 read 32 x 8192 tokens at 0.91 of the speed of a copy, and three at 0.96."""


@functools.cache
def make_decode_v3(element: str, head_dim: int) -> Any:
    """The kernel of one element type and head_dim."""
    unpack = UNPACK[element]
    per_word = 1 if element == "float32" else 2
    row_bytes = head_dim * 4 // per_word
    chunks = row_bytes // 16
    lanes = min(32, 1 << (chunks - 1).bit_length())  # that share a row
    passes = -(-chunks // 32)
    keys_at_once, unroll = 32 // lanes, 4 // passes
    per_chunk = 4 * per_word
    channels, words = (HEADS_AT_ONCE, passes * per_chunk), (unroll, passes * 4)
    score_shape, keys_a_round = (unroll, HEADS_AT_ONCE), keys_at_once * unroll

    def decode_v3(
        query,
        key_cache,
        value_cache,
        tables,
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
        lane = cuda.threadIdx.x
        b, group = cuda.blockIdx.z, divide(heads, kv_heads)
        turns = (group + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
        h = divide(cuda.blockIdx.y, turns)
        first_head = (cuda.blockIdx.y - h * turns) * HEADS_AT_ONCE
        heads_here = min(HEADS_AT_ONCE, group - first_head)
        first_head += h * group

        context = load_int32(context_lens, b * 4)
        visible = min(context, window)
        piece = max(MIN_PIECE, divide(visible + splits * PIECE_STEP - 1, splits * PIECE_STEP) * PIECE_STEP)
        begin = context - visible + cuda.blockIdx.x * piece
        end = min(context, begin + piece)
        if begin >= end:
            return

        # lanes past the last chunk of a row read its last one, multiply it by zero and store nothing
        queries = cuda.local.array(channels, np.float32)
        sums = cuda.local.array(channels, np.float32)
        highest = cuda.local.array(HEADS_AT_ONCE, np.float32)
        totals = cuda.local.array(HEADS_AT_ONCE, np.float32)
        for g in range(HEADS_AT_ONCE):
            highest[g], totals[g] = LOWEST, ZERO
            head = first_head + min(g, heads_here - 1)
            for p in range(passes):
                chunk = min(p * 32 + lane % lanes, chunks - 1)
                factor = scale if p * 32 + lane % lanes < chunks else ZERO
                loaded = load16(query, (b * heads + head) * row_bytes + chunk * 16)
                for w in range(4):
                    for e in range(per_word):
                        queries[g, p * per_chunk + w * per_word + e] = unpack(loaded[w])[e] * factor
                        sums[g, p * per_chunk + w * per_word + e] = ZERO

        keys = cuda.local.array(words, np.uint32)
        values = cuda.local.array(words, np.uint32)
        scores = cuda.local.array(score_shape, np.float32)
        for start in range(begin, end, keys_a_round):
            for u in range(unroll):  # all loads of the round are on their way before the first is used
                t = min(end - 1, start + u * keys_at_once + lane // lanes)
                logical = divide(t, page_size)
                page = load_int32(tables, (b * max_pages + logical) * 4)
                row = ((page * kv_heads + h) * page_size + t - logical * page_size) * row_bytes
                for p in range(passes):
                    chunk = min(p * 32 + lane % lanes, chunks - 1)
                    key = load16(key_cache, row + chunk * 16)
                    value = load16(value_cache, row + chunk * 16)
                    for w in range(4):
                        keys[u, p * 4 + w], values[u, p * 4 + w] = key[w], value[w]
            for u in range(unroll):
                there = start + u * keys_at_once + lane // lanes < end
                for g in range(HEADS_AT_ONCE):
                    dot = ZERO
                    for w in range(passes * 4):
                        for e in range(per_word):
                            dot += queries[g, w * per_word + e] * unpack(keys[u, w])[e]
                    dot = warp_sum(dot, lanes)
                    scores[u, g] = dot if there else LOWEST
            for g in range(HEADS_AT_ONCE):
                top = highest[g]
                for u in range(unroll):
                    top = larger(top, scores[u, g])
                shrink = exp2(highest[g] - top)
                highest[g] = top
                totals[g] *= shrink
                for d in range(passes * per_chunk):
                    sums[g, d] *= shrink
                for u in range(unroll):
                    weight = ZERO if scores[u, g] == LOWEST else exp2(scores[u, g] - top)
                    totals[g] += weight
                    for w in range(passes * 4):
                        for e in range(per_word):
                            sums[g, w * per_word + e] += weight * unpack(values[u, w])[e]

        # the lanes that hold the same channels of other keys: one sum in all of them, then stored by one
        for g in range(HEADS_AT_ONCE):
            distance = lanes
            while distance < 32:
                other = broadcast(highest[g], lane ^ distance)
                top = larger(highest[g], other)
                mine, theirs = exp2(highest[g] - top), exp2(other - top)
                highest[g] = top
                totals[g] = totals[g] * mine + broadcast(totals[g], lane ^ distance) * theirs
                for d in range(passes * per_chunk):
                    sums[g, d] = sums[g, d] * mine + broadcast(sums[g, d], lane ^ distance) * theirs
                distance *= 2
        for g in range(HEADS_AT_ONCE):
            if g < heads_here:
                part = (b * heads + first_head + g) * splits + cuda.blockIdx.x
                for p in range(passes):
                    chunk = p * 32 + lane
                    if lane < lanes and chunk < chunks:
                        for d in range(per_chunk):
                            at = (part * head_dim + chunk * per_chunk + d) * 4
                            store_float(out, at, sums[g, p * per_chunk + d])
                if lane == 0:
                    at = batch * heads * splits * head_dim * 4 + part * 8
                    store_float(out, at, highest[g])
                    store_float(out, at + 4, totals[g])

    return decode_v3


@functools.cache
def make_merge(element: str) -> Any:
    """out = the pieces of each (sequence, head), weighed by what their maxima say; zeros where there is none,
    NaN where no score was above LOWEST: there what is hidden, which has that score, was weighed too.

    Block (head, sequence), thread = channel. The grid covers the batch, so `batch` is its second axis.
    """
    store = {"float32": store_float, "bfloat16": store_bfloat16, "float16": store_float16}[element]
    out_bytes = 4 if element == "float32" else 2

    def merge_pieces(pieces, context_lens, out, head_dim, splits, window):
        lane, head, b = cuda.threadIdx.x % 32, cuda.blockIdx.x, cuda.blockIdx.y
        d = min(cuda.threadIdx.x, head_dim - 1)
        heads = cuda.gridDim.x
        visible = min(load_int32(context_lens, b * 4), window)
        piece = max(MIN_PIECE, divide(visible + splits * PIECE_STEP - 1, splits * PIECE_STEP) * PIECE_STEP)
        count = divide(visible + piece - 1, piece)
        first = (b * heads + head) * splits
        numbers = (cuda.gridDim.y * heads * splits * head_dim + first * 2) * 4
        top = LOWEST
        for i in range(lane, count, 32):
            top = larger(top, load_float(pieces, numbers + i * 8))
        top = warp_max(top, 32)
        total, value = ZERO, ZERO
        for begin in range(0, count, 32):  # a lane weighs one piece; then all lanes add the 32 pieces
            weight = ZERO
            if begin + lane < count:
                weight = exp2(load_float(pieces, numbers + (begin + lane) * 8) - top)
                total += weight * load_float(pieces, numbers + (begin + lane) * 8 + 4)
            for j in range(32):  # of constant length, so that many loads are on their way at once
                number = load_float(pieces, ((first + min(begin + j, count - 1)) * head_dim + d) * 4)
                product = broadcast(weight, j) * number
                value += product if begin + j < count else ZERO
        total = warp_sum(total, 32)
        share = NAN if count > 0 else ZERO
        if top > LOWEST:
            share = ONE / total
        if cuda.threadIdx.x < head_dim:
            store(out, ((b * heads + head) * head_dim + d) * out_bytes, value * share)

    return merge_pieces


def plan_splits(pairs: int, max_tokens: int, blocks: int) -> int:
    """Pieces that the longest possible context is cut into, so that there are some `blocks` of them in all.

    pairs   (sequence, kv head)

    >>> plan_splits(pairs=256, max_tokens=8192, blocks=396)
    2
    >>> plan_splits(pairs=8, max_tokens=32768, blocks=396)
    50
    """
    return min(-(-blocks // pairs), -(-max_tokens // MIN_PIECE))


@on_its_device
def launch_split(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    tables: Any,
    lens: Any,
    scale: float,
    out: Any,
    window: int = NO_WINDOW,
    *,
    tensor_cores: bool | None = None,
) -> None:
    """v4 where it fits, else v3, on device arrays that paged_attention_decode has checked. Reads no length on
    the host, so it neither waits for the device nor breaks the capture of a graph. tensor_cores False: v3."""
    element, (batch, heads, head_dim) = dtype_name(query), query.shape
    kv_heads, page_size = key_cache.shape[1:3]
    group, max_pages = heads // kv_heads, tables.shape[1]
    fits = element != "float32" and head_dim in HEAD_DIMS
    is_v4 = fits if tensor_cores is None else tensor_cores
    blocks = BLOCKS["v4" if is_v4 else "v3"] * multiprocessors(query)
    splits = plan_splits(batch * kv_heads, max(1, max_pages * page_size), blocks)
    pieces = workspace(query, batch * heads * splits * (head_dim + 2))
    (q, k, v, table, lengths, result, parts), stream = addresses(
        query, key_cache, value_cache, tables, lens, out, pieces
    )
    sizes = [np.int64(n) for n in (batch, heads, kv_heads, page_size, max_pages, splits)]
    factor, last = np.float32(scale * LOG2_E), np.int64(window)
    if is_v4:
        warps = decode_warps(group)
        kernel = compiled(make_attend(element, head_dim, True, warps), shared=True)
        kernel[(splits, kv_heads, batch), warps * 32, stream](
            q, k, v, table, lengths, lengths, parts, *sizes, factor, last
        )
    else:
        kernel = compiled(make_decode_v3(element, head_dim))
        grid = (splits, kv_heads * -(-group // HEADS_AT_ONCE), batch)
        kernel[grid, 32, stream](q, k, v, table, lengths, parts, *sizes, factor, last)
    threads = -(-head_dim // 32) * 32
    compiled(make_merge(element))[(heads, batch), threads, stream](
        parts, lengths, result, np.int64(head_dim), np.int64(splits), last
    )
