"""Attention over contexts that are dealt out to members: the bits of one rank that has all tokens.

Each member has caches with its own units alone; everything else in them is not a number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba import paged_attention_decode
from kernels_numba.attention import attention_dealt
from kernels_numba.attention.attention_dealt import DealtContexts, own_tokens
from kernels_numba.errors import RangeError
from tests.conftest import examples
from tests.kernels_numba.paging import (
    GARBAGE_PAGE,
    Paged,
    as_dtype,
    as_float32,
    assert_near,
    expected,
    make_paged,
)

SPLIT = 256
PAGE = 16
EDGES = (1, 15, 255, 256, 257, 300, 511, 512, 513, 768, 1024, 1025, 2049)
"""Lengths around pieces, units and rows, and one so short that most members have none of it."""


def new_paged(lens: Any, heads: int = 9, kv_heads: int = 3, dtype: str = "float32", seed: int = 0) -> Paged:
    return make_paged(
        context_lens=list(lens),
        query_lens=[1] * len(lens),
        heads=heads,
        kv_heads=kv_heads,
        dtype=dtype,
        seed=seed,
    )


def member_of(paged: Paged, turn: int, turns: int, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(keys, values, tables) of one member: pages of other units are poisoned, and not in its tables."""
    tables = np.full_like(paged.block_tables, GARBAGE_PAGE)
    mine = []
    for b, length in enumerate(paged.context_lens):
        pages = [i for i in range(-(-int(length) // PAGE)) if i * PAGE // unit % turns == turn]
        tables[b, : len(pages)] = paged.block_tables[b, pages]
        mine += paged.block_tables[b, pages].tolist()
    caches = []
    for cache in (paged.key_cache, paged.value_cache):
        own = np.full_like(cache, 0x7FC0 if cache.dtype == np.uint16 else np.nan)
        own[mine] = cache[mine]
        caches.append(own)
    return caches[0], caches[1], tables


class Meeting:
    """Members that gather, each in a thread. calls: numbers that each brought, of each gathering."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._brought: list[Any] = [None] * count
        self.calls: list[list[int]] = []

    def of(self, member: int) -> Callable[[np.ndarray], list[np.ndarray]]:
        def gather(x: np.ndarray) -> list[np.ndarray]:
            assert (x.ndim, x.dtype) == (1, np.float32)
            self._brought[member] = x.copy()
            self._barrier.wait()
            found = list(self._brought)
            if member == 0:
                self.calls.append([len(one) for one in found])
            self._barrier.wait()
            return found

        return gather


def dealt(paged: Paged, turns: int, unit: int, dtype: str = "float32", threads: int = 1) -> list[np.ndarray]:
    """What each member gets."""
    meeting, query = Meeting(turns), as_dtype(paged.query, dtype)

    def attend(turn: int) -> np.ndarray:
        contexts = DealtContexts(paged.context_lens, turn, turns, unit, SPLIT, meeting.of(turn))
        out = as_dtype(np.full(paged.query.shape, np.nan, np.float32), dtype)
        contexts.attend(query, *member_of(paged, turn, turns, unit), out, paged.scale, threads)
        return out

    with ThreadPoolExecutor(turns) as members:
        return list(members.map(attend, range(turns)))


def alone(paged: Paged, dtype: str = "float32") -> np.ndarray:
    """What one rank gets that has all tokens, in pieces of SPLIT."""
    arguments = as_dtype(paged.query, dtype), paged.key_cache, paged.value_cache, paged.block_tables
    return paged_attention_decode(*arguments, paged.context_lens, scale=paged.scale, split=SPLIT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (12, 6), (14, 2), (16, 8)])
def test_all_members_get_the_bits_of_one_rank(heads: int, kv_heads: int, dtype: str) -> None:
    paged = new_paged(EDGES, heads, kv_heads, dtype)
    wanted = alone(paged, dtype)
    assert_near(as_float32(wanted), expected(paged), dtype, max(EDGES))
    for unit in (256, 512):
        for turns in (1, 2, 3, 4):
            for found in dealt(paged, turns, unit, dtype):
                np.testing.assert_array_equal(found, wanted, f"{turns} members, units of {unit}")


@settings(max_examples=examples(30))
@given(
    st.lists(st.one_of(st.integers(1, 1400), st.sampled_from(EDGES)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from([256, 512]),
    st.integers(1, 2),
)
def test_any_lengths_give_the_bits_of_one_rank(lens: list[int], turns: int, unit: int, threads: int) -> None:
    paged = new_paged(lens, 6, 2, seed=sum(lens))
    wanted = alone(paged)
    for found in dealt(paged, turns, unit, threads=threads):
        np.testing.assert_array_equal(found, wanted)


def test_a_member_brings_its_pieces_alone_and_nothing_of_contexts_that_it_has_nothing_of() -> None:
    paged, meeting = new_paged([256, 100, 600]), Meeting(3)
    contexts = [DealtContexts(paged.context_lens, turn, 3, 256, SPLIT, meeting.of(turn)) for turn in range(3)]
    assert [one.own.tolist() for one in contexts] == [[256, 100, 256], [0, 0, 256], [0, 0, 88]]

    def attend(turn: int) -> None:
        parts = member_of(paged, turn, 3, 256)
        contexts[turn].attend(paged.query, *parts, np.empty_like(paged.query), paged.scale, 1)

    with ThreadPoolExecutor(3) as members:
        list(members.map(attend, range(3)))
    each = 9 * (2 + 32)  # of a piece and head: highest score, total, and 32 sums
    assert meeting.calls == [[3 * each, each, each]]


def test_a_member_that_has_nothing_at_all_meets_the_others() -> None:
    paged = new_paged([1, 30, 256])
    wanted = alone(paged)
    for found in dealt(paged, 4, 256):
        np.testing.assert_array_equal(found, wanted)


def test_scores_far_apart_on_different_members_are_weighed_by_their_powers_of_two() -> None:
    """A merge by another base, or one that trusts the first piece, gives other weights."""
    paged = new_paged([700, 700])
    paged.query[0] *= 100
    wanted = alone(paged)
    for found in dealt(paged, 3, 256):
        np.testing.assert_array_equal(found, wanted)
    assert_near(wanted, expected(paged), "float32", 700)


def test_the_order_of_the_pieces_is_that_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of floats depend on it: the bits of one rank come from no other order."""
    paged, merge = new_paged([2049] * 3), attention_dealt.merge_pieces
    wanted = alone(paged)

    def other_way(pieces: np.ndarray, *rest: np.ndarray) -> None:
        *parts, out = rest
        merge(pieces[::-1].copy(), *(part[::-1].copy() for part in parts), out)

    monkeypatch.setattr(attention_dealt, "merge_pieces", other_way)
    assert any((found != wanted).any() for found in dealt(paged, 2, 256))


@pytest.mark.quick
@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(1, 6), st.sampled_from([16, 256, 512])
)
def test_each_token_is_one_members_own(lens: list[int], turns: int, unit: int) -> None:
    tokens = np.array(lens)
    owned = [own_tokens(tokens, turn, turns, unit) for turn in range(turns)]
    for b, length in enumerate(lens):
        counted = np.bincount(np.arange(length) // unit % turns, minlength=turns)
        assert [int(own[b]) for own in owned] == counted.tolist()
    assert all(own.dtype == np.int32 for own in owned)


@pytest.mark.quick
def test_a_unit_that_is_no_whole_number_of_pieces_is_refused() -> None:
    with pytest.raises(RangeError, match="unit=300: expected a multiple of the pieces' 256 tokens"):
        DealtContexts(np.array([5]), 0, 2, 300, SPLIT, list)
