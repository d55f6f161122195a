"""Moving KV on CUDA: the CUDA form of block_kernels.py. blocks.py holds interface, checks and index mapping.
v1  one thread an element, neighbours next to each other along head_dim, so that both sides of every copy
    are read and written in whole lines. Any element, any alignment
v2  16 bytes a thread and move, and a warp for a run that is contiguous on both sides: four moves are on their
    way in each lane, the page's place is worked out once a run. By address: what the bytes mean does not
    matter. Called wherever rows and addresses are multiples of 16 bytes, as the attention kernels' are
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels_numba.arrays import strides_of
from kernels_numba.gpu.backend_cuda import (
    addresses,
    aligned,
    as_bytes,
    compiled,
    cuda,
    divide,
    load16,
    load_int32,
    load_int64,
    on_device,
    on_its_device,
    store16,
)

THREADS = 64
"""Of v1, and of v2's block: small blocks come and go without waiting for each other."""
WARPS = THREADS // 32
CHUNK = 16
"""Bytes of one move."""
AT_ONCE = 4
"""Moves on their way in a lane: with 2048 threads 128 KiB a multiprocessor, and about 25 hide the latency."""


def scatter_kv_v1(key, value, key_cache, value_cache, slots):
    """Thread i: element i of (tokens, kv_heads, head_dim), of the key and of the value."""
    at = cuda.grid(1)
    heads, head_dim, page_size = key.shape[1], key.shape[2], key_cache.shape[2]
    if at >= key.shape[0] * heads * head_dim:
        return
    token, head, d = at // (heads * head_dim), at // head_dim % heads, at % head_dim
    slot = slots[token]
    if slot >= 0:
        page, row = slot // page_size, slot % page_size
        key_cache[page, head, row, d] = key[token, head, d]
        value_cache[page, head, row, d] = value[token, head, d]


def move_blocks_v1(caches, page_ids, blocks, first_layer, first_head, to_pages):
    """Block (x, y, z): a piece of one page's heads and rows, of plane y = (layer, key or value), of page z
    of the table; thread: one element."""
    heads, head_dim, page_size = blocks.shape[3], blocks.shape[5], caches.shape[4]
    at = cuda.grid(1)
    if at >= heads * page_size * head_dim:
        return
    head, row, d = at // (page_size * head_dim), at // head_dim % page_size, at % head_dim
    layer, kv = cuda.blockIdx.y // 2, cuda.blockIdx.y % 2
    b, i = cuda.blockIdx.z // page_ids.shape[1], cuda.blockIdx.z % page_ids.shape[1]
    page = page_ids[b, i]
    if page < 0:
        return
    token = i * page_size + row
    if to_pages:
        caches[first_layer + layer, kv, page, first_head + head, row, d] = blocks[
            b, layer, kv, head, token, d
        ]
    else:
        blocks[b, layer, kv, head, token, d] = caches[
            first_layer + layer, kv, page, first_head + head, row, d
        ]


def copy_pages_v1(caches, sources, targets):
    """Thread: one element of a page in plane y; it copies all pairs in their order, so that a target may be a
    later source."""
    heads, page_size, head_dim = caches.shape[3], caches.shape[4], caches.shape[5]
    at = cuda.grid(1)
    if at >= heads * page_size * head_dim:
        return
    head, row, d = at // (page_size * head_dim), at // head_dim % page_size, at % head_dim
    layer, kv = cuda.blockIdx.y // 2, cuda.blockIdx.y % 2
    for i in range(sources.shape[0]):
        caches[layer, kv, targets[i], head, row, d] = caches[layer, kv, sources[i], head, row, d]


def scatter_kv_v2(
    key, value, key_cache, value_cache, slots, tokens, heads, page_size, row_chunks, key_bytes, value_bytes
):
    """Thread: one chunk of (tokens, heads, row_chunks), of the key and of the value. key_bytes, value_bytes:
    from a token to the next."""
    at = cuda.grid(1)
    token = divide(at, heads * row_chunks)
    if token >= tokens:
        return
    at -= token * heads * row_chunks
    slot = load_int64(slots, token * 8)
    if slot < 0:
        return
    head, page = divide(at, row_chunks), divide(slot, page_size)
    row = (page * heads + head) * page_size + slot - page * page_size
    target = (row * row_chunks + at - head * row_chunks) * CHUNK
    new_key = load16(key, token * key_bytes + at * CHUNK)
    new_value = load16(value, token * value_bytes + at * CHUNK)
    store16(key_cache, target, new_key)
    store16(value_cache, target, new_value)


def move_blocks_v2(
    source,
    target,
    page_ids,
    runs,
    runs_per_block,
    heads,
    pages,
    run_chunks,
    first,
    plane_bytes,
    page_bytes,
    block_bytes,
    to_pages,
):
    """Warp: one run, a page of one head; runs are counted in the blocks' own order. first: the byte of the
    caches where the range of layers and heads begins; plane_bytes: from the keys to the
    values of a layer, and on to the next layer's keys."""
    lane = cuda.threadIdx.x % 32
    run = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
    if run >= runs:
        return
    b = divide(run, runs_per_block)
    run -= b * runs_per_block
    rest = divide(run, pages)
    page = load_int32(page_ids, (b * pages + run - rest * pages) * 4)
    if page < 0:
        return
    plane = divide(rest, heads)  # keys of the first layer, its values, keys of the next
    head = rest - plane * heads
    cached = first + plane * plane_bytes + page * page_bytes
    cached += head * run_chunks * CHUNK + lane * CHUNK
    block = b * block_bytes + run * run_chunks * CHUNK + lane * CHUNK
    read, write = (block, cached) if to_pages else (cached, block)
    at = lane
    while at + (AT_ONCE - 1) * 32 < run_chunks:
        w0 = load16(source, read)
        w1 = load16(source, read + 32 * CHUNK)
        w2 = load16(source, read + 64 * CHUNK)
        w3 = load16(source, read + 96 * CHUNK)
        store16(target, write, w0)
        store16(target, write + 32 * CHUNK, w1)
        store16(target, write + 64 * CHUNK, w2)
        store16(target, write + 96 * CHUNK, w3)
        read += AT_ONCE * 32 * CHUNK
        write += AT_ONCE * 32 * CHUNK
        at += AT_ONCE * 32
    while at < run_chunks:
        store16(target, write, load16(source, read))
        read += 32 * CHUNK
        write += 32 * CHUNK
        at += 32


def copy_pages_v2(caches, sources, targets, pairs, pages, page_chunks):
    """Thread: one chunk of a page in plane y; it copies all pairs in their order, so that a target may be a
    later source."""
    at = cuda.grid(1)
    if at >= page_chunks:
        return
    plane = cuda.blockIdx.y * pages
    for i in range(pairs):
        source, target = load_int32(sources, i * 4), load_int32(targets, i * 4)
        words = load16(caches, ((plane + source) * page_chunks + at) * CHUNK)
        store16(caches, ((plane + target) * page_chunks + at) * CHUNK, words)


def few_slots(cache: Any) -> bool:
    """Whether 32 bits hold every slot of (pages, kv_heads, page_size, head_dim), as `divide` wants."""
    return cache.shape[0] * cache.shape[2] < 2**31


@on_its_device
def launch_scatter_kv(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    """scatter_kv on checked device arrays."""
    tokens, heads, head_dim = key.shape
    item = key.dtype.itemsize
    steps = [strides_of(array)[0] * item for array in (key, value)]
    fits = few_slots(key_cache) and not any(n % CHUNK for n in (head_dim * item, *steps))
    if not fits or not aligned(key, value, key_cache, value_cache):
        launch_scatter_kv_plain(key, value, key_cache, value_cache, slots)
        return
    pointers, stream = addresses(key, value, key_cache, value_cache, slots)
    row_chunks = head_dim * item // CHUNK
    grid = -(-tokens * heads * row_chunks // THREADS)
    sizes = (tokens, heads, key_cache.shape[2], row_chunks, *steps)
    compiled(scatter_kv_v2)[grid, THREADS, stream](*pointers, *(np.int64(n) for n in sizes))


@on_its_device
def launch_scatter_kv_plain(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    """v1."""
    views, stream = on_device(key, value, key_cache, value_cache, slots)
    grid = -(-math.prod(key.shape) // THREADS)
    compiled(scatter_kv_v1)[grid, THREADS, stream](*views)


MAX_GRID_Z = 65535
"""CUDA's limit for the third axis of a grid."""


@on_its_device
def launch_move_blocks(
    caches: Any, page_ids: Any, blocks: Any, part: tuple[int, int, int, int], to_pages: bool
) -> None:
    """gather_blocks or scatter_blocks on checked device arrays, blocks of the caches' dtype or as bytes.

    part: (first layer, layers, first head, heads) of the caches.
    """
    first_layer, layer_count, first_head, head_count = part
    item, pages = caches.dtype.itemsize, page_ids.shape[1]
    run_bytes = math.prod(caches.shape[4:]) * item
    page_bytes = run_bytes * caches.shape[3]
    plane_bytes = page_bytes * caches.shape[2]
    block_bytes = strides_of(blocks)[0] * blocks.dtype.itemsize
    if run_bytes % CHUNK or block_bytes % CHUNK or not aligned(caches, blocks):
        launch_move_blocks_plain(caches, page_ids, blocks, part, to_pages)
        return
    source, target = (blocks, caches) if to_pages else (caches, blocks)
    pointers, stream = addresses(source, target, page_ids)
    runs_per_block = layer_count * 2 * head_count * pages
    runs = page_ids.shape[0] * runs_per_block
    first = first_layer * 2 * plane_bytes + first_head * run_bytes
    sizes = (runs, runs_per_block, head_count, pages, run_bytes // CHUNK, first)
    steps = (plane_bytes, page_bytes, block_bytes)
    compiled(move_blocks_v2)[-(-runs // WARPS), THREADS, stream](
        *pointers, *(np.int64(n) for n in (*sizes, *steps)), to_pages
    )


@on_its_device
def launch_move_blocks_plain(
    caches: Any, page_ids: Any, blocks: Any, part: tuple[int, int, int, int], to_pages: bool
) -> None:
    """v1."""
    if len(blocks.shape) == 5:  # bytes: then the caches' are moved
        caches = as_bytes(caches)
        blocks = blocks.reshape(*blocks.shape[:4], page_ids.shape[1] * caches.shape[4], caches.shape[5])
    views, stream = on_device(caches, page_ids, blocks)
    first_layer, layer_count, first_head, head_count = part
    piece = -(-head_count * caches.shape[4] * caches.shape[5] // THREADS)
    pages = page_ids.shape[1]
    at_once = max(1, MAX_GRID_Z // pages)
    for b in range(0, page_ids.shape[0], at_once):
        count = min(at_once, page_ids.shape[0] - b)
        grid = (piece, layer_count * 2, count * pages)
        ids, some = (
            (views[1], views[2]) if count == page_ids.shape[0] else (v[b : b + count] for v in views[1:])
        )
        compiled(move_blocks_v1)[grid, THREADS, stream](
            views[0], ids, some, np.int64(first_layer), np.int64(first_head), to_pages
        )


@on_its_device
def launch_copy_pages(caches: Any, source_ids: Any, target_ids: Any) -> None:
    """copy_pages on checked device arrays."""
    page_bytes = math.prod(caches.shape[3:]) * caches.dtype.itemsize
    planes = caches.shape[0] * 2
    if page_bytes % CHUNK or not aligned(caches):
        launch_copy_pages_plain(caches, source_ids, target_ids)
        return
    pointers, stream = addresses(caches, source_ids, target_ids)
    sizes = (source_ids.shape[0], caches.shape[2], page_bytes // CHUNK)
    grid = (-(-page_bytes // CHUNK // THREADS), planes)
    compiled(copy_pages_v2)[grid, THREADS, stream](*pointers, *(np.int64(n) for n in sizes))


@on_its_device
def launch_copy_pages_plain(caches: Any, source_ids: Any, target_ids: Any) -> None:
    """v1."""
    views, stream = on_device(caches, source_ids, target_ids)
    grid = (-(-math.prod(caches.shape[3:]) // THREADS), caches.shape[0] * 2)
    compiled(copy_pages_v1)[grid, THREADS, stream](*views)
