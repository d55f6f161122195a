"""Moving KV on the CPU: the compiled movers of blocks.py, which holds interface, checks and index mapping.

They know addresses and bytes only: one of each serves every dtype. The ladder:
    v0  NumPy indexing, the oracle of the tests
    v1  one memcpy for each run of bytes that is contiguous on both sides, without the GIL: small moves
    v2  blocks only: by all threads, past the caches, a page's heads one after the other because they lie side
        by side; 70 MB three times as fast as v1: large moves, if no other thread is in a parallel kernel
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import numpy as np

from kernels_numba.intrinsics.numerics import copy_bytes
from kernels_numba.intrinsics.streaming import fence, stream_bytes
from kernels_numba.runtime import PART, njit, prange


def gather_blocks_v0(caches: np.ndarray, page_ids: np.ndarray, layers: slice, heads: slice) -> np.ndarray:
    """The oracle of both directions: what gather_blocks must write (no -1 in page_ids)."""
    part = caches[layers, :, :, heads][:, :, page_ids]  # layers, 2, blocks, pages, heads, rows, head_dim
    ordered = part.transpose(2, 0, 1, 4, 3, 5, 6)
    return ordered.reshape(*ordered.shape[:4], -1, ordered.shape[-1]).copy()


@njit(cache=True, nogil=True)
def first_outside(ids, lowest, end):
    """Index of the first of flat ids that is not in lowest..end-1; -1: none."""
    for i in range(ids.shape[0]):
        if not lowest <= ids[i] < end:
            return i
    return -1


@njit(**PART)
def _move_plane(item, caches, blocks, page_ids, strides, part, to_pages, streamed):
    """One block's keys or values of one layer. A page after the other: there the heads lie side by side."""
    first_layer, layer_count, first_head, heads = part
    b, plane = item // (layer_count * 2), item % (layer_count * 2)
    pages, run = page_ids[b], strides[3]
    layer = caches + (first_layer + plane // 2) * strides[0] + plane % 2 * strides[1]
    block = blocks + b * strides[4] + plane * heads * pages.shape[0] * run
    for i in range(pages.shape[0]):
        if pages[i] >= 0:
            for head in range(heads):
                page = layer + pages[i] * strides[2] + (first_head + head) * run
                piece = block + (head * pages.shape[0] + i) * run
                target, source = (page, piece) if to_pages else (piece, page)
                if streamed:
                    stream_bytes(target, source, run)
                else:
                    copy_bytes(target, source, run)
    if streamed:
        fence()


@njit(cache=True, nogil=True)
def move_block_runs_v1(caches, blocks, page_ids, strides, part, to_pages, streamed):
    """gather and scatter by the calling thread alone.

    caches and blocks are addresses, strides bytes: (layer, kv, page, head of caches; block of blocks);
    part is (first layer, layers, first head, heads).
    """
    for item in range(page_ids.shape[0] * part[1] * 2):
        _move_plane(item, caches, blocks, page_ids, strides, part, to_pages, streamed)


@njit(cache=True, nogil=True, parallel=True)
def move_block_runs_v2(caches, blocks, page_ids, strides, part, to_pages):
    """The same by all threads: the keys or the values of a layer of a block are dealt out."""
    for item in prange(page_ids.shape[0] * part[1] * 2):
        _move_plane(item, caches, blocks, page_ids, strides, part, to_pages, True)


@njit(cache=True, nogil=True)
def move_tokens(cache, tokens, token_step, slots, heads, page_size, row_bytes):
    """v1 of scatter_kv for keys or values: addresses and bytes."""
    for token in range(slots.shape[0]):
        if slots[token] >= 0:
            page, row = slots[token] // page_size, slots[token] % page_size
            for head in range(heads):
                target = cache + ((page * heads + head) * page_size + row) * row_bytes
                copy_bytes(target, tokens + token * token_step + head * row_bytes, row_bytes)


@njit(cache=True, nogil=True)
def move_pages(cache, sources, targets, planes, pages, page_bytes):
    """v1 of copy_pages: addresses and bytes; planes = layers * 2."""
    for plane in range(planes):
        start = cache + plane * pages * page_bytes
        for i in range(sources.shape[0]):
            if sources[i] != targets[i]:
                copy_bytes(start + targets[i] * page_bytes, start + sources[i] * page_bytes, page_bytes)
