"""Which blocks read from SSD stay in DRAM."""

from __future__ import annotations

import pytest

from store.promotion import SecondHit

pytestmark = pytest.mark.quick


def test_a_block_stays_from_its_second_hit_on_and_starts_anew_after_it() -> None:
    policy = SecondHit()
    assert [policy.hit(1, owner) for owner in ("a", "b", "c", "d")] == [False, True, False, True]


def test_a_request_that_asks_again_is_one_hit() -> None:
    policy = SecondHit()
    assert not policy.hit(1, "a")
    assert not policy.hit(1, "a")
    assert policy.hit(1, "b")


def test_only_the_latest_keys_are_remembered() -> None:
    policy = SecondHit(max_keys=3)
    for key in range(5):
        policy.hit(key, "a")
        policy.check()
    assert [policy.hit(key, "b") for key in (4, 3, 2)] == [True] * 3
    assert not policy.hit(0, "b")
