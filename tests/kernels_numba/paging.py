"""Paged KV for tests: sequences cut into pages at random places, everything unused poisoned; and the oracle.

The oracle is torch's scaled_dot_product_attention in float64 on the same sequences, contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

GARBAGE_PAGE = 2**31 - 1
"""Stands in table entries past a sequence's end: reading through it would end the process."""


@dataclass(kw_only=True)
class Paged:
    """Sequences in pages.

    query         (sum(new), heads, head_dim) float32, already rounded to what `dtype` can hold
    keys, values  per sequence (tokens, kv_heads, head_dim), rounded as well
    key_cache, value_cache, block_tables, context_lens, query_lens   as the kernels take them, NaN elsewhere
    """

    query: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    key_cache: np.ndarray
    value_cache: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_lens: np.ndarray

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that `dtype` holds exactly."""
    return as_float32(as_dtype(array, dtype))


def as_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 as the kernels take it: itself, float16, or the uint16 bits of bfloat16."""
    if dtype == "bfloat16":
        return torch.from_numpy(array).bfloat16().view(torch.uint16).numpy()
    return array.astype(dtype, copy=False)


def as_float32(array: np.ndarray) -> np.ndarray:
    """The reverse of as_dtype."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.copy()).view(torch.bfloat16).float().numpy()
    return array.astype(np.float32, copy=False)


def make_paged(
    *,
    context_lens: list[int],
    query_lens: list[int],
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 32,
    page_size: int = 16,
    shared_pages: int = 0,
    dtype: str = "float32",
    seed: int = 0,
) -> Paged:
    """Random sequences; the first `shared_pages` pages of all of them are the same physical pages."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rounded(random.standard_normal(shape, dtype=np.float32), dtype)

    keys = [normal(n, kv_heads, head_dim) for n in context_lens]
    values = [normal(n, kv_heads, head_dim) for n in context_lens]
    needed = [-(-n // page_size) for n in context_lens]
    pages = sum(needed) + 3  # three are never used
    order = iter(random.permutation(pages))
    tables = np.full((len(context_lens), max(needed, default=0) + 2), GARBAGE_PAGE, np.int32)
    caches = np.full((2, pages, kv_heads, page_size, head_dim), np.nan, np.float32)
    for b, count in enumerate(needed):
        for i in range(count):
            tables[b, i] = tables[0, i] if b and i < shared_pages else next(order)
            span = slice(i * page_size, min((i + 1) * page_size, context_lens[b]))
            if b and i < shared_pages:
                keys[b][span], values[b][span] = keys[0][span], values[0][span]
            for cache, rows in zip(caches, (keys[b], values[b])):
                cache[tables[b, i], :, : span.stop - span.start] = rows[span].transpose(1, 0, 2)
    return Paged(
        query=normal(sum(query_lens), heads, head_dim),
        keys=keys,
        values=values,
        key_cache=as_dtype(caches[0], dtype),
        value_cache=as_dtype(caches[1], dtype),
        block_tables=tables,
        context_lens=np.array(context_lens, np.int32),
        query_lens=np.array(query_lens, np.int32),
    )


def expected(paged: Paged, window: int | None = None) -> np.ndarray:
    """Causal attention of each sequence's new tokens over at most `window` tokens, by torch in float64."""
    results, row = [np.zeros((0, *paged.query.shape[1:]))], 0
    for b, (new, tokens) in enumerate(zip(paged.query_lens, paged.context_lens)):
        if tokens:
            mask = torch.ones(new, tokens, dtype=torch.bool).tril(int(tokens - new))
            if window is not None:
                mask = mask.triu(int(tokens - new) - window + 1)
            q, k, v = (
                torch.from_numpy(a).double().transpose(0, 1)[None]
                for a in (paged.query[row : row + new], paged.keys[b], paged.values[b])
            )
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=paged.scale, enable_gqa=True
            )
            results.append(out[0].transpose(0, 1).numpy())
        else:
            results.append(np.zeros((new, *paged.query.shape[1:])))
        row += new
    return np.concatenate(results)


def tolerance(dtype: str, tokens: int) -> float:
    """Largest absolute error to expect of outputs that are means of values around 1 (rarely above 5).

    float32: rounding of `tokens` additions, of the dot products and of exp2 (2e-7), times a value's size.
    bfloat16 and float16: sums are float32 as well; what counts is that the output is rounded to 8 or 11 bits,
    half a unit of 2**-8 or 2**-11 for numbers below 2; for larger ones see `assert_near`.
    """
    return {"bfloat16": 2**-7, "float16": 2**-10}.get(dtype, 3e-6 * max(1.0, tokens / 512))


def assert_near(result: np.ndarray, wanted: np.ndarray, dtype: str, tokens: int) -> None:
    """Outputs of attention against the oracle's: within `tolerance`; above 2, within their own rounding, half
    a unit of their last bit, where that is more."""
    half_unit = {"bfloat16": 2**-8, "float16": 2**-11}.get(dtype, 0.0)
    allowed = np.maximum(tolerance(dtype, tokens), half_unit * np.abs(wanted) + tolerance("float32", tokens))
    np.testing.assert_allclose(result / allowed, wanted / allowed, rtol=0, atol=1)


def assert_close(result: np.ndarray, paged: Paged, dtype: str = "float32", window: int | None = None) -> None:
    """Outputs for all of `paged` against the oracle's."""
    longest = int(paged.context_lens.max(initial=1))
    assert_near(result, expected(paged, window), dtype, longest)
