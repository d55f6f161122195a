"""Paged prefill on the CPU against torch's attention in float64, with everything unused poisoned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_numba
from kernels_numba import arrays
from kernels_numba.attention import attention_prefill_tiles
from kernels_numba.attention.attention_prefill import prefill_v0, prefill_v1
from kernels_numba.attention.attention_prefill_tiles import prefill_tiles
from kernels_numba.checks import check_window
from kernels_numba.errors import RangeError
from tests.conftest import examples
from tests.kernels_numba.paging import (
    GARBAGE_PAGE,
    Paged,
    as_dtype,
    as_float32,
    assert_close,
    expected,
    make_paged,
    tolerance,
)

DTYPES = ["float32", "float16", "bfloat16"]


def arguments(paged: Paged, dtype: str = "float32") -> list[np.ndarray]:
    """What all rungs take first."""
    caches = (paged.key_cache, paged.value_cache)
    lengths = (paged.query_lens, paged.context_lens)
    return [as_dtype(paged.query, dtype), *caches, paged.block_tables, *lengths]


def prefill(paged: Paged, dtype: str = "float32", window: int | None = None) -> np.ndarray:
    out = as_dtype(np.full(paged.query.shape, np.nan, np.float32), dtype)
    result = kernels_numba.paged_attention_prefill(
        *arguments(paged, dtype), scale=paged.scale, out=out, window=window
    )
    return as_float32(result)


def rung_of_tiles(paged: Paged, dtype: str, window: int | None, in_registers: bool) -> np.ndarray:
    """v2 or v3, called directly, on three threads, so that there are more than one on any machine."""
    out = as_dtype(np.full(paged.query.shape, np.nan, np.float32), dtype)
    views = [arrays.as_numpy(a) for a in (*arguments(paged, dtype), out)]
    prefill_tiles(*views, paged.scale, check_window(window), 3, in_registers)
    return as_float32(out)


def forget_before(paged: Paged, window: int) -> None:
    """Poison what no new token sees: entries of pages, and slots unless another sequence has them too."""
    page_size = paged.key_cache.shape[2]
    for b, (new, tokens) in enumerate(zip(paged.query_lens, paged.context_lens)):
        first = max(0, tokens - new - window + 1) if new else tokens
        for t in range(first):
            page = paged.block_tables[b, t // page_size]
            if page != GARBAGE_PAGE and (paged.block_tables == page).sum() == 1:
                for cache in (paged.key_cache, paged.value_cache):
                    nan = np.array([np.nan], np.float32)
                    cache[page, :, t % page_size] = as_dtype(nan, arrays.dtype_name(cache))[0]
        whole = first // page_size if new else paged.block_tables.shape[1]
        paged.block_tables[b, :whole] = GARBAGE_PAGE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(2, 2, 32, 8), (9, 3, 64, 16), (8, 2, 128, 32), (5, 1, 256, 256), (4, 2, 40, 16), (128, 1, 8, 5)],
)
def test_prefill_agrees_with_torch_for_every_group_width_and_page(
    dtype, heads, kv_heads, head_dim, page_size
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    paged = make_paged(context_lens=[1, 16, 17, 40, 300], query_lens=[1, 16, 3, 40, 60], dtype=dtype, **shape)
    assert_close(prefill(paged, dtype), paged, dtype)


def test_a_prompt_in_chunks_gives_what_it_gives_at_once() -> None:
    whole = make_paged(context_lens=[300], query_lens=[300], heads=9, kv_heads=3, head_dim=64)
    at_once, chunks = prefill(whole), []
    for first, last in ((0, 128), (128, 256), (256, 300)):
        chunk = kernels_numba.paged_attention_prefill(
            np.ascontiguousarray(whole.query[first:last]),
            *arguments(whole)[1:4],
            np.array([last - first], np.int32),
            np.array([last], np.int32),
            scale=whole.scale,
        )
        chunks.append(chunk)
    np.testing.assert_allclose(np.concatenate(chunks), at_once, rtol=0, atol=tolerance("float32", 300))


def test_sequences_of_no_tokens_or_no_new_ones_give_no_rows() -> None:
    paged = make_paged(context_lens=[5, 0, 9, 30], query_lens=[5, 0, 2, 0])
    paged.block_tables[3] = GARBAGE_PAGE  # nobody asks for it
    assert_close(prefill(paged), paged)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch_gives_an_empty_array(dtype) -> None:
    paged = make_paged(context_lens=[], query_lens=[], dtype=dtype)
    assert prefill(paged, dtype).shape == (0, 3, 32)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    paged = make_paged(context_lens=[200, 33], query_lens=[1, 20])
    paged.query *= 300  # and so are the rounding errors of the scores, a few 2**-24 of a product around 1
    np.testing.assert_allclose(prefill(paged), expected(paged), rtol=0, atol=300 * 2**-22)


def test_a_token_is_seen_by_itself_and_later_ones_until_the_window_has_passed() -> None:
    paged = make_paged(context_lens=[140], query_lens=[140], heads=1)
    page, row = paged.block_tables[0, 20 // 16], 20 % 16
    for window, last in ((None, 139), (1, 20), (2, 21), (70, 89)):
        before = prefill(paged, window=window)
        paged.value_cache[page, 0, row] += 100
        changed = np.abs(prefill(paged, window=window) - before).max(axis=(1, 2)) > 0
        paged.value_cache[page, 0, row] -= 100
        assert np.flatnonzero(changed).tolist() == list(range(20, last + 1))


def test_a_score_that_is_not_a_number_reaches_the_tokens_that_see_it_and_no_other() -> None:
    paged = make_paged(context_lens=[40], query_lens=[40], heads=1)
    page, row = paged.block_tables[0, 20 // 16], 20 % 16
    paged.key_cache[page, 0, row] = np.nan
    assert np.isnan(prefill(paged)).any(axis=(1, 2)).tolist() == [token >= 20 for token in range(40)]


@pytest.mark.parametrize("window", [None, 7])
def test_scores_of_minus_infinity_alone_give_no_number_and_show_nobody_what_comes_later(window) -> None:
    paged = make_paged(context_lens=[40, 9], query_lens=[40, 9], heads=2, kv_heads=2)
    want = expected(paged, window)
    paged.query[:40, 1] = 1
    for page in paged.block_tables[0, :3]:
        rows = paged.key_cache[page, 1]
        rows[~np.isnan(rows)] = -np.inf
    found = prefill(paged, window=window)
    assert np.isnan(found[:40, 1]).all()
    for tokens, heads in ((slice(0, 40), 0), (slice(40, None), slice(None))):
        np.testing.assert_allclose(found[tokens, heads], want[tokens, heads], rtol=0, atol=3e-6)


def test_a_page_inside_a_window_is_checked_and_one_before_all_windows_is_not() -> None:
    paged = make_paged(context_lens=[100], query_lens=[10], page_size=16)
    paged.block_tables[0, :3] = -7
    assert_close(prefill(paged, window=40), paged, window=40)  # 90 - 39 = 51, the fourth page
    with pytest.raises(RangeError, match=r"block_tables\[0, 2\]"):
        prefill(paged, window=45)
    with pytest.raises(RangeError, match="window"):
        prefill(paged, window=0)


@pytest.mark.parametrize("window", [None, 7])
def test_every_rung_agrees_with_torch(window) -> None:
    paged = make_paged(context_lens=[137, 5], query_lens=[90, 5], heads=6, kv_heads=2)
    out = np.empty_like(paged.query)
    prefill_v1(*arguments(paged), out, paged.scale, check_window(window))
    assert_close(out, paged, window=window)
    assert_close(prefill_v0(*arguments(paged), paged.scale, check_window(window)), paged, window=window)
    for in_registers in (False, True):
        assert_close(rung_of_tiles(paged, "float32", window, in_registers), paged, window=window)


def test_items_of_work_cover_every_column_once_longest_contexts_first() -> None:
    lens = np.array([0, 1, 700, 33], np.int32)
    for workers in (1, 2, 16):
        items = attention_prefill_tiles._plan.py_func(lens, 3, 1, workers)
        for b, columns in enumerate(3 * lens):
            spans = items[items[:, 0] == b]
            ends = spans[:, 1] + spans[:, 2]
            assert ends.tolist() == [columns, *spans[:-1, 1]][: len(spans)]
            assert spans[-1:, 1].tolist() == [0] * bool(columns)


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[Paged, str, int | None]:
    """Any batch: lengths, heads, pages, shared prefix, dtype; and a window."""
    dtype = draw(st.sampled_from(DTYPES))
    lens = draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    new = [draw(st.integers(0, n)) for n in lens]
    kv_heads, page_size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([8, 16, 64]))
    paged = make_paged(
        context_lens=lens,
        query_lens=new,
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64, 72])),
        page_size=page_size,
        shared_pages=draw(st.integers(0, min(lens) // page_size)),
        dtype=dtype,
        seed=draw(st.integers(0, 1000)),
    )
    window = draw(st.one_of(st.none(), st.integers(1, 220)))
    if window is not None:
        forget_before(paged, window)
    return paged, dtype, window


@settings(max_examples=examples(60))
@given(ragged_batches(), st.booleans())
def test_any_ragged_batch_prefills_as_torch_does(batch, in_registers) -> None:
    paged, dtype, window = batch
    if in_registers:
        assert_close(prefill(paged, dtype, window), paged, dtype, window)
    assert_close(rung_of_tiles(paged, dtype, window, in_registers), paged, dtype, window)
