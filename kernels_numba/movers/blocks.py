"""Moving KV: new tokens into pages, pages into contiguous blocks and back, pages onto pages.

Called by the engine (a step's new keys and values; copy-on-write) and on KV's way to and from the pool.
Checks, then chooses the form: the CPU's in block_kernels.py, with a rotation in rotary.py, with a codec in
codec_kernels.py; each has a CUDA form of its name with _cuda behind it. Any number of Python threads may be
inside at once. Index mapping:

    caches  (layers, 2, pages, kv_heads, page_size, head_dim)       one array; [:, 0] keys, [:, 1] values
    blocks  (blocks, layers, 2, kv_heads, block_tokens, head_dim)   block_tokens = pages_per_block * page_size

    blocks[b, l, kv, h, i * page_size + s, :] <-> caches[l, kv, page_ids[b, i], h, s, :]
                        `- one run of page_size * head_dim elements on both sides

    slot = page * page_size + s                key[token, h, :] -> key_cache[page, h, s, :], a run of head_dim
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kernels_numba import arrays
from kernels_numba.codecs import Codec
from kernels_numba.errors import KindError, LayoutError, RangeError, ShapeError
from kernels_numba.movers.block_kernels import (
    first_outside,
    move_block_runs_v1,
    move_block_runs_v2,
    move_pages,
    move_tokens,
)
from kernels_numba.runtime import PARALLEL_CALL, get_num_threads

Part: TypeAlias = slice | range | None

PARALLEL_BYTES = 1 << 21
"""From here on a move is parallel and past the caches: what is smaller is read again before it leaves the
second-level cache, and done before a second thread would be awake."""


def scatter_kv(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    rotary: tuple[Any, Any] | None = None,
    positions: Any = None,
    query: Any = None,
) -> None:
    """Write new tokens' keys and values into their slots; with `rotary`, turn the keys on the way.

        key, value              (tokens, kv_heads, head_dim) float32, float16 or bfloat16; each token
                                contiguous, so a slice of a fused projection will do
        key_cache, value_cache  (pages, kv_heads, page_size, head_dim), contiguous, the same dtype; written
        slot_mapping            (tokens,) int64, slot = page * page_size + row; -1 skips the token
        rotary                  (cosine, sine), each (positions, 1, head_dim) float32, contiguous, the sine of
                                the first half negated: the tables of mooncake_lite/model/rope.py
        positions               (tokens,) int64, rows of the tables; with `rotary` only
        query                   (tokens, heads, head_dim), as `key`; turned in place; with `rotary` only

    The key itself stays as it is. Both forms give the bits of torch's product and addcmul on the CPU, and a
    plain scatter_kv.
    Raises ShapeError, DtypeError, LayoutError, KindError; RangeError for a slot or a position out of range
    (CPU only). Then nothing is written.
    """
    named = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    named["slot_mapping"] = slot_mapping
    if rotary is not None:
        named |= {"cosine": rotary[0], "sine": rotary[1], "positions": positions, "query": query}
    elif positions is not None or query is not None:
        raise ShapeError("rotary", None, "(cosine, sine), since positions or query are given")
    device = arrays.check_once(_check_scatter, named)
    if key.shape[0] == 0:
        return
    if device == arrays.CUDA:
        moved = (key, value, key_cache, value_cache, slot_mapping)
        if rotary is None:
            from kernels_numba.movers.block_kernels_cuda import launch_scatter_kv

            launch_scatter_kv(*moved)
        else:
            from kernels_numba.movers.rotary_cuda import launch_scatter_rotated

            launch_scatter_rotated(*moved, rotary, positions, query)
        return
    slots = arrays.as_numpy(slot_mapping)
    pages, heads, page_size, head_dim = key_cache.shape
    check_ids("slot_mapping", slots, pages * page_size)
    row_bytes = head_dim * key_cache.dtype.itemsize
    if rotary is None:
        step = arrays.strides_of(key)[0] * key_cache.dtype.itemsize
        move_tokens(
            arrays.address_of(key_cache), arrays.address_of(key), step, slots, heads, page_size, row_bytes
        )
    else:
        _scatter_rotated(key, key_cache, slots, rotary, positions, query)
    step = arrays.strides_of(value)[0] * key_cache.dtype.itemsize
    move_tokens(
        arrays.address_of(value_cache), arrays.address_of(value), step, slots, heads, page_size, row_bytes
    )


def _check_scatter(named: dict[str, Any]) -> str:
    """All checks of scatter_kv but those of ids; returns the device. "cosine" is there when rotary is."""
    key, key_cache, slots = named["key"], named["key_cache"], named["slot_mapping"]
    device = arrays.common_device({name: array for name, array in named.items() if array is not None})
    arrays.check_float("key", key)
    arrays.check_shape("key", key, "tokens", "kv_heads", "head_dim")
    tokens, heads, head_dim = key.shape
    for name in ("value", "key_cache", "value_cache"):
        arrays.check_float(name, named[name], ("key", key))
    arrays.check_integer("slot_mapping", slots, "int64")
    arrays.check_shape("value", named["value"], tokens, heads, head_dim)
    arrays.check_shape("key_cache", key_cache, "pages", heads, "page_size", head_dim)
    arrays.check_shape("value_cache", named["value_cache"], *key_cache.shape)
    arrays.check_shape("slot_mapping", slots, tokens)
    for name in ("key_cache", "value_cache", "slot_mapping"):
        arrays.check_contiguous(name, named[name])
    for name in ("key_cache", "value_cache"):
        arrays.check_writable(name, named[name])
    _check_token_rows("key", key)
    _check_token_rows("value", named["value"])
    if "cosine" in named:
        check_rotary(named, tokens, head_dim)
        _check_query(named["query"], key)
    return device


def _check_token_rows(name: str, array: Any) -> None:
    """LayoutError unless each token of (tokens, heads, head_dim) is contiguous; an axis of one element has no
    step that could matter."""
    strides, (tokens, heads, head_dim) = arrays.strides_of(array), array.shape
    fits = (heads == 1 or strides[1] == head_dim) and (head_dim == 1 or strides[2] == 1)
    if not fits and 0 not in (tokens, heads, head_dim):
        expected = f"strides (any, {array.shape[2]}, 1): each token contiguous"
        raise LayoutError(name, f"array of strides {strides}", expected)


def check_rotary(named: dict[str, Any], tokens: int, head_dim: int) -> None:
    """The rotary tables and the tokens' positions in them."""
    positions = named["positions"]
    if head_dim % 2:
        raise ShapeError("key.shape[2]", head_dim, "an even head_dim: channels are turned in pairs")
    if positions is None:
        raise ShapeError("positions", None, f"({tokens},) int64, since rotary is given")
    for name in ("cosine", "sine"):
        arrays.check_integer(name, named[name], "float32")
        arrays.check_shape(name, named[name], named["cosine"].shape[0], 1, head_dim)
        arrays.check_contiguous(name, named[name])
    arrays.check_integer("positions", positions, "int64")
    arrays.check_shape("positions", positions, tokens)
    arrays.check_contiguous("positions", positions)


def _check_query(query: Any, key: Any) -> None:
    """A query that is turned beside a checked key, or None."""
    if query is not None:
        arrays.check_float("query", query, ("key", key))
        arrays.check_shape("query", query, key.shape[0], "heads", key.shape[2])
        _check_token_rows("query", query)
        arrays.check_writable("query", query)


def _scatter_rotated(
    key: Any, key_cache: Any, slots: np.ndarray, rotary: tuple[Any, Any], positions: Any, query: Any
) -> None:
    """Checked CPU arrays: turned keys into their slots, the query turned in place. Raises RangeError."""
    from kernels_numba.movers.rotary import scatter_rotated

    cosine, sine, where = (arrays.as_numpy(a) for a in (*rotary, positions))
    check_ids("positions", where, cosine.shape[0], lowest=0)
    itemsize = key_cache.dtype.itemsize
    turned = (0, 0, 0)
    if query is not None:
        turned = (arrays.address_of(query), arrays.strides_of(query)[0] * itemsize, query.shape[1])
    step = arrays.strides_of(key)[0] * itemsize
    scatter_rotated(
        arrays.address_of(key), step, arrays.as_numpy(key_cache), slots, cosine, sine, where, *turned
    )


def gather_blocks(
    caches: Any,
    page_ids: Any,
    out: Any,
    *,
    layers: Part = None,
    heads: Part = None,
    codec: Codec | None = None,
) -> None:
    """Copy pages of all layers into contiguous blocks, in one call.

        caches    (layers, 2, pages, kv_heads, page_size, head_dim), contiguous, one array
        page_ids  (blocks, pages_per_block) int32; -1 leaves that part of the block as it is
        out       (blocks, len(layers), 2, len(heads), pages_per_block * page_size, head_dim),
                  the caches' dtype; each block contiguous, blocks at any distance; written
        layers    slice or range (step 1) of the caches' layers that `out` holds; None: all
        heads     the same for kv heads
        codec     of codecs.py: the blocks are encoded while they are gathered, and `out` then is
                  (blocks, len(layers), 2, len(heads), codec.unit_nbytes(tokens, head_dim, itemsize)) uint8;
                  the CPU and the CUDA form write the same bytes

    A move of PARALLEL_BYTES or more (of the caches) takes all threads and PARALLEL_CALL, if that is free at
    once; otherwise, and for smaller ones, the calling thread does it alone and waits for nobody. So a
    transfer thread beside a computing one gets slower instead of waiting for the end of a kernel; while a
    parallel move of its own runs (4 ms for 64 MB), attention waits.

    Raises ShapeError, DtypeError, LayoutError, KindError; RangeError for a page out of range (CPU only).
    """
    _move_blocks("out", out, caches, page_ids, layers, heads, codec, to_pages=False)


def scatter_blocks(
    src: Any,
    caches: Any,
    page_ids: Any,
    *,
    layers: Part = None,
    heads: Part = None,
    codec: Codec | None = None,
) -> None:
    """Copy contiguous blocks into pages of all layers: the reverse of gather_blocks, the same arguments.

    No page may be named twice: which block it would get is left open.
    """
    _move_blocks("src", src, caches, page_ids, layers, heads, codec, to_pages=True)


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
    arrays.check_writable("caches", caches)
    for name, ids in (("source_ids", source_ids), ("target_ids", target_ids)):
        arrays.check_integer(name, ids, "int32")
        arrays.check_shape(name, ids, source_ids.shape[0] if len(source_ids.shape) else "pages")
        arrays.check_contiguous(name, ids)
    if source_ids.shape[0] == 0:
        return
    if device == arrays.CUDA:
        from kernels_numba.movers.block_kernels_cuda import launch_copy_pages

        launch_copy_pages(caches, source_ids, target_ids)
        return
    view, sources, targets = (arrays.as_numpy(a) for a in (caches, source_ids, target_ids))
    check_ids("source_ids", sources, view.shape[2], lowest=0)
    check_ids("target_ids", targets, view.shape[2], lowest=0)
    page_bytes = view.strides[2]
    move_pages(arrays.address_of(view), sources, targets, view.shape[0] * 2, view.shape[2], page_bytes)


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


def check_ids(name: str, ids: np.ndarray, end: int, lowest: int = -1) -> None:
    """RangeError for the first id outside lowest..end-1."""
    at = first_outside(ids.reshape(-1), lowest, end)
    if at >= 0:
        where = tuple(int(i) for i in np.unravel_index(at, ids.shape))
        shown = ", ".join(map(str, where))
        raise RangeError(f"{name}[{shown}]", int(ids[where]), f"an id from {lowest} to {end - 1}")


def _move_blocks(
    name: str,
    blocks: Any,
    caches: Any,
    page_ids: Any,
    layers: Part,
    heads: Part,
    codec: Codec | None,
    to_pages: bool,
) -> None:
    """Checks of gather_blocks and scatter_blocks, then the move in the one or the other direction."""
    device = arrays.common_device({"caches": caches, "page_ids": page_ids, name: blocks})
    arrays.check_float("caches", caches)
    arrays.check_integer("page_ids", page_ids, "int32")
    arrays.check_shape("caches", caches, "layers", 2, "pages", "kv_heads", "page_size", "head_dim")
    arrays.check_shape("page_ids", page_ids, "blocks", "pages_per_block")
    first_layer, layer_count = _span("layers", layers, caches.shape[0])
    first_head, head_count = _span("heads", heads, caches.shape[3])
    tokens, head_dim = page_ids.shape[1] * caches.shape[4], caches.shape[5]
    outer = (page_ids.shape[0], layer_count, 2, head_count)
    if codec is None:
        arrays.check_float(name, blocks, ("caches", caches))
        arrays.check_shape(name, blocks, *outer, tokens, head_dim)
    else:
        if not isinstance(codec, Codec):
            raise KindError("codec", repr(codec), "None, or what kernels_numba.codec(name) gives")
        codec.check(head_dim)
        arrays.check_integer(name, blocks, "uint8")
        unit = codec.unit_nbytes(tokens, head_dim, caches.dtype.itemsize)
        arrays.check_shape(name, blocks, *outer, unit)
    arrays.check_contiguous("caches", caches)
    arrays.check_contiguous("page_ids", page_ids)
    if 0 in tuple(blocks.shape):
        return
    arrays.check_contiguous(f"{name}[0]", blocks[0])
    part = (first_layer, layer_count, first_head, head_count)
    if device == arrays.CUDA:
        if codec is None or codec.number == 0:
            from kernels_numba.movers.block_kernels_cuda import launch_move_blocks

            launch_move_blocks(caches, page_ids, blocks, part, to_pages)
        else:
            from kernels_numba.movers.codec_kernels_cuda import launch_recode

            launch_recode(caches, page_ids, blocks, part, codec, to_pages)
        return
    view, ids, array = (arrays.as_numpy(a) for a in (caches, page_ids, blocks))
    check_ids("page_ids", ids, view.shape[2])
    arrays.check_writable(*(("caches", view) if to_pages else (name, array)))
    run = view.shape[4] * view.shape[5] * view.itemsize  # an axis of one head may have any stride
    strides = (view.strides[0], view.strides[1], view.strides[2], run, array.strides[0])
    nbytes = ids.size * layer_count * 2 * head_count * run
    if codec is None or codec.number == 0:
        kernels: tuple[Any, Any] = (move_block_runs_v1, move_block_runs_v2)
        arguments: tuple[Any, ...] = (
            arrays.address_of(view),
            arrays.address_of(array),
            ids,
            strides,
            part,
            to_pages,
        )
    else:
        from kernels_numba.movers.codec_kernels import KINDS, recode_v1, recode_v2

        kernels = (recode_v1, recode_v2)
        kind, page_size = KINDS[arrays.dtype_name(caches)], view.shape[4]
        shape = (kind, codec.number, page_size, head_dim, codec.groups(head_dim))
        arguments = (arrays.address_of(view), arrays.address_of(array), ids, strides, part, shape, to_pages)
    _run_by_size(nbytes, *kernels, arguments)


def _run_by_size(nbytes: int, serial: Any, parallel: Any, arguments: tuple[Any, ...]) -> None:
    """One of two forms of a kernel on `arguments`: see gather_blocks for which, and why."""
    if nbytes >= PARALLEL_BYTES and get_num_threads() > 1 and PARALLEL_CALL.acquire(blocking=False):
        try:
            parallel(*arguments)
        finally:
            PARALLEL_CALL.release()
    else:
        serial(*arguments, nbytes >= PARALLEL_BYTES)
