"""One forward pass over paged KV: what its layers share is checked once, then each layer writes and attends.

Called by the model's forward pass. scatter_kv and the paged attentions check all arrays at every call. A
model of 30 layers would check the same tables 30 times per token, which on a CPU takes longer than a short
attention. On a GPU this calls those functions. Knows arrays, not models.

    rows of query   0 .. singles - 1   sequences of one new token: decode attention
                    singles .. n - 1   the others: prefill attention, which makes tiles of many rows that
                                       share the keys they read, which one row alone would waste
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.attention.attention_dealt import DealtContexts
from kernels_numba.attention.attention_decode import paged_attention_decode
from kernels_numba.attention.attention_decode_tiles import decode_v3
from kernels_numba.attention.attention_prefill import check_lengths, check_pages, paged_attention_prefill
from kernels_numba.attention.attention_prefill_tiles import prefill_tiles
from kernels_numba.checks import check_window, wrong_size
from kernels_numba.errors import DtypeError, LayoutError, RangeError
from kernels_numba.movers.block_kernels import move_tokens
from kernels_numba.movers.blocks import check_ids, check_rotary, scatter_kv
from kernels_numba.movers.rotary import scatter_rotated
from kernels_numba.runtime import PARALLEL_CALL, get_num_threads


class PagedPass:
    """The sequences of one forward pass in their pages.

    caches         (layers, 2, pages, kv_heads, page_size, head_dim) float32, float16 or bfloat16, contiguous;
                   [:, 0] keys, [:, 1] values
    block_tables   (batch, max_pages) int32, as for paged_attention_prefill
    query_lens     (batch,) int32, new tokens; their rows come one sequence after the other
    context_lens   (batch,) int32, all tokens, the new ones included
    slot_mapping   (n,) int64, where each new token's KV goes: page * page_size + row
    positions      (n,) int64, rows of the rotary tables
    rotary         (cosine, sine), as for scatter_kv
    singles        the first so many sequences have one new token
    split          as for paged_attention_decode
    dealt          the contexts, where several members share each of them; then context_lens are those of this
                   member, may be 0, and every sequence has one new token. On the CPU, without windows

    Torch tensors on one device, or NumPy arrays. Raises ShapeError, DtypeError, LayoutError, KindError and,
    on the CPU, RangeError (errors.py). The arrays must not change while the pass is used.
    """

    def __init__(
        self,
        caches: Any,
        block_tables: Any,
        query_lens: Any,
        context_lens: Any,
        slot_mapping: Any,
        positions: Any,
        rotary: tuple[Any, Any],
        *,
        singles: int,
        split: int = 0,
        dealt: DealtContexts | None = None,
    ) -> None:
        self._dealt = dealt
        self._arrays = (caches, block_tables, query_lens, context_lens, slot_mapping, positions, rotary)
        self._singles, self._split = singles, split
        self._batch, self._rows = query_lens.shape[0], slot_mapping.shape[0]
        self._on_cpu = arrays.device_of("caches", caches) == arrays.CPU
        if self._on_cpu:
            self._take_views()

    def _take_views(self) -> None:
        """Check what all layers share; keep it as the kernels take it."""
        caches, tables, new, lens, slots, positions, (cosine, sine) = self._arrays
        named = {"caches": caches, "block_tables": tables, "query_lens": new, "context_lens": lens}
        named |= {"slot_mapping": slots, "positions": positions}
        self._element = caches.dtype
        arrays.check_once(_check_shared, named | {"cosine": cosine, "sine": sine})
        views = [arrays.as_numpy(array) for array in named.values()]
        self._caches, self._tables, self._new, self._lens, self._slots, self._positions = views
        self._rotary = (arrays.as_numpy(cosine), arrays.as_numpy(sine))
        pages, page_size = self._caches.shape[2], self._caches.shape[4]
        check_ids("slot_mapping", self._slots, pages * page_size)
        check_ids("positions", self._positions, cosine.shape[0], lowest=0)
        if self._dealt is None:
            check_lengths(self._new, self._lens, self._rows)
        if not (self._new[: self._singles] == 1).all():
            raise RangeError("singles", self._singles, "leading sequences that have one new token each")
        self._checked: set[tuple[int, int]] = set()
        self._threads = get_num_threads()

    # ------------------------------------------------------------------------------ what a layer does

    def write(self, layer: int, key: Any, value: Any, query: Any) -> None:
        """Turn keys and queries by their positions, the query in place, and write keys and values.

        key, value   (n, kv_heads, head_dim), query (n, heads, head_dim), contiguous, the caches' dtype
        """
        if not self._on_cpu:
            caches, _, _, _, slots, positions, rotary = self._arrays
            keys, values = caches[layer]
            scatter_kv(key, value, keys, values, slots, rotary=rotary, positions=positions, query=query)
            return
        kv_heads, head_dim = self._caches.shape[3], self._caches.shape[5]
        for name, array, heads in (
            ("key", key, kv_heads),
            ("value", value, kv_heads),
            ("query", query, None),
        ):
            self._check_new(name, array, heads)
        keys, values = self._caches[layer]
        row_bytes = head_dim * keys.itemsize
        step, query_step = kv_heads * row_bytes, query.shape[1] * row_bytes
        turned = (arrays.address_of(query), query_step, query.shape[1])
        scatter_rotated(
            arrays.address_of(key), step, keys, self._slots, *self._rotary, self._positions, *turned
        )
        places = (arrays.address_of(values), arrays.address_of(value), step)
        move_tokens(*places, self._slots, kv_heads, keys.shape[2], row_bytes)

    def attend(self, layer: int, query: Any, *, scale: float, window: int | None = None) -> Any:
        """Causal attention of the new tokens over their sequences, as paged_attention_prefill."""
        out, d = arrays.empty_like(query), self._singles
        if not self._on_cpu:
            self._attend_on_gpu(layer, query, out, scale, window)
            return out
        self._check_new("query", query, None)
        limit = check_window(window)
        if (limit, query.shape[1]) not in self._checked:
            self._check_attention(limit, query.shape[1])
        q, result = arrays.as_numpy(query), arrays.as_numpy(out)
        (keys, values), tables, lens = self._caches[layer], self._tables, self._lens
        rest, threads = (float(scale), limit), self._threads
        if self._dealt is not None:
            self._dealt.attend(q, keys, values, tables, result, float(scale), threads)
            return out
        with PARALLEL_CALL:
            if d:
                alone = (q[:d], keys, values, tables[:d], lens[:d], result[:d])
                decode_v3(*alone, *rest, self._split, threads)
            if d < self._batch:
                others = (q[d:], keys, values, tables[d:], self._new[d:], lens[d:], result[d:])
                prefill_tiles(*others, *rest, threads, True)
        return out

    def for_decode(
        self, rows: int, layers: int, heads: int, kv_heads: int, head_dim: int, windows: Iterable[int]
    ) -> tuple[Any, ...]:
        """Check what decode_layers takes of a pass over `rows` sequences of one new token; return it.

            heads      of queries
            windows    of the layers, as check_window returns them

        On the CPU, in float32. Returns (caches, (slot_mapping, positions, cosine, sine), (block_tables,
        context_lens), split).
        """
        if not self._on_cpu or self._caches.dtype != np.float32:
            raise DtypeError("caches", self._arrays[0].dtype, "float32, on the CPU")
        if not rows == self._rows == self._batch == self._singles:
            raise RangeError("x.shape[0]", rows, f"{self._rows} rows, each a sequence of one new token")
        arrays.check_shape("caches", self._caches, layers, 2, "pages", kv_heads, "page_size", head_dim)
        for window in windows:
            if (window, heads) not in self._checked:
                self._check_attention(window, heads)
        new = (self._slots, self._positions, *self._rotary)
        return self._caches, new, (self._tables, self._lens), self._split

    def _attend_on_gpu(self, layer: int, query: Any, out: Any, scale: float, window: int | None) -> None:
        caches, tables, new, lens = self._arrays[:4]
        (keys, values), d = caches[layer], self._singles
        options: dict[str, Any] = {"scale": scale, "window": window}
        if d:
            decoded = (query[:d], keys, values, tables[:d], lens[:d])
            paged_attention_decode(*decoded, out=out[:d], split=self._split, **options)
        if d < self._batch:
            others = (query[d:], keys, values, tables[d:], new[d:], lens[d:])
            paged_attention_prefill(*others, out=out[d:], **options)

    def _check_attention(self, window: int, heads: int) -> None:
        """What an attention of these sizes asks of the pages, once for all layers that are alike."""
        cache = self._caches.shape[2:]
        if wrong := wrong_size(heads, cache[3], cache[1], cache[2]):
            raise wrong
        check_pages(self._tables, self._new, self._lens, cache, window)
        self._checked.add((window, heads))

    def _check_new(self, name: str, array: Any, heads: int | None) -> None:
        """One of a layer's arrays of new tokens."""
        shape = array.shape
        if (
            len(shape) != 3
            or shape[::2] != (self._rows, self._caches.shape[5])
            or shape[1] != (heads or shape[1])
        ):
            arrays.check_shape(name, array, self._rows, heads or "heads", self._caches.shape[5])
        if array.dtype != self._element:
            raise DtypeError(f"{name}.dtype", arrays.dtype_name(array), f"{self._element}, as caches has")
        if not (array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()):
            raise LayoutError(name, f"array of strides {arrays.strides_of(array)}", "a C-contiguous array")


def _check_shared(named: dict[str, Any]) -> None:
    """All but the values of what the layers of a pass share."""
    arrays.common_device(named)
    arrays.check_float("caches", named["caches"])
    arrays.check_shape("caches", named["caches"], "layers", 2, "pages", "kv_heads", "page_size", "head_dim")
    batch = named["query_lens"].shape[0]
    tables = (batch, "max_pages")
    for name, shape in (("block_tables", tables), ("query_lens", (batch,)), ("context_lens", (batch,))):
        arrays.check_integer(name, named[name], "int32")
        arrays.check_shape(name, named[name], *shape)
    arrays.check_integer("slot_mapping", named["slot_mapping"], "int64")
    arrays.check_shape("slot_mapping", named["slot_mapping"], "tokens")
    for name, array in named.items():
        arrays.check_contiguous(name, array)
    tokens, head_dim = named["slot_mapping"].shape[0], named["caches"].shape[5]
    check_rotary(named, tokens, head_dim)
    arrays.check_writable("caches", named["caches"])
