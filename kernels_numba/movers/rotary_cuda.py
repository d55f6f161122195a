"""New tokens written on CUDA with keys and queries turned by their position: the CUDA form of rotary.py.

Launched by blocks.scatter_kv, which holds the interface and the checks. One launch does all three: keys are
turned into their slots, values moved beside them, queries turned in place. To the CPU form's bits: one
rounded product, then one fused multiply-add.
    v1  a thread for each pair of channels (c, c + head_dim / 2) of a head. Any head_dim and alignment
    v2  16 bytes of a head's first half and the 16 of its second in one thread
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kernels_numba.arrays import dtype_name, strides_of
from kernels_numba.gpu.backend_cuda import (
    UNPACK,
    addresses,
    aligned,
    as_bits,
    as_float,
    compiled,
    cuda,
    divide,
    fused,
    load16,
    load_int64,
    narrow,
    on_device,
    on_its_device,
    pack_bfloat16,
    pack_float16,
    store16,
    times,
    widen,
)
from kernels_numba.movers.block_kernels_cuda import few_slots

THREADS = 64
CHUNK = 16
"""Bytes of one access."""


def scatter_rotated_v1(
    key, value, key_cache, value_cache, slots, cosine, sine, positions, query, query_heads
):
    """Thread: channels c and c + half of a head of a token; kv heads first, then the query's (0: none)."""
    at = cuda.grid(1)
    kv_heads, head_dim, page_size = key.shape[1], key.shape[2], key_cache.shape[2]
    half, heads = head_dim // 2, kv_heads + query_heads
    if at >= key.shape[0] * heads * half:
        return
    token, head, c = at // (heads * half), at // half % heads, at % half
    position, slot = positions[token], slots[token]
    cos_low, cos_high = cosine[position, 0, c], cosine[position, 0, half + c]
    sin_low, sin_high = sine[position, 0, c], sine[position, 0, half + c]
    if head >= kv_heads:
        low, high = widen(query[token, head - kv_heads, c]), widen(query[token, head - kv_heads, half + c])
        query[token, head - kv_heads, c] = narrow(fused(high, sin_low, times(low, cos_low)), query)
        query[token, head - kv_heads, half + c] = narrow(fused(low, sin_high, times(high, cos_high)), query)
    elif slot >= 0:
        page, row = slot // page_size, slot % page_size
        low, high = widen(key[token, head, c]), widen(key[token, head, half + c])
        key_cache[page, head, row, c] = narrow(fused(high, sin_low, times(low, cos_low)), key_cache)
        key_cache[page, head, row, half + c] = narrow(fused(low, sin_high, times(high, cos_high)), key_cache)
        value_cache[page, head, row, c] = value[token, head, c]
        value_cache[page, head, row, half + c] = value[token, head, half + c]


@functools.cache
def make_scatter_rotated_v2(element: str) -> Any:
    """The kernel of one element type."""
    unpack, pack = UNPACK[element], pack_bfloat16 if element == "bfloat16" else pack_float16
    wide = element == "float32"
    item = 4 if wide else 2
    per_word, channels = 4 // item, CHUNK // item  # of a chunk
    tables_shape = (4, channels)

    def scatter_rotated_v2(
        key,
        value,
        key_cache,
        value_cache,
        slots,
        cosine,
        sine,
        positions,
        query,
        tokens,
        kv_heads,
        query_heads,
        page_size,
        half_chunks,
        key_bytes,
        value_bytes,
        query_bytes,
    ):
        at = cuda.grid(1)
        heads, half = kv_heads + query_heads, half_chunks * CHUNK
        token = divide(at, heads * half_chunks)
        if token >= tokens:
            return
        at -= token * heads * half_chunks
        head = divide(at, half_chunks)
        c = (at - head * half_chunks) * CHUNK
        slot = load_int64(slots, token * 8)
        is_query = head >= kv_heads
        if not is_query and slot < 0:
            return
        angles = load_int64(positions, token * 8) * half_chunks * (2 * channels * 4) + (c // item) * 4
        turns = cuda.local.array(tables_shape, np.float32)  # cosines of both halves, sines of both
        for h in range(2):
            for j in range(channels // 4):
                place = angles + h * half_chunks * (channels * 4) + j * CHUNK
                cosines, sines = load16(cosine, place), load16(sine, place)
                for w in range(4):
                    turns[h, j * 4 + w] = as_float(cosines[w])
                    turns[2 + h, j * 4 + w] = as_float(sines[w])
        if is_query:
            source = token * query_bytes + (head - kv_heads) * half * 2 + c
            low, high = load16(query, source), load16(query, source + half)
        else:
            source = token * key_bytes + head * half * 2 + c
            low, high = load16(key, source), load16(key, source + half)
        turned = cuda.local.array(tables_shape, np.float32)
        words = cuda.local.array((2, 4), np.uint32)
        for w in range(4):
            for e in range(per_word):
                d = w * per_word + e
                x, y = unpack(low[w])[e], unpack(high[w])[e]
                turned[0, d] = fused(y, turns[2, d], times(x, turns[0, d]))
                turned[1, d] = fused(x, turns[3, d], times(y, turns[1, d]))
        for h in range(2):
            for w in range(4):
                if wide:
                    words[h, w] = as_bits(turned[h, w])
                else:
                    words[h, w] = pack(turned[h, 2 * w], turned[h, 2 * w + 1])
        first = (words[0, 0], words[0, 1], words[0, 2], words[0, 3])
        second = (words[1, 0], words[1, 1], words[1, 2], words[1, 3])
        if is_query:
            store16(query, source, first)
            store16(query, source + half, second)
            return
        page = divide(slot, page_size)
        target = ((page * kv_heads + head) * page_size + slot - page * page_size) * half * 2 + c
        store16(key_cache, target, first)
        store16(key_cache, target + half, second)
        source = token * value_bytes + head * half * 2 + c
        store16(value_cache, target, load16(value, source))
        store16(value_cache, target + half, load16(value, source + half))

    return scatter_rotated_v2


@on_its_device
def launch_scatter_rotated(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    rotary: tuple[Any, Any],
    positions: Any,
    query: Any,
) -> None:
    """scatter_kv with `rotary` on checked device arrays; query may be None."""
    tokens, kv_heads, head_dim = key.shape
    item, query_heads = key.dtype.itemsize, 0 if query is None else query.shape[1]
    turned = key if query is None else query
    steps = [strides_of(array)[0] * item for array in (key, value, turned)]
    arrays = (key, value, key_cache, value_cache, slots, *rotary, positions, turned)
    fits = few_slots(key_cache) and not head_dim * item % (2 * CHUNK) and not any(n % CHUNK for n in steps)
    if not fits or not aligned(*arrays):
        launch_scatter_rotated_plain(key, value, key_cache, value_cache, slots, rotary, positions, query)
        return
    pointers, stream = addresses(*arrays)
    half_chunks = head_dim * item // (2 * CHUNK)
    sizes = (tokens, kv_heads, query_heads, key_cache.shape[2], half_chunks, *steps)
    grid = -(-tokens * (kv_heads + query_heads) * half_chunks // THREADS)
    kernel = make_scatter_rotated_v2(dtype_name(key))
    compiled(kernel)[grid, THREADS, stream](*pointers, *(np.int64(n) for n in sizes))


@on_its_device
def launch_scatter_rotated_plain(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    rotary: tuple[Any, Any],
    positions: Any,
    query: Any,
) -> None:
    """v1."""
    turned, query_heads = (key, 0) if query is None else (query, query.shape[1])
    views, stream = on_device(key, value, key_cache, value_cache, slots, *rotary, positions, turned)
    grid = -(-key.shape[0] * (key.shape[1] + query_heads) * (key.shape[2] // 2) // THREADS)
    compiled(scatter_rotated_v1)[grid, THREADS, stream](*views, np.int64(query_heads))
