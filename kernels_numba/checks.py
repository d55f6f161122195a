"""Checks that both attention kernels share, and the compiled look at the block tables.

Called at the head of the public functions, before anything is read. An index out of range would read another
sequence's memory or end the process, so the CPU forms always look: it costs a microsecond.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.errors import RangeError, ShapeError
from kernels_numba.runtime import njit

HEAD_DIMS = "a multiple of 8 from 8 to 256"
MAX_GROUP = 128


def check_attention(query: Any, key_cache: Any, value_cache: Any, tables: Any, lens: Any, out: Any) -> str:
    """What decode and prefill ask alike; returns the device. Raises the errors of errors.py."""
    named = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    return arrays.check_once(
        _check_attention, named | {"block_tables": tables, "context_lens": lens, "out": out}
    )


def _check_attention(named: dict[str, Any]) -> str:
    query, key_cache, value_cache, tables, lens, out = named.values()
    device = arrays.common_device(named)
    arrays.check_float("query", query)
    for name in ("key_cache", "value_cache", "out"):
        arrays.check_float(name, named[name], ("query", query))
    arrays.check_integer("block_tables", tables, "int32")
    arrays.check_integer("context_lens", lens, "int32")
    arrays.check_shape("query", query, "tokens", "heads", "head_dim")
    heads, head_dim = query.shape[1:]
    arrays.check_shape("key_cache", key_cache, "pages", "kv_heads", "page_size", head_dim)
    arrays.check_shape("value_cache", value_cache, *key_cache.shape)
    arrays.check_shape("out", out, *query.shape)
    wrong = wrong_size(heads, head_dim, key_cache.shape[1], key_cache.shape[2])
    if wrong is not None:
        raise wrong
    for name, array in named.items():
        arrays.check_contiguous(name, array)
    arrays.check_writable("out", out)
    return device


def wrong_size(heads: int, head_dim: int, kv_heads: int, page_size: int) -> ShapeError | None:
    """What no kernel can do; None when these sizes are fine."""
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        return ShapeError("query.shape[1]", heads, f"a multiple of the cache's {kv_heads} kv heads")
    if heads > MAX_GROUP * kv_heads:
        most = f"at most {MAX_GROUP} query heads for each of {kv_heads} kv heads"
        return ShapeError("query.shape[1]", heads, most)
    if head_dim % 8 or not 8 <= head_dim <= 256:
        return ShapeError("query.shape[2]", head_dim, HEAD_DIMS)
    if page_size == 0:
        return ShapeError("key_cache.shape[2]", 0, "a page of at least one token")
    return None


_INT32 = np.dtype(np.int32)
_AS_THEY_ARE = (np.dtype(np.float32), _INT32, np.dtype(np.uint16))
"""Element types that a kernel sees under their own names."""


def plain_views(*six: Any) -> list[np.ndarray] | None:
    """The arrays of `check_attention` as kernels take them, if one look shows that it would pass; else None.

    A model asks once a layer and token: this look takes a quarter of the time of asking one by one, which
    then finds out what is wrong, and knows the arrays that are not plain.
    """
    torch = sys.modules.get("torch")
    views = [_plain_view(array, torch) for array in six]
    query, keys, values, tables, lens, out = views
    if query is None or keys is None or values is None or tables is None or lens is None or out is None:
        return None
    if not (query.ndim == 3 and keys.ndim == 4 and keys.shape == values.shape and query.shape == out.shape):
        return None
    (_, heads, head_dim), (_, kv_heads, page_size, width) = query.shape, keys.shape
    fits = (
        query.dtype == keys.dtype == values.dtype == out.dtype != _INT32
        and tables.dtype == lens.dtype == _INT32
        and head_dim == width
        and out.flags.writeable
        and wrong_size(heads, head_dim, kv_heads, page_size) is None
    )
    return [query, keys, values, tables, lens, out] if fits else None


def _plain_view(array: Any, torch: Any) -> np.ndarray | None:
    """A contiguous array of a known element type, without a copy; None for anything else."""
    view = None
    if type(array) is np.ndarray:
        if array.dtype in _AS_THEY_ARE:
            view = array
        elif (bits := arrays.as_numpy(array)) is not array:
            view = bits
    elif torch is not None and type(array) is torch.Tensor and array.is_cpu and not array.requires_grad:
        if array.dtype in (torch.float32, torch.int32):
            view = array.numpy()
        elif array.dtype in (torch.bfloat16, torch.float16):
            view = arrays.as_numpy(array)
    return view if view is not None and view.flags.c_contiguous else None


NO_WINDOW = 2**31 - 1
"""A window as kernels take it, when there is none: no context is longer."""


def check_window(window: int | None) -> int:
    """The window as a kernel takes it: a token sees itself and the window - 1 tokens before it, None: all.

    Raises RangeError.
    """
    if window is None:
        return NO_WINDOW
    if not 1 <= window <= NO_WINDOW:
        raise RangeError("window", window, "None, or at least 1 token")
    return int(window)


@njit(cache=True, nogil=True)
def check_tables(block_tables, context_lens, pages, page_size, read_from):
    """(-1, 0), or the first sequence and logical page that cannot be; logical page -1: the length itself.

    read_from: (batch,) int64, the first token of each sequence that is read; pages before are not looked at.
    Empty: all are read. An array in any case, so that there is one kernel to compile.
    """
    for b in range(context_lens.shape[0]):
        used = (context_lens[b] + page_size - 1) // page_size
        if context_lens[b] < 0 or used > block_tables.shape[1]:
            return b, -1
        first = max(0, read_from[b]) // page_size if read_from.shape[0] else 0
        for i in range(first, used):
            if not 0 <= block_tables[b, i] < pages:
                return b, i
    return -1, 0


def raise_for_table(
    found: tuple[int, int], tables: np.ndarray, lens: np.ndarray, cache: tuple[int, ...]
) -> None:
    """RangeError for what `check_tables` found."""
    sequence, logical = found
    if sequence < 0:
        return
    if logical < 0:
        most = tables.shape[1] * cache[2]
        raise RangeError(
            f"context_lens[{sequence}]", int(lens[sequence]), f"0 to {most}, what the table can hold"
        )
    value = int(tables[sequence, logical])
    raise RangeError(f"block_tables[{sequence}, {logical}]", value, f"a page from 0 to {cache[0] - 1}")
