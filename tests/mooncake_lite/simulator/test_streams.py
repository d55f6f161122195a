"""A pass ends when it has computed, or soon after the last layers of its prefix have come."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.profiles.file import OverheadsSection
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.kv import NoKV
from mooncake_lite.simulator.memory import Memory
from mooncake_lite.simulator.profiled import ProfiledHardware
from mooncake_lite.simulator.runner import VirtualRunner
from scheduler.costs import CostConfig, LoadCost, TransferCost
from scheduler.instance.step import Chunk, Draw, LayerLoad, Step
from store.objects import BlockRef

pytestmark = pytest.mark.quick

COMPUTE_S, LATENCY_S, BYTES_PER_S = 3.0, 0.1, 100.0
OVERHEADS = OverheadsSection()
ENDS_S = COMPUTE_S + OVERHEADS.step_s


def ends(*nbytes: int) -> list[float]:
    """Begin a pass on each of some ranks at once; they load from one node. Returns when each pass ends."""
    clock = Clock()
    nodes = range(len(nbytes) + 1)
    costs = CostConfig(
        transfer=TransferCost(BYTES_PER_S, BYTES_PER_S, LATENCY_S), load=LoadCost(1e6, 1e6, 0.0)
    )
    world: Any = SimpleNamespace(
        exact=True,
        clock=clock, dice=Random(0), faults=Faults.none(), dead=set(), memory=Memory(2 * GROUPS, 1024),
        hardware=ProfiledHardware(clock, lambda load: COMPUTE_S, costs, nodes, OVERHEADS),
        shape=SimpleNamespace(
            layout=SimpleNamespace(block_tokens=16), page_tokens=16,
            config=SimpleNamespace(instance_of=lambda number: [number]),
        ),
    )  # fmt: skip
    world.memory.add_segment(0, 1 << 20)
    found: list[list[float]] = [[] for _ in nbytes]
    for rank, count in enumerate(nbytes, 1):
        runner = VirtualRunner(rank, NoKV(), world, lambda: None, found[rank - 1].append)
        job = cast(Any, ("job", 0))
        load = LayerLoad((0, 1), [BlockRef(1, 0, 0, count)], [0], job) if count else None
        chunk = Chunk(job, [0] * 16, 16, [0, 1], (Draw(None, [0] * 32, 0, frozenset()),), prompt=True)
        assert runner.begin(Step(0.0, ahead=load, chunks=(chunk,))) == ENDS_S
    while clock.step():
        pass
    assert all(len(each) == 1 for each in found), "each end is told once"
    return [end for (end,) in found]


def test_a_prefix_that_comes_early_costs_nothing() -> None:
    assert ends(0) == ends(200) == [ENDS_S]


def test_after_a_late_prefix_its_last_group_of_layers_is_computed() -> None:
    assert ends(1000) == [pytest.approx(LATENCY_S + 10.0 + COMPUTE_S / GROUPS + OVERHEADS.step_s)]


def test_streams_share_links_as_other_transfers_do() -> None:
    assert ends(1000, 1000) == pytest.approx([LATENCY_S + 20.0 + COMPUTE_S / GROUPS + OVERHEADS.step_s] * 2)
