"""Paged attention for decode on the CPU against attention in float64, with everything unused poisoned."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_numba
from kernels_numba.attention.attention_decode import decode_v0, decode_v1, decode_v2
from kernels_numba.checks import NO_WINDOW, plain_views
from kernels_numba.errors import ArgumentError, RangeError
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


def ones_paged(lens: list[int], **shape) -> Paged:
    """Sequences of which one new token each is asked for."""
    return make_paged(context_lens=lens, query_lens=[1] * len(lens), **shape)


def arguments(paged: Paged, dtype: str = "float32") -> list[np.ndarray]:
    query = as_dtype(paged.query, dtype)
    return [query, paged.key_cache, paged.value_cache, paged.block_tables, paged.context_lens]


def decode(paged: Paged, dtype: str = "float32", window: int | None = None) -> np.ndarray:
    out = as_dtype(np.full(paged.query.shape, np.nan, np.float32), dtype)
    result = kernels_numba.paged_attention_decode(
        *arguments(paged, dtype), scale=paged.scale, out=out, window=window
    )
    assert result is out
    return as_float32(result)


def hide_what_lies_before(paged: Paged, window: int) -> None:
    """Poison the slots before each sequence's window, and the table entries of pages wholly before it."""
    page_size = paged.key_cache.shape[2]
    for b, length in enumerate(paged.context_lens):
        first = max(0, int(length) - window)
        for logical in range(first // page_size + 1 if first else 0):
            page = paged.block_tables[b, logical]
            for cache in (paged.key_cache, paged.value_cache):
                poison = 0x7FC0 if cache.dtype == np.uint16 else np.nan
                cache[page, :, : first - logical * page_size] = poison
        paged.block_tables[b, : first // page_size] = GARBAGE_PAGE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(2, 2, 32, 8), (9, 3, 64, 16), (8, 2, 128, 32), (5, 1, 256, 64), (4, 2, 40, 16), (7, 1, 8, 256)],
)
def test_decode_agrees_with_torch_for_every_group_width_and_page(
    dtype, heads, kv_heads, head_dim, page_size
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    paged = ones_paged([1, 16, 17, 40, 130], dtype=dtype, **shape)
    assert_close(decode(paged, dtype), paged, dtype)


@pytest.mark.parametrize("page_size", [1, 3, 13])
def test_a_page_need_not_hold_a_multiple_of_anything(page_size) -> None:
    paged = ones_paged([1, 12, 13, 14, 77], heads=6, kv_heads=1, page_size=page_size)
    assert_close(decode(paged), paged)
    hide_what_lies_before(paged, 20)
    assert_close(decode(paged, window=20), paged, window=20)


def test_a_long_context_is_split_into_pieces_and_merged_exactly() -> None:
    paged = ones_paged([3000, 257, 3], heads=6, kv_heads=2, head_dim=64)
    assert_close(decode(paged), paged)
    hide_what_lies_before(paged, 1501)
    assert_close(decode(paged, window=1501), paged, window=1501)


def test_sequences_may_share_the_pages_of_a_common_prefix() -> None:
    paged = ones_paged([70, 90, 64], shared_pages=4)
    assert (paged.block_tables[1, :4] == paged.block_tables[0, :4]).all()
    assert_close(decode(paged), paged)


def test_a_sequence_of_no_tokens_decodes_to_zeros() -> None:
    paged = ones_paged([5, 0, 9])
    assert_close(decode(paged), paged)
    assert_close(decode(paged, window=3), paged, window=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch_decodes_to_an_empty_array(dtype) -> None:
    paged = ones_paged([], dtype=dtype)
    assert decode(paged, dtype).shape == (0, 3, 32)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    paged = ones_paged([200, 33])
    paged.query *= 300
    assert_close(decode(paged), paged)


@pytest.mark.parametrize("tokens", [40, 700])
@pytest.mark.parametrize(("number", "slots"), [(np.nan, 1), (np.inf, 1), (-np.inf, None), (-3e38, None)])
def test_a_score_that_is_not_a_number_reaches_the_heads_that_see_it_and_no_other(
    tokens, number, slots
) -> None:
    """700 tokens are merged from pieces, of which all but one are in order."""
    paged = ones_paged([tokens, 20], heads=4, kv_heads=2)
    paged.query[0] = 16  # so -3e38 overflows, and no sum is of infinities of both signs
    want = expected(paged)
    for t in range(tokens)[:slots]:
        paged.key_cache[paged.block_tables[0, t // 16], 1, t % 16] = number
    found = decode(paged)
    assert np.isnan(found[0, 2:]).all()
    for b, heads in ((0, slice(0, 2)), (1, slice(None))):
        np.testing.assert_allclose(
            found[b, heads], want[b, heads], rtol=0, atol=tolerance("float32", 700) * 16
        )


@pytest.mark.parametrize("window", [1, 2, 16, 17, 33, 1000])
def test_a_window_reads_neither_older_slots_nor_the_table_entries_of_older_pages(window) -> None:
    paged = ones_paged([1, 16, 17, 40, 130], heads=9, kv_heads=3)
    hide_what_lies_before(paged, window)
    assert_close(decode(paged, window=window), paged, window=window)


def test_a_page_in_the_window_is_still_refused_when_it_is_not_there() -> None:
    paged = ones_paged([40])
    paged.block_tables[0, :2] = GARBAGE_PAGE
    assert_close(decode(paged, window=8), paged, window=8)
    with pytest.raises(RangeError, match=r"block_tables\[0, 1\]"):
        decode(paged, window=9)
    with pytest.raises(RangeError, match="window=0"):
        decode(paged, window=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_kind_of_cpu_array_gives_its_own_kind_back(dtype) -> None:
    paged = ones_paged([20], dtype=dtype)
    tables, lens = torch.from_numpy(paged.block_tables), torch.from_numpy(paged.context_lens)
    bits = [a.view(np.uint16) for a in arguments(paged, dtype)[:3]]
    tensors = [torch.from_numpy(a).view(getattr(torch, dtype)) for a in bits]
    names = [a.view({"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]) for a in bits]
    of_torch = kernels_numba.paged_attention_decode(*tensors, tables, lens, scale=paged.scale)
    of_names = kernels_numba.paged_attention_decode(
        *names, paged.block_tables, paged.context_lens, scale=paged.scale
    )
    assert of_torch.dtype is tensors[0].dtype
    assert of_names.dtype == names[0].dtype
    np.testing.assert_array_equal(of_torch.float().numpy(), of_names.astype(np.float32))
    assert_close(of_torch.float().numpy(), paged, dtype)


def test_arrays_that_are_not_plain_take_the_slow_look_and_give_the_same() -> None:
    paged = ones_paged([20, 7])
    query, *rest = arguments(paged)
    leaf = torch.from_numpy(query).requires_grad_()
    assert plain_views(query, *rest, query) is not None
    assert plain_views(leaf, *rest, query) is None
    out = kernels_numba.paged_attention_decode(leaf, *rest, scale=paged.scale, out=np.empty_like(query))
    assert_close(out, paged)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.float64])
def test_numbers_of_the_wrong_kind_never_pass_the_quick_look(dtype) -> None:
    paged = ones_paged([20])
    query, keys, values, *rest = arguments(paged)
    wrong = [np.zeros(a.shape, dtype) for a in (query, keys, values)]
    with pytest.raises(ArgumentError, match=r"query\.dtype"):
        kernels_numba.paged_attention_decode(*wrong, *rest, scale=1.0)


@pytest.mark.parametrize("window", [NO_WINDOW, 7])
def test_the_earlier_rungs_and_the_oracle_agree_with_torch(window) -> None:
    paged = ones_paged([37, 0, 5], heads=4, kv_heads=2)
    if window != NO_WINDOW:
        hide_what_lies_before(paged, window)
    for rung in (decode_v1, decode_v2):
        out = np.full_like(paged.query, np.nan)
        rung(*arguments(paged), out, paged.scale, window)
        assert_close(out, paged, window=window)
    assert_close(decode_v0(*arguments(paged), paged.scale, window), paged, window=window)


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[Paged, str, int | None]:
    """Any batch: lengths, heads, pages, dtype; a shared prefix or a window."""
    dtype = draw(st.sampled_from(DTYPES))
    lens = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    kv_heads, page_size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([8, 16, 64]))
    window = draw(st.none() | st.integers(1, 320))
    paged = ones_paged(
        lens,
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64, 72])),
        page_size=page_size,
        shared_pages=draw(st.integers(0, min(lens) // page_size)) if window is None else 0,
        dtype=dtype,
        seed=draw(st.integers(0, 1000)),
    )
    return paged, dtype, window


@settings(max_examples=examples(60))
@given(ragged_batches())
def test_any_ragged_batch_decodes_as_torch_does(batch) -> None:
    paged, dtype, window = batch
    if window is not None:
        hide_what_lies_before(paged, window)
    assert_close(decode(paged, dtype, window), paged, dtype, window)
