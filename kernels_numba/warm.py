"""Compiles, or loads from the cache, every CPU kernel that an engine will call.

Called once at a rank's start, so that no request waits for a compiler. Knows the public functions only.
"""

from __future__ import annotations

import numpy as np

import kernels_numba
from kernels_numba.errors import DtypeError


def warm_up(
    *, dtype: str, heads: int, kv_heads: int, head_dim: int, page_size: int, block_tokens: int, layers: int
) -> None:
    """Call each CPU kernel on a few tokens of exactly the types that an engine passes.

    dtype is "float32" or "bfloat16", the others the model's and the cache's shapes. Later calls compile
    nothing. Raises DtypeError for another dtype, ShapeError for shapes that the kernels refuse.
    """
    if dtype not in ("float32", "bfloat16"):
        raise DtypeError("dtype", dtype, "float32 or bfloat16")
    element = np.dtype(np.float32 if dtype == "float32" else np.uint16)
    pages = block_tokens // page_size
    caches = np.zeros((layers, 2, pages, kv_heads, page_size, head_dim), element)
    block = np.zeros((1, layers, 2, kv_heads, block_tokens, head_dim), element)
    ids = np.arange(pages, dtype=np.int32)
    kernels_numba.gather_blocks(caches, ids[None], block)
    kernels_numba.scatter_blocks(block, caches, ids[None])
    kernels_numba.copy_pages(caches, ids, ids)
    new = np.zeros((1, kv_heads, head_dim), element)
    kernels_numba.scatter_kv(new, new, caches[0, 0], caches[0, 1], np.zeros(1, np.int64))
    query, one = np.zeros((1, heads, head_dim), element), np.ones(1, np.int32)
    for attention, lengths in (
        (kernels_numba.paged_attention_decode, (one,)),
        (kernels_numba.paged_attention_prefill, (one, one)),
    ):
        attention(query, caches[0, 0], caches[0, 1], ids[None], *lengths, scale=1.0)
