"""LRU: the order, and the paper's table in small."""

from __future__ import annotations

import pytest

from store.eviction import LRU

pytestmark = pytest.mark.quick


def insert(policy: LRU, item: int) -> None:
    policy.on_insert(item, 1, 0.0, cost_s=0.0, class_id=0)


def test_the_least_recently_used_goes_first() -> None:
    policy = LRU()
    for item in (1, 2, 3, 4):
        insert(policy, item)
    policy.on_access(1, 1.0)
    policy.on_remove(3)
    policy.on_access(2, 2.0)
    assert list(policy.victims(3.0)) == [4, 1, 2]
    assert len(policy) == 3


def test_asking_for_victims_changes_nothing() -> None:
    policy = LRU()
    for item in (1, 2):
        insert(policy, item)
    assert list(policy.victims(0.0)) == list(policy.victims(9.0)) == [1, 2]


def replay(requests: list[list[int]], blocks: int) -> int:
    """Hits of one LRU pool: a block counts only while all earlier ones of its request hit."""
    policy, present, hits = LRU(), set(), 0
    for request in requests:
        leading = True
        for block in request:
            if block in present:
                policy.on_access(block, 0.0)
                hits += leading
                continue
            leading = False
            insert(policy, block)
            present.add(block)
            if len(present) > blocks:
                victim = next(policy.victims(0.0))
                policy.on_remove(victim)
                present.remove(victim)
    return hits


def test_a_small_trace_gives_the_hits_that_were_counted_by_hand() -> None:
    requests = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [5, 7]]
    # unbounded: 0, then 1 2, then 0, then 1 2 3, then 5
    assert replay(requests, 100) == 6
    # 4 blocks: 1 2 hit; 5 6 push out 3 and 1; then every block pushes out the one wanted next
    assert replay(requests, 4) == 2
