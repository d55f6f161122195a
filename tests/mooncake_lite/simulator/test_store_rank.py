"""The model of a store rank: what its tier keeps, and how long the disk is busy with it."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.store_rank import SEAL_BLOCKS, SEAL_S, StoreModel
from store.objects import BlockRef

pytestmark = pytest.mark.quick

NBYTES = 100


class Surroundings:
    """A world of one store rank, whose disk takes no time. told: by the rank; saved: bytes of each write."""

    def __init__(self) -> None:
        self.told, self.saved = list[Any](), list[int]()
        self.clock, self.dice, self.bytes, self.dead = Clock(), Random(1), Bytes(2), set[int]()
        self.answer, self.hardware = self.told.append, SimpleNamespace(save=self._save)

    def skip(self, draws: int) -> None:
        """Draw nothing."""

    def _save(self, rank: int, nbytes: int, done: Action) -> None:
        self.saved.append(nbytes)
        done()


def save(keys: range) -> fx.SaveBlocks:
    refs = [BlockRef(key, 3, key * NBYTES, NBYTES) for key in keys]
    return fx.SaveBlocks(3, refs, [*keys], [*keys], [[0, 0]] * len(keys))


def test_a_full_tier_evicts_the_blocks_that_it_has_had_longest() -> None:
    world: Any = Surroundings()
    rank = StoreModel(3, SEAL_BLOCKS + 1, world)
    rank.on(save(range(SEAL_BLOCKS)))
    rank.on(save(range(SEAL_BLOCKS, 2 * SEAL_BLOCKS)))
    evicted = [event for event in world.told if isinstance(event, ev.TierEvicted)]
    assert evicted == [ev.TierEvicted(3, 0, [*range(SEAL_BLOCKS - 1)])]


def test_all_blocks_of_an_order_go_over_the_disk_but_those_that_wait_for_it_already() -> None:
    world: Any = Surroundings()
    waiting = list[Action]()
    world.hardware.save = lambda rank, nbytes, done: (world.saved.append(nbytes), waiting.append(done))
    rank = StoreModel(3, 9, world)
    rank.on(save(range(3)))
    rank.on(save(range(5)))
    assert world.saved == [3 * NBYTES, 2 * NBYTES]
    assert world.told == [ev.BlocksSaved(3, 0, [0, 1, 2], "dropped")]


def saved(world: Any, state: str) -> list[list[int]]:
    """The keys that the rank has told of, in this state."""
    return [one.keys for one in world.told if isinstance(one, ev.BlocksSaved) and one.state == state]


def test_a_file_that_does_not_fill_is_sealed_after_a_while_each_time() -> None:
    world: Any = Surroundings()
    rank = StoreModel(3, 9, world)
    for key in (1, 2):
        rank.on(save(range(key, key + 1)))
        assert world.clock.step()
        assert (saved(world, "durable")[-1], world.clock.now) == ([key], key * SEAL_S)


def test_a_removed_block_is_not_read_any_more() -> None:
    world: Any = Surroundings()
    world.hardware.load = lambda rank, nbytes, done: done()
    rank, order = StoreModel(3, 9, world), save(range(SEAL_BLOCKS))
    rank.on(order)
    rank.on(fx.RemoveBlocks(3, [1]))
    assert world.clock.step()
    rank.on(fx.LoadBlocks(3, 1, order.keys, order.digests, order.refs))
    assert world.told[-1].ok == [True, False, True, True]
