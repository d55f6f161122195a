"""Where copies of hot prefixes go, and what they may displace."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from scheduler import CostConfig
from scheduler.costs import LoadCost, PrefillCost, TransferCost
from store.objects import Wanted

pytestmark = pytest.mark.quick

BLOCK_BYTES = 1024
FAR = 3
PREFIX_BLOCKS = 4


class TwoNodes:
    """Ranks 1 and 2 compute on node 1. Rank 3, on node 0, has all blocks; ranks 4.. of node 1 get copies.

    copies     rank -> blocks that were copied there
    near_hits  blocks that were read from node 1
    fails      no copy works
    """

    def __init__(self, prefixes: int, *near_blocks: int, **config: Any) -> None:
        roles = ["steward", "prefill", "decode", "store", *["store"] * len(near_blocks)]
        nodes = [0, 1, 1, 0, *[1] * len(near_blocks)]
        prefill, transfer = PrefillCost(0.0, 0.01), TransferCost(1e9, 0.0)
        load = LoadCost(1e9, 1e9, 0.0)
        costs = CostConfig(prefill=prefill, transfer=transfer, load=load, is_guess=False)
        layout = (2, 1, 16, 4, 4, "none")
        fields = {"layout": layout, "roles": roles, "nodes": nodes, "costs": costs, **config}
        self.control = Control(ControlConfig(**fields))
        self.copies: Counter[int] = Counter()
        self.near_hits = self.requests = 0
        self.fails = False
        self.now = 0.0
        blocks = [0, 0, 0, 1000, *near_blocks]
        for rank in range(1, len(roles)):
            nbytes = blocks[rank] * BLOCK_BYTES
            self.on(ev.RankJoined(rank, 0, rank, (roles[rank],), nodes[rank], 4, nbytes))  # type: ignore[arg-type]
        self.on(ev.GatewayReady("gateway"))
        directory = self.control.directory
        self.prefixes = [[10 * number + index for index in range(1, 5)] for number in range(1, prefixes + 1)]
        for key in [key for keys in self.prefixes for key in keys]:
            (obj,) = directory.allocate_many("writer", [Wanted(BLOCK_BYTES, key, key)], now=0.0, rank=FAR)
            directory.put_end(obj.object_id, [1, 2], 0.0)
        self.on(ev.Tick())

    def on(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.control.on(event, self.now)
        self.control.check()
        return effects

    def read(self, number: int) -> None:
        """Serve one request for a whole prefix, and carry out the copies that it leads to."""
        self.now += 1.0
        self.requests += 1
        name, keys = f"r{self.requests}", self.prefixes[number]
        effects = self.on(ev.RequestArrived(name, 16 * len(keys), 4, keys, keys))
        if not any(isinstance(effect, fx.StartPrefill) for effect in effects):  # it waits for copies
            effects = self._copy(effects)
        (job,) = (effect for effect in effects if isinstance(effect, fx.StartPrefill))
        self.near_hits += sum(ref.rank != FAR for ref in job.load)
        self._copy(effects)
        self.on(ev.PrefillEnded(1, 0, name, 1, [], [], 0.001, 0.01, 0.0, 1, len(job.load)))
        self.on(ev.DecodeLoaded(2, 0, name, 1))
        self.on(ev.DecodeEnded(2, 0, name, 1))

    def _copy(self, effects: Iterable[fx.Effect]) -> list[fx.Effect]:
        then: list[fx.Effect] = []
        for order in [effect for effect in effects if isinstance(effect, fx.CopyBlocks)]:
            self.copies[order.rank] += len(order.targets)
            sums: list[list[int]] = [[] if self.fails else [1, 2]] * len(order.targets)
            then += self.on(ev.BlocksCopied(order.rank, 0, order.number, sums))
        return then


def test_copies_that_fail_have_a_reason() -> None:
    world = TwoNodes(1, PREFIX_BLOCKS)
    world.fails = True
    world.read(0)
    world.read(0)
    mechanisms = world.control.mechanisms
    assert mechanisms.counts["copies"] == {"tried": PREFIX_BLOCKS, "failed": PREFIX_BLOCKS}
    assert mechanisms.reasons["copies"].startswith("rank 4 could not read or write them")


@pytest.mark.parametrize("order", ["in turn", "in pairs", "drawn"])
def test_two_hot_prefixes_with_space_for_one_copy_do_not_displace_each_other(order: str) -> None:
    world, rng = TwoNodes(2, PREFIX_BLOCKS), random.Random(7)
    for number in range(400):
        world.read({"in turn": number % 2, "in pairs": number // 2 % 2, "drawn": rng.randrange(2)}[order])
    assert world.copies[4] == PREFIX_BLOCKS
    assert world.near_hits > 150 * PREFIX_BLOCKS


def test_a_copy_takes_the_place_of_blocks_that_were_not_read_for_a_minute() -> None:
    world = TwoNodes(2, PREFIX_BLOCKS)
    for _ in range(3):
        world.read(0)
    world.now += 58.0
    world.read(1)
    world.read(1)
    assert world.copies[4] == 2 * PREFIX_BLOCKS
    world.read(1)
    assert world.near_hits == 2 * PREFIX_BLOCKS


def test_a_copy_displaces_no_block_that_was_used_within_a_minute() -> None:
    world = TwoNodes(1, PREFIX_BLOCKS)
    directory = world.control.directory
    wanted = [Wanted(BLOCK_BYTES, key, key) for key in (91, 92, 93)]
    for obj in directory.allocate_many("writer", wanted, now=0.0, rank=4):
        directory.put_end(obj.object_id, [1, 2], 0.0)
    world.read(0)
    world.read(0)
    assert world.copies[4] == 1, "into the free space alone"
    assert directory.counters["evictions"] == 0


def test_copies_are_spread_over_the_store_ranks_of_a_node() -> None:
    world = TwoNodes(6, 100, 100, 100)
    for number in range(6):
        world.read(number)
        world.read(number)
    assert world.copies == {4: 8, 5: 8, 6: 8}
    full = TwoNodes(6, 4, 4, 4)
    for _ in range(2):
        for number in range(6):
            full.read(number)
            full.read(number)
        full.now += 100.0
    assert {rank for rank, blocks in full.copies.items() if blocks >= 4} == {4, 5, 6}


def test_no_copy_is_ordered_from_a_store_rank_that_is_lost() -> None:
    world = TwoNodes(1, 100, 100)
    world.on(ev.RankLost(5, 0, "died"))
    for _ in range(3):
        world.read(0)
    assert world.copies == {4: PREFIX_BLOCKS}


SITES: dict[str, Any] = {"racks": [0, 1], "policy": "topology"}


@pytest.mark.parametrize(("reads", "near_hits"), [(1, 3), (2, 2), (4, 0)])
def test_a_rack_pulls_what_it_reads_so_often_and_then_reads_its_copy(reads: int, near_hits: int) -> None:
    world = TwoNodes(1, PREFIX_BLOCKS, site_copies="pull", copy_reads=reads, **SITES)
    for _ in range(3):
        world.read(0)
    assert world.near_hits == near_hits * PREFIX_BLOCKS, "the read that pulls reads the copy, too"
    assert world.copies == ({4: PREFIX_BLOCKS} if near_hits else {})


def test_a_prompt_reads_the_original_where_its_copy_fails_or_finds_no_space() -> None:
    for near_blocks, fails in ((PREFIX_BLOCKS, True), (2, False)):
        world = TwoNodes(1, near_blocks, site_copies="pull", copy_reads=1, **SITES)
        world.fails = fails
        world.read(0)
        assert world.near_hits == (0 if fails else 2)


def test_a_store_rank_that_is_lost_while_a_prompt_waits_for_it_is_not_waited_for() -> None:
    world = TwoNodes(1, PREFIX_BLOCKS, 100, site_copies="pull", copy_reads=1, **SITES)
    (keys,) = world.prefixes
    effects = world.on(ev.RequestArrived("a", 64, 4, keys, keys))
    (order,) = (effect for effect in effects if isinstance(effect, fx.CopyBlocks))
    effects = world.on(ev.RankLost(order.rank, 0, "died"))
    (job,) = (effect for effect in effects if isinstance(effect, fx.StartPrefill))
    assert {ref.rank for ref in job.load} == {FAR}


def test_a_prompt_that_is_cancelled_while_it_waits_for_copies_ends_with_them() -> None:
    world = TwoNodes(1, PREFIX_BLOCKS, site_copies="pull", copy_reads=1, **SITES)
    (keys,) = world.prefixes
    world.on(ev.RequestArrived("a", 64, 4, keys, keys))
    world.on(ev.RequestCancelled("a"))
    world.on(ev.BlocksCopied(4, 0, 1, [[1, 2]] * PREFIX_BLOCKS))
    assert not world.control.open_requests


def test_what_is_read_anywhere_is_pushed_to_the_racks_that_lack_it() -> None:
    """Rank 3 of rack 0 has the blocks, and rank 1 of rack 1 reads them; rack 2 only has rank 5."""
    config = {"racks": [0, 1, 2], "policy": "topology", "site_copies": "push", "copy_reads": 2}
    roles, nodes = ["steward", "prefill", "decode", "store", "store", "store"], [0, 1, 1, 0, 1, 2]
    world = TwoNodes(1, PREFIX_BLOCKS, PREFIX_BLOCKS, roles=roles, nodes=nodes, **config)
    for _ in range(3):
        world.read(0)
    assert world.copies == {4: PREFIX_BLOCKS, 5: PREFIX_BLOCKS}
    assert world.near_hits == PREFIX_BLOCKS
