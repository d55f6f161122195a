"""Paged attention on the CPU against torch's attention in float64, with everything unused poisoned."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_numba
from kernels_numba.attention_decode import decode_v0, decode_v1
from tests.kernels_numba.paging import Paged, as_dtype, as_float32, expected, make_paged, rounded, tolerance

LENGTHS = [1, 16, 17, 40, 130]


def arguments(paged: Paged, dtype: str = "float32") -> list[np.ndarray]:
    """Query, caches and tables as both functions take them first."""
    return [as_dtype(paged.query, dtype), paged.key_cache, paged.value_cache, paged.block_tables]


def decode(paged: Paged, dtype: str = "float32") -> np.ndarray:
    out = np.full(paged.query.shape, np.nan, np.float32)
    result = kernels_numba.paged_attention_decode(
        *arguments(paged, dtype), paged.context_lens, scale=paged.scale, out=as_dtype(out, dtype)
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
def test_decode_agrees_with_torch_for_every_group_width_and_page(
    dtype, heads, kv_heads, head_dim, page_size
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    paged = make_paged(context_lens=LENGTHS, query_lens=[1] * 5, dtype=dtype, **shape)
    assert_close(decode(paged, dtype), paged, dtype)


def test_a_long_context_is_split_into_pieces_and_merged_exactly() -> None:
    paged = make_paged(context_lens=[1500, 257, 3], query_lens=[1, 1, 1], heads=6, kv_heads=2)
    assert_close(decode(paged), paged)


def test_sequences_may_share_the_pages_of_a_common_prefix() -> None:
    paged = make_paged(context_lens=[70, 90, 64], query_lens=[1, 1, 1], shared_pages=4)
    assert (paged.block_tables[1, :4] == paged.block_tables[0, :4]).all()
    assert_close(decode(paged), paged)


def test_a_sequence_of_no_tokens_decodes_to_zeros() -> None:
    paged = make_paged(context_lens=[5, 0, 9], query_lens=[1, 1, 1])
    assert_close(decode(paged), paged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_batch_gives_an_empty_array(dtype) -> None:
    paged = make_paged(context_lens=[], query_lens=[], dtype=dtype)
    assert decode(paged, dtype).shape == (0, 3, 32)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    paged = make_paged(context_lens=[200, 33], query_lens=[1, 1])
    paged.query *= 300
    assert_close(decode(paged), paged)


def test_every_kind_of_cpu_array_gives_its_own_kind_back() -> None:
    paged = make_paged(context_lens=[20], query_lens=[1], dtype="bfloat16")
    tables, lens = torch.from_numpy(paged.block_tables), torch.from_numpy(paged.context_lens)
    bits = [as_dtype(paged.query, "bfloat16"), paged.key_cache, paged.value_cache]
    tensors = [torch.from_numpy(a).view(torch.bfloat16) for a in bits]
    names = [a.view(ml_dtypes.bfloat16) for a in bits]
    of_torch = kernels_numba.paged_attention_decode(*tensors, tables, lens, scale=paged.scale)
    of_names = kernels_numba.paged_attention_decode(
        *names, paged.block_tables, paged.context_lens, scale=paged.scale
    )
    assert of_torch.dtype is torch.bfloat16
    assert of_names.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(of_torch.float().numpy(), of_names.astype(np.float32))
    assert_close(of_torch.float().numpy(), paged, "bfloat16")


def test_the_plain_rungs_and_the_oracles_agree_with_torch() -> None:
    paged = make_paged(context_lens=[37, 5], query_lens=[1, 1], heads=4, kv_heads=2)
    out = np.empty_like(paged.query)
    decode_v1(*arguments(paged), paged.context_lens, out, paged.scale)
    assert_close(out, paged)
    assert_close(decode_v0(*arguments(paged), paged.context_lens, paged.scale), paged)


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


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(ragged_batches())
def test_any_ragged_batch_decodes_as_torch_does(batch) -> None:
    paged, dtype = batch
    paged.query_lens = np.ones_like(paged.query_lens)
    shape = (len(paged.query_lens), *paged.query.shape[1:])
    paged.query = rounded(np.random.default_rng(0).standard_normal(shape, dtype=np.float32), dtype)
    assert_close(decode(paged, dtype), paged, dtype)
