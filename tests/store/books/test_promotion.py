"""Which blocks read from SSD stay in DRAM."""

from __future__ import annotations

import time

import pytest

from store.books.promotion import Promotion

pytestmark = pytest.mark.quick


def test_a_block_stays_from_its_second_hit_on_and_starts_anew_after_it() -> None:
    policy = Promotion()
    assert [policy.hit(1, owner) for owner in ("a", "b", "c", "d")] == [False, True, False, True]


def test_a_request_that_asks_again_is_one_hit() -> None:
    policy = Promotion()
    assert not policy.hit(1, "a")
    assert not policy.hit(1, "a")
    assert policy.hit(1, "b")


def test_only_the_latest_keys_are_remembered() -> None:
    policy = Promotion(max_keys=3)
    for key in range(5):
        policy.hit(key, "a")
        policy.check()
    assert [policy.hit(key, "b") for key in (4, 3, 2)] == [True] * 3
    assert not policy.hit(0, "b")


def test_a_full_memory_costs_no_more_than_one_that_fills() -> None:
    """The conductor asks once for each block read from SSD; forgetting the oldest must not look for it."""
    memory = Promotion(max_keys=1 << 15)

    def seconds(first: int) -> float:
        began = time.process_time()
        for key in range(first, first + (1 << 15)):
            memory.hit(key, "one")
        return time.process_time() - began

    filling = seconds(0)
    assert seconds(1 << 15) + seconds(2 << 15) < 20 * filling
    memory.check()
