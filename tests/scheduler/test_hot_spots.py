"""What deserves a copy on another node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.hot_spots import HotSpots
from scheduler.placement import THRESHOLD

pytestmark = pytest.mark.quick

FAR, NEAR = False, True


def test_the_second_far_read_of_a_prefix_within_the_window_asks_for_a_copy() -> None:
    spots = HotSpots(THRESHOLD, window_s=60)
    assert spots.on_read(1, [7, 8], [FAR, FAR], 0.0) == []
    assert spots.on_read(1, [7, 8], [FAR, FAR], 59.0) == [7, 8]
    assert not spots._reads


def test_another_node_counts_for_itself_and_an_old_read_does_not_count() -> None:
    spots = HotSpots(THRESHOLD, window_s=60)
    spots.on_read(1, [7], [FAR], 0.0)
    assert spots.on_read(2, [7], [FAR], 1.0) == []
    assert spots.on_read(1, [7], [FAR], 61.0) == []
    assert spots.on_read(1, [7], [FAR], 62.0) == [7]


def test_paper_algorithm_1_copies_only_when_the_best_prefix_is_threshold_times_the_near_one() -> None:
    """FAST'25, Algorithm 1: "if best_len / p.prefix_len > kvcache_balancing_threshold"."""
    spots = HotSpots(2.0, times=1)
    assert spots.on_read(1, [1, 2, 3, 4], [NEAR, NEAR, FAR, FAR], 0.0) == []  # 4 / 2 is not above 2
    assert spots.on_read(1, [1, 2, 3, 4, 5], [NEAR, NEAR, FAR, NEAR, FAR], 0.0) == [3, 5]
    assert spots.on_read(1, [1, 2], [NEAR, NEAR], 0.0) == []
    assert spots.on_read(1, [], [], 0.0) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 8)), max_size=60))
def test_it_remembers_no_more_than_it_may(reads: list[tuple[int, int, int]]) -> None:
    spots = HotSpots(THRESHOLD, remembered=10, window_s=5)
    for now, (node, first, count) in enumerate(reads):
        keys = list(range(first, first + count))
        hot = spots.on_read(node, keys, [FAR] * count, float(now))
        assert set(hot) <= set(keys)
        spots.check()


def test_the_pair_that_was_not_read_for_longest_is_forgotten_first() -> None:
    """Otherwise nothing new is ever hot once as many pairs are remembered as may be."""
    spots = HotSpots(THRESHOLD, remembered=2)
    for now, key in enumerate((1, 2, 3)):
        assert spots.on_read(1, [key], [FAR], float(now)) == []
    assert spots.on_read(1, [3], [FAR], 3.0) == [3]
