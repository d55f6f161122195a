"""A pass ends when it has computed, or soon after the last layers of its prefix have come."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.profiles.file import OverheadsSection
from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.profiled import ProfiledHardware
from mooncake_lite.simulator.runner import VirtualRunner
from scheduler.costs import CostConfig, LoadCost, TransferCost
from scheduler.instance.step import Chunk, Draw, LayerLoad, Step, WriteGroup
from store.objects import BlockRef

pytestmark = pytest.mark.quick

COMPUTE_S, LATENCY_S, BYTES_PER_S = 3.0, 0.1, 100.0
OVERHEADS = OverheadsSection()
ENDS_S = COMPUTE_S + OVERHEADS.step_s


def world_of(ranks: int) -> Any:
    """Ranks of one node each. The link of a node moves BYTES_PER_S."""
    clock, nodes = Clock(), range(ranks)
    costs = CostConfig(transfer=TransferCost(BYTES_PER_S, LATENCY_S), load=LoadCost(1e6, 1e6, 0.0))
    world: Any = SimpleNamespace(
        clock=clock, dice=Random(0), dead=set(), bytes=Bytes(2 * GROUPS), skip=lambda draws: None,
        hardware=ProfiledHardware(clock, lambda load: COMPUTE_S, costs, nodes, OVERHEADS),
        shape=SimpleNamespace(
            layout=SimpleNamespace(block_tokens=16), page_tokens=16,
            config=SimpleNamespace(instance_of=lambda number: [number]),
            in_lockstep=lambda rank: False,
        ),
    )  # fmt: skip
    return world


def chunk_of(job: Any) -> Chunk:
    return Chunk(job, [0] * 16, 16, [0, 1], (Draw(None, [0] * 32, 0, frozenset()),), prompt=True)


def ends(*nbytes: int) -> list[float]:
    """Begin a pass on each of some ranks at once; they load from one node. Returns when each pass ends."""
    world = world_of(len(nbytes) + 1)
    found: list[list[float]] = [[] for _ in nbytes]
    for rank, count in enumerate(nbytes, 1):
        runner = VirtualRunner(rank, world, lambda: None, found[rank - 1].append)
        job = cast(Any, ("job", 0))
        load = LayerLoad((0, 1), [BlockRef(1, 0, 0, count)], [0], job) if count else None
        assert runner.begin(Step(0.0, ahead=load, chunks=(chunk_of(job),))) == ENDS_S
    while world.clock.step():
        pass
    assert all(len(each) == 1 for each in found), "each end is told once"
    return [end for (end,) in found]


def test_a_prefix_that_comes_early_costs_nothing() -> None:
    assert ends(0) == ends(200) == [ENDS_S]


def test_after_a_late_prefix_its_last_group_of_layers_is_computed() -> None:
    assert ends(1000) == [pytest.approx(LATENCY_S + 10.0 + COMPUTE_S / GROUPS + OVERHEADS.step_s)]


def test_streams_share_links_as_other_transfers_do() -> None:
    assert ends(1000, 1000) == pytest.approx([LATENCY_S + 20.0 + COMPUTE_S / GROUPS + OVERHEADS.step_s] * 2)


def test_a_store_by_layers_leaves_the_rest_of_a_link_to_others_while_its_pass_computes() -> None:
    """Of 150 bytes 140 leave in the 3 s of the pass, and the last 10 after it."""
    world, job = world_of(2), cast(Any, ("job", 0))
    place, ended, other = BlockRef(1, 0, 0, 150), list[float](), list[float]()
    runner = VirtualRunner(1, world, lambda: ended.append(world.clock.now), lambda time: None)
    runner.begin(
        Step(0.0, writes=(WriteGroup(0, [0], [place], job, 0, behind=True),), chunks=(chunk_of(job),))
    )
    world.hardware.write(1, [BlockRef(2, 0, 0, 100)], lambda: other.append(world.clock.now))
    while world.clock.step():
        pass
    assert other == [pytest.approx(100 / (BYTES_PER_S - 140 / COMPUTE_S) + LATENCY_S)]
    assert ended == [pytest.approx(COMPUTE_S + LATENCY_S + 10 / BYTES_PER_S + LATENCY_S)]


def test_a_prefix_leaves_the_rest_of_a_link_to_others_while_its_pass_computes() -> None:
    """Two of its groups are read ahead of the pass, and no more."""
    world, other, job = world_of(2), list[float](), cast(Any, ("job", 0))
    runner = VirtualRunner(1, world, lambda: None, lambda time: None)
    load = LayerLoad((0, 1), [BlockRef(1, 0, 0, 104)], [0], job)
    runner.begin(Step(0.0, ahead=load, chunks=(chunk_of(job),)))
    world.hardware.read(1, [BlockRef(2, 0, 0, 100)], lambda: other.append(world.clock.now))
    while world.clock.step():
        pass
    rate = 104 / (COMPUTE_S * (1 - 2 / GROUPS))
    assert other == [pytest.approx(100 / (BYTES_PER_S - rate) + LATENCY_S)]
