"""Filters: who may come in at all."""

from __future__ import annotations

import pytest

from store.policies.admission import SecondHit, SizeLimit
from store.policies.contract import BlockFacts
from tests.store.policies.pools import Pool, hits, make

pytestmark = pytest.mark.quick


def test_a_block_that_is_used_once_never_takes_anybodys_place() -> None:
    """Maggs and Sitaraman, 2015: a content delivery network caches an object at its second request."""
    popular = [1, 2, 3]
    references = [*popular * 3, *range(100, 200), *popular]
    assert all(hits("lru+second-hit", references, 4)[-3:])
    assert not any(hits("lru", references, 4)[-3:])


def test_the_second_reference_lets_a_block_in_and_the_third_is_a_hit() -> None:
    assert hits("lru+second-hit", [1, 1, 1], 4) == [False, False, True]


def test_names_that_were_refused_are_remembered_for_as_many_as_the_pool_has_blocks() -> None:
    gate = SecondHit(3)
    for item in (1, 2, 3, 4):
        assert not gate.admits(item, BlockFacts())
    assert not gate.admits(1, BlockFacts())  # forgotten: three came after it
    assert gate.admits(4, BlockFacts())


def test_a_prompt_may_fill_a_tenth_of_the_pool() -> None:
    gate = SizeLimit(100)
    assert [gate.admits(1, BlockFacts(position=position)) for position in (0, 9, 10, 500)] == [
        *(True, True, False, False)
    ]
    assert SizeLimit(1).admits(1, BlockFacts(position=0))


def test_filters_can_be_combined_and_pass_everything_else_on() -> None:
    pool = Pool(make("sieve+second-hit+size", 30), 30)
    for item in (0, 0, 1, 1, 15, 15):  # 15 lies at depth 4, and a tenth of the pool is 3 blocks
        pool.refer(item)
        pool.check()
    assert pool.present == {0, 1}
