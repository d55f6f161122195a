"""Moving KV: new tokens into pages, pages into contiguous blocks and back, pages onto pages.

Called by the engine (a step's new keys and values; copy-on-write) and on KV's way to and from the pool. Knows
bytes and shapes only: one compiled mover serves every dtype. The ladder of each:
    v0  NumPy indexing, the oracle of the tests
    v1  one memcpy for each run of bytes that is contiguous on both sides, without the GIL

Not parallel kernels, so any number of Python threads may be inside at once. Index mapping:

    caches  (layers, 2, pages, kv_heads, page_size, head_dim)       one array; [:, 0] keys, [:, 1] values
    blocks  (blocks, layers, 2, kv_heads, block_tokens, head_dim)   block_tokens = pages_per_block * page_size

    blocks[b, l, kv, h, i * page_size + s, :] <-> caches[l, kv, page_ids[b, i], h, s, :]
                        `- one run of page_size * head_dim elements on both sides

    slot = page * page_size + s                key[token, h, :] -> key_cache[page, h, s, :], a run of head_dim
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN202

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kernels_numba import arrays
from kernels_numba.errors import LayoutError, RangeError
from kernels_numba.numerics import copy_bytes
from kernels_numba.runtime import njit

Part: TypeAlias = slice | range | None


def scatter_kv(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None:
    """Write new tokens' keys and values into their slots.

        key, value              (tokens, kv_heads, head_dim) float32 or bfloat16; each token contiguous,
                                so a slice of a fused projection will do
        key_cache, value_cache  (pages, kv_heads, page_size, head_dim), contiguous, the same dtype; written
        slot_mapping            (tokens,) int64, slot = page * page_size + row; -1 skips the token

    Raises ShapeError, DtypeError, LayoutError, KindError; RangeError for a slot out of range (CPU only).
    """
    named = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    device = arrays.common_device(named | {"slot_mapping": slot_mapping})
    arrays.check_float("key", key)
    for name in ("value", "key_cache", "value_cache"):
        arrays.check_float(name, named[name], ("key", key))
    arrays.check_integer("slot_mapping", slot_mapping, "int64")
    arrays.check_shape("key", key, "tokens", "kv_heads", "head_dim")
    arrays.check_shape("value", value, *key.shape)
    arrays.check_shape("key_cache", key_cache, "pages", key.shape[1], "page_size", key.shape[2])
    arrays.check_shape("value_cache", value_cache, *key_cache.shape)
    arrays.check_shape("slot_mapping", slot_mapping, key.shape[0])
    for name in ("key_cache", "value_cache"):
        arrays.check_contiguous(name, named[name])
    arrays.check_contiguous("slot_mapping", slot_mapping)
    if key.shape[0] == 0:
        return
    for name in ("key", "value"):
        if arrays.strides_of(named[name])[1:] != (key.shape[2], 1):
            found = f"array of strides {arrays.strides_of(named[name])}"
            raise LayoutError(name, found, f"strides (any, {key.shape[2]}, 1): each token contiguous")
    if device == arrays.CUDA:
        from kernels_numba.blocks_cuda import launch_scatter_kv

        launch_scatter_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    slots = arrays.as_numpy(slot_mapping)
    _check_ids("slot_mapping", slots, key_cache.shape[0] * key_cache.shape[2])
    for new, cache in ((key, key_cache), (value, value_cache)):
        source, target = arrays.as_numpy(new), arrays.as_numpy(cache)
        shape = (target.shape[1], target.shape[2], target.shape[3] * target.itemsize)
        _move_tokens(_address(target), _address(source), source.strides[0], slots, *shape)


def gather_blocks(caches: Any, page_ids: Any, out: Any, *, layers: Part = None, heads: Part = None) -> None:
    """Copy pages of all layers into contiguous blocks, in one call.

        caches    (layers, 2, pages, kv_heads, page_size, head_dim), contiguous, one array
        page_ids  (blocks, pages_per_block) int32; -1 leaves that part of the block as it is
        out       (blocks, len(layers), 2, len(heads), pages_per_block * page_size, head_dim),
                  the caches' dtype; each block contiguous, blocks at any distance; written
        layers    slice or range (step 1) of the caches' layers that `out` holds; None: all
        heads     the same for kv heads

    Raises ShapeError, DtypeError, LayoutError, KindError; RangeError for a page out of range (CPU only).
    """
    _move_blocks("out", out, caches, page_ids, layers, heads, to_pages=False)


def scatter_blocks(src: Any, caches: Any, page_ids: Any, *, layers: Part = None, heads: Part = None) -> None:
    """Copy contiguous blocks into pages of all layers: the reverse of gather_blocks, the same arguments.

    No page may be named twice: which block it would get is left open.
    """
    _move_blocks("src", src, caches, page_ids, layers, heads, to_pages=True)


def copy_pages(caches: Any, source_ids: Any, target_ids: Any) -> None:
    """Copy whole pages of all layers onto others: copy-on-write.

        caches                  (layers, 2, pages, kv_heads, page_size, head_dim), contiguous; written
        source_ids, target_ids  (n,) int32; done in order, so a target may be a later source

    Raises ShapeError, DtypeError, LayoutError, KindError; RangeError for a page out of range (CPU only).
    """
    device = arrays.common_device({"caches": caches, "source_ids": source_ids, "target_ids": target_ids})
    arrays.check_float("caches", caches)
    arrays.check_shape("caches", caches, "layers", 2, "pages", "kv_heads", "page_size", "head_dim")
    arrays.check_contiguous("caches", caches)
    for name, ids in (("source_ids", source_ids), ("target_ids", target_ids)):
        arrays.check_integer(name, ids, "int32")
        arrays.check_shape(name, ids, source_ids.shape[0] if len(source_ids.shape) else "pages")
        arrays.check_contiguous(name, ids)
    if source_ids.shape[0] == 0:
        return
    if device == arrays.CUDA:
        from kernels_numba.blocks_cuda import launch_copy_pages

        launch_copy_pages(caches, source_ids, target_ids)
        return
    view, sources, targets = (arrays.as_numpy(a) for a in (caches, source_ids, target_ids))
    _check_ids("source_ids", sources, view.shape[2], lowest=0)
    _check_ids("target_ids", targets, view.shape[2], lowest=0)
    page_bytes = view.strides[2]
    _move_pages(_address(view), sources, targets, view.shape[0] * 2, view.shape[2], page_bytes)


def _span(name: str, wanted: Any, length: int) -> tuple[int, int]:
    """(first, count) of a slice or range of an axis. Raises RangeError."""
    if wanted is None:
        return 0, length
    span = range(length)[wanted] if isinstance(wanted, slice) else wanted
    expected = f"a slice or range of step 1 within 0 to {length}"
    if not isinstance(span, range) or span.step != 1:
        raise RangeError(name, wanted, expected)
    if len(span) and not 0 <= span.start < span.stop <= length:
        raise RangeError(name, wanted, expected)
    return span.start, len(span)


def _check_ids(name: str, ids: np.ndarray, end: int, lowest: int = -1) -> None:
    """RangeError for the first id outside lowest..end-1."""
    if ids.size and (int(ids.min()) < lowest or int(ids.max()) >= end):
        where = tuple(int(i) for i in np.argwhere((ids < lowest) | (ids >= end))[0])
        at = ", ".join(map(str, where))
        raise RangeError(f"{name}[{at}]", int(ids[where]), f"an id from {lowest} to {end - 1}")


def _address(array: np.ndarray) -> int:
    """Where the array's first byte lies."""
    return array.__array_interface__["data"][0]


def _move_blocks(
    name: str, blocks: Any, caches: Any, page_ids: Any, layers: Part, heads: Part, to_pages: bool
) -> None:
    """Checks of gather_blocks and scatter_blocks, then the copy in the one or the other direction."""
    device = arrays.common_device({"caches": caches, "page_ids": page_ids, name: blocks})
    arrays.check_float("caches", caches)
    arrays.check_float(name, blocks, ("caches", caches))
    arrays.check_integer("page_ids", page_ids, "int32")
    arrays.check_shape("caches", caches, "layers", 2, "pages", "kv_heads", "page_size", "head_dim")
    arrays.check_shape("page_ids", page_ids, "blocks", "pages_per_block")
    page_size, head_dim = caches.shape[4:]
    first_layer, layer_count = _span("layers", layers, caches.shape[0])
    first_head, head_count = _span("heads", heads, caches.shape[3])
    tokens = page_ids.shape[1] * page_size
    arrays.check_shape(name, blocks, page_ids.shape[0], layer_count, 2, head_count, tokens, head_dim)
    arrays.check_contiguous("caches", caches)
    arrays.check_contiguous("page_ids", page_ids)
    if 0 in tuple(blocks.shape):
        return
    arrays.check_contiguous(f"{name}[0]", blocks[0])
    part = (first_layer, layer_count, first_head, head_count)
    if device == arrays.CUDA:
        from kernels_numba.blocks_cuda import launch_move_blocks

        launch_move_blocks(caches, page_ids, blocks, part, to_pages)
        return
    view, ids, array = (arrays.as_numpy(a) for a in (caches, page_ids, blocks))
    _check_ids("page_ids", ids, view.shape[2])
    if not to_pages and not array.flags.writeable:
        raise LayoutError(name, "read-only array", "a writable array")
    strides = (view.strides[0], view.strides[1], view.strides[2], view.strides[3], array.strides[0])
    _move_block_runs(_address(view), _address(array), ids, strides, part, to_pages)


def gather_blocks_v0(caches: np.ndarray, page_ids: np.ndarray, layers: slice, heads: slice) -> np.ndarray:
    """The oracle of both directions: what gather_blocks must write (no -1 in page_ids)."""
    part = caches[layers, :, :, heads][:, :, page_ids]  # layers, 2, blocks, pages, heads, rows, head_dim
    ordered = part.transpose(2, 0, 1, 4, 3, 5, 6)
    return ordered.reshape(*ordered.shape[:4], -1, ordered.shape[-1]).copy()


@njit(cache=True, nogil=True)
def _move_block_runs(caches, blocks, page_ids, strides, part, to_pages):
    """v1 of gather and scatter: walks the block in its own order: that side is read or written straight on.

    caches and blocks are addresses, strides bytes: (layer, kv, page, head of caches; block of blocks).
    """
    layer_step, kv_step, page_step, head_step, block_step = strides
    first_layer, layer_count, first_head, head_count = part
    for b in range(page_ids.shape[0]):
        block = blocks + b * block_step
        for layer in range(first_layer, first_layer + layer_count):
            for kv in range(2):
                plane = caches + layer * layer_step + kv * kv_step
                for head in range(first_head, first_head + head_count):
                    for i in range(page_ids.shape[1]):
                        if page_ids[b, i] >= 0:
                            page = plane + page_ids[b, i] * page_step + head * head_step
                            if to_pages:
                                copy_bytes(page, block, head_step)
                            else:
                                copy_bytes(block, page, head_step)
                        block += head_step


@njit(cache=True, nogil=True)
def _move_tokens(cache, tokens, token_step, slots, heads, page_size, row_bytes):
    """v1 of scatter_kv for keys or values: addresses and bytes."""
    for token in range(slots.shape[0]):
        if slots[token] >= 0:
            page, row = slots[token] // page_size, slots[token] % page_size
            for head in range(heads):
                target = cache + ((page * heads + head) * page_size + row) * row_bytes
                copy_bytes(target, tokens + token * token_step + head * row_bytes, row_bytes)


@njit(cache=True, nogil=True)
def _move_pages(cache, sources, targets, planes, pages, page_bytes):
    """v1 of copy_pages: addresses and bytes; planes = layers * 2."""
    for plane in range(planes):
        start = cache + plane * pages * page_bytes
        for i in range(sources.shape[0]):
            if sources[i] != targets[i]:
                copy_bytes(start + targets[i] * page_bytes, start + sources[i] * page_bytes, page_bytes)
