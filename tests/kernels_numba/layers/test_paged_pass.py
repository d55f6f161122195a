"""A pass over pages gives what the functions that check every call give, and refuses the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels_numba import PagedPass, paged_attention_decode, scatter_kv
from kernels_numba.checks import NO_WINDOW
from kernels_numba.errors import ArgumentError, RangeError
from tests.kernels_numba.paging import as_dtype, assert_near, expected, make_paged

ROTARY = (np.ones((64, 1, 32), np.float32), np.zeros((64, 1, 32), np.float32))


def pass_over(paged: Any, singles: int, **changes: Any) -> PagedPass:
    rows = len(paged.query)
    given = {
        "caches": np.stack([paged.key_cache, paged.value_cache])[None],
        "block_tables": paged.block_tables,
        "query_lens": paged.query_lens,
        "context_lens": paged.context_lens,
        "slot_mapping": np.full(rows, -1, np.int64),
        "positions": np.zeros(rows, np.int64),
        "rotary": ROTARY,
    }
    return PagedPass(*(given | changes).values(), singles=singles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("singles", [0, 2, 3])
def test_sequences_of_one_new_token_and_others_attend_in_one_pass(
    dtype: str, window: int | None, singles: int
) -> None:
    new = [1] * singles + [40, 7] * (singles < 3)
    paged = make_paged(context_lens=[50, 300, 59, 70, 7][: len(new)], query_lens=new, dtype=dtype)
    query = as_dtype(paged.query, dtype)
    result = pass_over(paged, singles).attend(0, query, scale=paged.scale, window=window)
    found = torch.from_numpy(result).view(torch.bfloat16).float() if dtype == "bfloat16" else result
    assert_near(np.asarray(found), expected(paged, window), dtype, 300)


def test_new_tokens_are_written_as_scatter_kv_writes_them() -> None:
    paged = make_paged(context_lens=[30, 20], query_lens=[3, 2])
    random = np.random.default_rng(0)
    key, value = (random.standard_normal((5, 1, 32), dtype=np.float32) for _ in range(2))
    slots, positions = np.array([5, 40, 17, -1, 2]), np.array([9, 1, 2, 3, 50])
    rotary = tuple(random.standard_normal((64, 1, 32), dtype=np.float32) for _ in range(2))
    caches, query = np.zeros((1, 2, *paged.key_cache.shape), np.float32), paged.query.copy()
    given = {"caches": caches, "slot_mapping": slots, "positions": positions, "rotary": rotary}
    pass_over(paged, 0, **given).write(0, key, value, query)

    wanted, turned = np.zeros_like(caches), paged.query.copy()
    scatter_kv(
        key, value, wanted[0, 0], wanted[0, 1], slots, rotary=rotary, positions=positions, query=turned
    )
    np.testing.assert_array_equal(caches, wanted)
    np.testing.assert_array_equal(query, turned)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slot_mapping": np.array([1 << 40])}, "slot_mapping"),
        ({"positions": np.array([64])}, "positions"),
        ({"context_lens": np.array([1 << 20], np.int32)}, "context_lens"),
        ({"query_lens": np.array([2], np.int32)}, "query_lens"),
        ({"block_tables": np.array([[99]], np.int32)}, "block_tables"),
        ({"positions": np.array([0], np.int32)}, "positions"),
        ({"slot_mapping": np.zeros((1, 1), np.int64)}, "slot_mapping"),
    ],
)
def test_what_would_read_or_write_elsewhere_is_refused(changes: dict[str, Any], named: str) -> None:
    paged = make_paged(context_lens=[9], query_lens=[1])
    with pytest.raises(ArgumentError, match=named):
        pass_over(paged, 1, **changes).attend(0, paged.query, scale=1.0)


def test_a_layer_that_brings_other_arrays_is_refused() -> None:
    paged = make_paged(context_lens=[9, 9], query_lens=[1, 1])
    ready = pass_over(paged, 2)
    for wrong in (paged.query[:1], paged.query.astype(np.float64), paged.query[:, :, :16]):
        with pytest.raises(ArgumentError, match="query"):
            ready.attend(0, wrong, scale=1.0)
    with pytest.raises(ArgumentError, match="key"):
        ready.write(0, paged.query[:, :2], paged.query[:, :1].copy(), paged.query)


def test_sequences_that_bring_more_than_one_token_are_no_singles() -> None:
    with pytest.raises(RangeError, match="singles"):
        pass_over(make_paged(context_lens=[9, 9], query_lens=[1, 3]), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_contexts_that_are_split_at_multiples_give_the_same_bits_alone_and_together(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels_numba.attention.attention_decode.get_num_threads", lambda: workers)
    paged = make_paged(context_lens=[700, 3, 256, 257, 1500], query_lens=[1] * 5)
    caches, tables, lens = (paged.key_cache, paged.value_cache), paged.block_tables, paged.context_lens

    def attend(some: slice) -> np.ndarray:
        arrays = (paged.query[some], *caches, tables[some], lens[some])
        return np.asarray(paged_attention_decode(*arrays, scale=paged.scale, split=256))

    together = attend(slice(None))
    assert_near(together, expected(paged), "float32", 1500)
    for b in range(5):
        np.testing.assert_array_equal(attend(slice(b, b + 1)), together[b : b + 1])


@pytest.mark.parametrize(
    ("new", "asked", "named"),
    [
        ([1, 1], (2, 1, 3, 1, 32, [NO_WINDOW]), None),
        ([1, 2], (3, 1, 3, 1, 32, [NO_WINDOW]), "a sequence of one new token"),
        ([1, 1], (3, 1, 3, 1, 32, [NO_WINDOW]), r"x\.shape\[0\]"),
        ([1, 1], (2, 1, 3, 2, 32, [NO_WINDOW]), "caches.shape"),
        ([1, 1], (2, 1, 6, 1, 16, [NO_WINDOW]), "caches.shape"),
        ([1, 1], (2, 2, 3, 1, 32, [NO_WINDOW]), "caches.shape"),
    ],
)
def test_a_decode_step_in_one_call_takes_sequences_of_one_new_token_and_heads_that_fit(
    new: list[int], asked: tuple[Any, ...], named: str | None
) -> None:
    paged = pass_over(make_paged(context_lens=[9, 20], query_lens=new), new.count(1))
    if named is None:
        assert paged.for_decode(*asked)[0].shape[0] == 1
        return
    with pytest.raises(ArgumentError, match=named):
        paged.for_decode(*asked)


def test_a_decode_step_in_one_call_is_for_float32() -> None:
    paged = make_paged(context_lens=[9], query_lens=[1], dtype="bfloat16")
    with pytest.raises(ArgumentError, match="float32"):
        pass_over(paged, 1).for_decode(1, 1, 3, 1, 32, [NO_WINDOW])


def test_a_decode_step_in_one_call_reads_no_page_outside_the_caches() -> None:
    paged = make_paged(context_lens=[9], query_lens=[1])
    with pytest.raises(ArgumentError, match="block_tables"):
        pass_over(paged, 1, block_tables=np.array([[99]], np.int32)).for_decode(1, 1, 3, 1, 32, [NO_WINDOW])
