"""New tokens' keys and queries, turned by their position while they are moved: the kernels of `scatter_kv`.

Called by blocks.scatter_kv, which holds the interface and the checks. The rotary embedding turns each pair of
channels (c, c + head_dim // 2) by an angle that grows with the position:

    turned[c] = row[c] * cosine[p, c] + row[c +- head_dim // 2] * sine[p, c]

where the tables hold both halves of a row, with the sine of the first half negated.

As torch computes it: one rounded product, then one fused multiply-add (a product and addcmul). The ladder:
    v0  NumPy in float64, the oracle of the tests
    v1  a row at a time through a scratch row: read once, written once, where torch's four operations would
        read and write six times and the copy into the pages a seventh time
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import numpy as np

from kernels_numba.intrinsics.numerics import copy_bytes, store, widen
from kernels_numba.intrinsics.vectors import fused
from kernels_numba.runtime import PART, njit


def rotate_v0(rows: np.ndarray, cosine: np.ndarray, sine: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The oracle: rows (tokens, heads, head_dim), tables (positions, 1, head_dim); float64."""
    wide, half = rows.astype(np.float64), rows.shape[-1] // 2
    return wide * cosine[positions] + np.roll(wide, half, axis=-1) * sine[positions]


@njit(**PART)
def _turn(source, target, target_step, heads, row, turned, cosine, sine):
    """The heads of one token, from address `source` on, to `target`, `target + target_step`, ...

    row, turned   (head_dim,) scratch of the rows' dtype
    """
    half = row.shape[0] // 2
    row_bytes = row.shape[0] * row.itemsize
    for head in range(heads):
        copy_bytes(row.ctypes.data, source + head * row_bytes, row_bytes)
        for d in range(half):
            store(turned, d, fused(widen(row[half + d]), sine[d], widen(row[d]) * cosine[d]))
        for d in range(half):
            low, high = widen(row[d]), widen(row[half + d])
            store(turned, half + d, fused(low, sine[half + d], high * cosine[half + d]))
        copy_bytes(target + head * target_step, turned.ctypes.data, row_bytes)


@njit(cache=True, nogil=True)
def scatter_rotated(key, key_step, key_cache, slots, cosine, sine, positions, query, query_step, query_heads):
    """v1: turned keys into their slots, turned queries into their own places.

    key, query   addresses, steps in bytes from token to token; query_heads 0: no query
    """
    kv_heads, page_size, head_dim = key_cache.shape[1:]
    row = np.empty(head_dim, key_cache.dtype)
    turned = np.empty(head_dim, key_cache.dtype)
    row_bytes = head_dim * key_cache.itemsize
    head_step = page_size * row_bytes
    cache = key_cache.ctypes.data
    for token in range(slots.shape[0]):
        cos, sin = cosine[positions[token], 0], sine[positions[token], 0]
        if slots[token] >= 0:
            page, at = slots[token] // page_size, slots[token] % page_size
            slot = cache + page * kv_heads * head_step + at * row_bytes
            _turn(key + token * key_step, slot, head_step, kv_heads, row, turned, cos, sin)
        here = query + token * query_step
        _turn(here, here, row_bytes, query_heads, row, turned, cos, sin)
