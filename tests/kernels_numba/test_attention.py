"""Paged attention for prefill on the CPU against torch's attention in float64, with the unused poisoned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_numba
from kernels_numba.attention_prefill import prefill_v0, prefill_v1
from tests.kernels_numba.paging import Paged, as_dtype, as_float32, expected, make_paged, tolerance

LENGTHS = [1, 16, 17, 40, 130]


def arguments(paged: Paged, dtype: str = "float32") -> list[np.ndarray]:
    """Query, caches and tables as both functions take them first."""
    return [as_dtype(paged.query, dtype), paged.key_cache, paged.value_cache, paged.block_tables]


def prefill(paged: Paged, dtype: str = "float32") -> np.ndarray:
    out = np.full(paged.query.shape, np.nan, np.float32)
    result = kernels_numba.paged_attention_prefill(
        *arguments(paged, dtype),
        paged.query_lens,
        paged.context_lens,
        scale=paged.scale,
        out=as_dtype(out, dtype),
    )
    return as_float32(result)


def assert_close(result: np.ndarray, paged: Paged, dtype: str = "float32") -> None:
    longest = int(paged.context_lens.max(initial=1))
    np.testing.assert_allclose(result, expected(paged), rtol=0, atol=tolerance(dtype, longest))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(2, 2, 32, 8), (9, 3, 64, 16), (8, 2, 128, 32), (5, 1, 256, 64), (4, 2, 40, 16)],
)
def test_prefill_agrees_with_torch_for_every_group_width_and_page(
    dtype, heads, kv_heads, head_dim, page_size
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    paged = make_paged(context_lens=LENGTHS, query_lens=[1, 16, 3, 40, 60], dtype=dtype, **shape)
    assert_close(prefill(paged, dtype), paged, dtype)


def test_a_prompt_in_chunks_gives_what_it_gives_at_once() -> None:
    whole = make_paged(context_lens=[300], query_lens=[300], heads=9, kv_heads=3, head_dim=64)
    at_once, chunks = prefill(whole), []
    for first, last in ((0, 128), (128, 256), (256, 300)):
        chunk = kernels_numba.paged_attention_prefill(
            np.ascontiguousarray(whole.query[first:last]),
            *arguments(whole)[1:],
            np.array([last - first], np.int32),
            np.array([last], np.int32),
            scale=whole.scale,
        )
        chunks.append(chunk)
    np.testing.assert_allclose(np.concatenate(chunks), at_once, rtol=0, atol=tolerance("float32", 300))


def test_a_sequence_of_no_new_tokens_prefills_to_nothing() -> None:
    paged = make_paged(context_lens=[5, 0, 9], query_lens=[5, 0, 2])
    assert_close(prefill(paged), paged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_batch_gives_an_empty_array(dtype) -> None:
    paged = make_paged(context_lens=[], query_lens=[], dtype=dtype)
    assert prefill(paged, dtype).shape == (0, 3, 32)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    paged = make_paged(context_lens=[200, 33], query_lens=[1, 1])
    paged.query *= 300
    assert_close(prefill(paged), paged)


def test_the_newest_token_is_seen_and_the_next_one_is_not() -> None:
    paged = make_paged(context_lens=[40], query_lens=[40], heads=1)
    before = prefill(paged)
    page, row = paged.block_tables[0, 20 // 16], 20 % 16
    paged.value_cache[page, 0, row] += 100
    changed = np.abs(prefill(paged) - before).max(axis=(1, 2)) > 0
    assert changed.tolist() == [token >= 20 for token in range(40)]


def test_the_plain_rung_and_the_oracle_agree_with_torch() -> None:
    paged = make_paged(context_lens=[37, 5], query_lens=[9, 5], heads=4, kv_heads=2)
    lengths, out = (paged.query_lens, paged.context_lens), np.empty_like(paged.query)
    prefill_v1(*arguments(paged), *lengths, out, paged.scale)
    assert_close(out, paged)
    assert_close(prefill_v0(*arguments(paged), *lengths, paged.scale), paged)


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[Paged, str]:
    """Any batch: lengths, heads, pages, shared prefix, dtype."""
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    lens = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    new = [draw(st.integers(0, n)) for n in lens]
    kv_heads, page_size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([8, 16, 64]))
    paged = make_paged(
        context_lens=lens,
        query_lens=new,
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64])),
        page_size=page_size,
        shared_pages=draw(st.integers(0, min(lens) // page_size)),
        dtype=dtype,
        seed=draw(st.integers(0, 1000)),
    )
    return paged, dtype


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(ragged_batches())
def test_any_ragged_batch_prefills_as_torch_does(batch) -> None:
    paged, dtype = batch
    assert_close(prefill(paged, dtype), paged, dtype)
