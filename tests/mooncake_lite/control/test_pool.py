"""What the scheduler's index is told about the pool, and what commands about it count."""

from __future__ import annotations

import pytest

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.commands import CHECKED_AT_ONCE
from store.objects import BlockRef, HeldBlock
from tests.mooncake_lite.control.plane import BLOCK, LAYOUT, Plane, hash_free, only
from tests.scheduler.cluster import runs

pytestmark = pytest.mark.quick


def test_blocks_that_come_and_go_together_are_one_run_of_the_index() -> None:
    plane = Plane(blocks=16)
    index = plane.control.state.index
    plane.serve("a", 6 * BLOCK + 1)
    assert (len(index), len(runs(index))) == (6, 1)
    keys = [hash_free("a", block) for block in range(6)]
    plane.on(ev.BlocksSaved(3, 0, keys[::-1], "durable"))
    assert (len(index), len(runs(index))) == (6, 1)
    plane.serve("b", 12 * BLOCK + 1)
    assert index.leading(keys).by_node[0] == 3, "13 places are wanted, 10 were free"
    assert index.leading(keys).ssd_blocks == 3
    assert (len(index), len(runs(index))) == (18, 3), "two of request a, and one of b"


def test_a_check_counts_the_blocks_that_went_before_their_turn() -> None:
    plane = Plane(blocks=64)
    count = CHECKED_AT_ONCE + 4
    plane.serve("a", count * BLOCK)
    last_key = hash_free("a", count - 1)
    plane.on(ev.BlocksSaved(3, 0, [last_key], "durable"))
    first = only(fx.CheckBlocks, plane.on(ev.PoolCommand(1, "verify")))
    plane.on(ev.PoolCommand(2, "rm", [last_key]))
    rest = only(fx.CheckBlocks, plane.on(ev.BlocksChecked(3, 0, first.number, [True] * CHECKED_AT_ONCE)))
    told = plane.on(ev.BlocksChecked(3, 0, rest.number, [True] * 3))
    answers = [(one.done, one.ended) for one in told if isinstance(one, fx.AnswerCommand)]
    assert answers == [(count, False), (0, True)]


def test_a_new_conductor_has_blocks_saved_that_no_tier_has_yet() -> None:
    roles, nbytes = ["steward", "prefill", "decode", "store"], LAYOUT.nbytes
    config = ControlConfig(layout=(2, 1, BLOCK, 8, 4, "none"), roles=roles, nodes=[0] * 4, saves=True, term=1)
    control = Control(config)
    control.on(ev.GatewayReady("gateway-0"), 0.0)
    for rank, duty in enumerate(roles[1:], 1):
        has_tier = duty == "store"
        control.on(ev.RankJoined(rank, 1, rank, (duty,), 0, 4, 8 * nbytes * has_tier, has_tier), 1.0)
    control.on(ev.TierIndexed(3, 1, [1], [1], True), 1.0)
    held = [
        HeldBlock(BlockRef(key, 3, key * nbytes, nbytes), key, key, bytes(16), None, 0, 0) for key in (1, 2)
    ]
    assert only(fx.SaveBlocks, control.on(ev.Inventory(3, 1, held, True), 1.0)).keys == [2]


def test_without_a_store_rank_no_block_can_be_compared() -> None:
    plane = Plane(blocks=1, lend=8)
    plane.serve("a", 4 * BLOCK)
    plane.on(ev.RankLost(3, 0, "died"))
    assert plane.control.directory.stats()["objects"] > 0, "the prefill rank lends the space of the others"
    (answer,) = plane.on(ev.PoolCommand(1, "verify"))
    assert isinstance(answer, fx.AnswerCommand)
    assert answer.problem == "no store rank is left that could compare blocks"
