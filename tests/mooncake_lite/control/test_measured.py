"""What ranks report reaches the costs: the right part of it, under the right instance."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mooncake_lite.control import ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.effects import BlockRef
from mooncake_lite.control.measured import Measurements
from mooncake_lite.control.members import Members
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.simulator.hardware import PREFILL_S_PER_TOKEN, STEP_S
from scheduler import State
from scheduler.costs import CostConfig, Costs
from scheduler.instances import Started
from tests.mooncake_lite.control.plane import BLOCK, Plane, only
from tests.worlds.world import FaultWorld

pytestmark = pytest.mark.quick

BLOCK_NBYTES = 2**24
LOAD, TRANSFER = CostConfig().load, CostConfig().transfer


def setup() -> tuple[Costs, Measurements, RequestRecord]:
    """Ranks 1 to 4 on nodes 0, 0, 1, 1; 640 tokens with two near and two far blocks for rank 1."""
    config = ControlConfig(
        layout=(2, 1, 64, 8, 4, "none"),
        roles=["steward", "prefill", "store", "decode", "store"],
        nodes=[0, 0, 0, 1, 1],
    )
    state = State(64, Costs(config.costs))
    state.add_instance(1, 0, ["prefill"], 2)
    record = RequestRecord.of(ev.RequestArrived("a", 640, 16, [], []), config.classes[0], 0.0)
    record.present.load = [
        BlockRef(number, rank, 0, BLOCK_NBYTES) for number, rank in enumerate((4, 4, 2, 2))
    ]
    record.present.promoted = [(2, 0.5, 10**8, 6)]
    return state.costs, Measurements(state, Members(config)), record


def test_only_the_blocks_that_were_read_count_and_near_ones_are_loads() -> None:
    costs, measured, record = setup()
    near_s = 2 * BLOCK_NBYTES / 1e9  # 1 GB/s, where 5 GB/s were guessed
    measured.prefilled(record, ev.PrefillEnded(1, 0, "a", 1, [], [], near_s, 3.2, 0.0, 64, 2), 9.0)
    assert costs.load_s(1, "dram", 10**9) == pytest.approx(1.0)
    assert costs.transfer_s(1, 10**9) == TRANSFER.seconds(10**9)
    assert costs.prefill_s(1, 64, 0) == pytest.approx(3.2)
    assert costs.load_s(2, "ssd", 10**8) == pytest.approx(0.5)


def test_a_read_of_near_and_far_blocks_corrects_both_costs_alike() -> None:
    costs, measured, record = setup()
    expected = LOAD.seconds("dram", 2 * BLOCK_NBYTES) + TRANSFER.seconds(2 * BLOCK_NBYTES)
    measured.prefilled(record, ev.PrefillEnded(1, 0, "a", 1, [], [], 3 * expected, 0.0, 0.0, 0, 4), 9.0)
    assert costs.load_s(1, "dram", 10**9) == pytest.approx(3 * LOAD.seconds("dram", 10**9))
    assert costs.transfer_s(1, 10**9) == pytest.approx(3 * TRANSFER.seconds(10**9))


def test_what_a_rank_does_not_report_of_a_prefill_is_messages_unless_it_computed_others_too() -> None:
    costs, measured, record = setup()
    ended = ev.PrefillEnded(1, 0, "a", 1, [], [], 0.5, 3.0, 0.2, 64, 2)
    record.present.started_s, record.present.ordered_s = 4.0, 5.0
    running = measured.state.prefills[1].running
    running |= {"a": Started(0.0, 4.0), "b": Started(0.0, 4.0)}
    measured.prefilled(record, ended, 9.0)
    assert costs.message_s == 0.0
    assert costs.held_s(1.0) == costs.recompute_s(1000, 0) / CostConfig().prefill.marginal_s(1000, 0)
    del running["b"]
    measured.prefilled(record, ended, 9.0)
    assert costs.message_s == pytest.approx(9.0 - 5.0 - 0.5 - 3.0 - 0.2)
    factor = costs.recompute_s(1000, 0) / CostConfig().prefill.marginal_s(1000, 0)
    assert costs.held_s(1.0) == pytest.approx(factor * (9.0 - 4.0) / 3.0), (
        "5 s in a slot, 3 s of them computing"
    )


def test_a_decode_rank_that_loads_is_measured_too() -> None:
    costs, measured, record = setup()
    record.present.tail = BlockRef(9, 4, 0, BLOCK_NBYTES)
    far_s = TRANSFER.seconds(2 * BLOCK_NBYTES)
    near_s = LOAD.seconds("dram", 3 * BLOCK_NBYTES)
    measured.loaded(record, ev.DecodeLoaded(3, 0, "a", 1, 2 * (near_s + far_s), 5))
    assert costs.load_s(3, "dram", 10**9) == pytest.approx(2 * LOAD.seconds("dram", 10**9))
    measured.loaded(record, ev.DecodeLoaded(3, 0, "a", 1, 100.0, 0))
    assert costs.load_s(3, "dram", 10**9) == pytest.approx(2 * LOAD.seconds("dram", 10**9)), (
        "no block was read"
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_replaces_the_guess_by_what_its_ranks_take(seed: int) -> None:
    world = FaultWorld.drawn(seed)
    world.run()
    costs = world.control.state.costs
    assert costs.recompute_s(1000, 0) == pytest.approx(1000 * PREFILL_S_PER_TOKEN, rel=0.2)
    for instance in world.control.state.decodes:
        assert costs.step_s(instance, 3, 900) == pytest.approx(STEP_S, rel=1e-3), "a swap may come between"
    assert 1 < costs.lengths.predicted(0, 100, 500) < 60


def test_a_preempted_request_is_predicted_to_decode_the_rest_of_its_answer() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 250))
    order = only(fx.StartDecode, plane.prefilled(job))
    plane.on(ev.DecodeLoaded(2, 0, "a", order.attempt))
    state = plane.control.state
    assert state.request_of("a").predicted_tokens == 16
    plane.on(ev.Preempted(2, 0, "a", order.attempt, 260, [], []))
    assert state.request_of("a").predicted_tokens == 6
    state.costs.lengths.answered(0, 250, 14)
    plane.control.requests["a"].num_tokens = 262
    record = plane.control.requests["a"]
    assert record.as_request(state, BLOCK).predicted_tokens == 2, "by answers to prompts of its size"


def test_a_stale_or_doubled_end_of_a_decode_changes_no_cost() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 100))
    order = only(fx.StartDecode, plane.prefilled(job))
    plane.on(ev.DecodeLoaded(2, 0, "a", order.attempt))
    costs, ended = (
        plane.control.state.costs,
        ev.DecodeEnded(2, 0, "a", order.attempt, 0, 8, 16, 16, 1600, 0.16),
    )
    for wrong in (
        replace(ended, attempt=order.attempt + 1),
        replace(ended, branch=1),
        replace(ended, rank=1),
        replace(ended, request_id="b"),
    ):
        plane.on(wrong)
        assert not costs.is_step_measured
        assert plane.control.state.decode_load.answer_tokens is None
    plane.on(ended)
    assert costs.mean_step_s(1, 100) == pytest.approx(0.01)
    plane.on(replace(ended, steps_s=1.6, answer_tokens=80))
    assert costs.mean_step_s(1, 100) == pytest.approx(0.01)
    assert plane.control.state.decode_load.answer_tokens == 8
