"""Moving KV on CUDA: the CUDA forms of blocks.py, which holds interface, checks and index mapping.

First rung of each: one thread an element, neighbours next to each other along head_dim, so that both sides of
every copy are read and written in whole lines. Elements are moved as they are, whatever their type.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kernels_numba.backend_cuda import cuda, on_device

THREADS = 64


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


@functools.cache
def _compiled(kernel: Any) -> Any:
    return cuda.jit(kernel)


def launch_scatter_kv(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    """scatter_kv on checked device arrays."""
    views, stream = on_device(key, value, key_cache, value_cache, slots)
    grid = -(-math.prod(key.shape) // THREADS)
    _compiled(scatter_kv_v1)[grid, THREADS, stream](*views)


MAX_GRID_Z = 65535
"""CUDA's limit for the third axis of a grid."""


def launch_move_blocks(
    caches: Any, page_ids: Any, blocks: Any, part: tuple[int, int, int, int], to_pages: bool
) -> None:
    """gather_blocks or scatter_blocks on checked device arrays; part as blocks._move_block_runs has it."""
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
        _compiled(move_blocks_v1)[grid, THREADS, stream](
            views[0], ids, some, np.int64(first_layer), np.int64(first_head), to_pages
        )


def launch_copy_pages(caches: Any, source_ids: Any, target_ids: Any) -> None:
    """copy_pages on checked device arrays."""
    views, stream = on_device(caches, source_ids, target_ids)
    grid = (-(-math.prod(caches.shape[3:]) // THREADS), caches.shape[0] * 2)
    _compiled(copy_pages_v1)[grid, THREADS, stream](*views)
