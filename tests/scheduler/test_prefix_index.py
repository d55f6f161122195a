"""The prefix index against a plain model of it."""

import random

import pytest

from scheduler import BlockRemoved, BlockStored, PrefixIndex, PrefixMatch

pytestmark = pytest.mark.quick


def test_a_run_ends_at_the_first_key_that_nobody_holds() -> None:
    index = PrefixIndex()
    index.add_rank(5, 0)
    for key in (1, 2, 4):
        index.on(BlockStored(key, 5, "dram"))
    assert index.match([1, 2, 3, 4]) == PrefixMatch(2, 2, {0: 2})


def test_a_block_in_both_tiers_stays_when_it_leaves_one() -> None:
    index = PrefixIndex()
    index.on(BlockStored(1, 5, "dram"))
    index.on(BlockStored(1, 5, "ssd"))
    index.on(BlockRemoved(1, 5, "dram"))
    assert index.match([1]).blocks == 1
    assert index.match([1]).dram_blocks == 0
    index.on(BlockRemoved(1, 5, "ssd"))
    assert len(index) == 0


def test_replicas_on_two_nodes_count_for_both() -> None:
    index = PrefixIndex()
    index.add_rank(5, 0)
    index.add_rank(6, 1)
    index.on(BlockStored(1, 5, "dram"))
    index.on(BlockStored(1, 6, "dram"))
    assert index.match([1]).by_node == {0: 1, 1: 1}


def test_random_events_leave_what_a_set_would_hold() -> None:
    rng = random.Random(11)
    index, model = PrefixIndex(), set()
    for _ in range(3000):
        place = (rng.randrange(30), rng.randrange(3), rng.choice(["dram", "ssd"]))
        if rng.random() < 0.5:
            index.on(BlockStored(*place))
            model.add(place)
        else:
            index.on(BlockRemoved(*place))
            model.discard(place)
        index.check()
    assert index.places() == model
