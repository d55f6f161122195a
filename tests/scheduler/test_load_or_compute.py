"""Whether blocks of the pool are loaded or computed: by the rates that instances have measured."""

from __future__ import annotations

import pytest

from scheduler import CostConfig, Costs
from scheduler.costs import TransferCost
from scheduler.costs.load_or_compute import PROBE_EVERY, LoadOrCompute

pytestmark = pytest.mark.quick

NUM_TOKENS, CACHED, NBYTES = 4096, 2048, 32 << 20


def measured(load_s: float, compute_s: float) -> LoadOrCompute:
    """Instance 0 loads NBYTES in load_s, and computes NUM_TOKENS in compute_s."""
    costs = Costs(CostConfig())
    costs.measured_fetch(0, NBYTES, 0, load_s)
    costs.measured_prefill(0, NUM_TOKENS, 0, compute_s)
    return LoadOrCompute(costs)


def loads(choice: LoadOrCompute, instance: int = 0) -> bool:
    return choice.loads(instance, NUM_TOKENS, CACHED, NBYTES, 0)


def test_without_measurements_blocks_are_loaded() -> None:
    assert loads(LoadOrCompute(Costs(CostConfig())))
    only_computed = Costs(CostConfig())
    only_computed.measured_prefill(0, NUM_TOKENS, 0, 1e-6)
    assert loads(LoadOrCompute(only_computed))


def test_the_cheaper_of_both_is_chosen() -> None:
    assert loads(measured(0.1, 1.0))
    assert not loads(measured(1.0, 0.1))


def test_bytes_from_the_rack_count_by_the_rate_of_the_rack() -> None:
    costs = Costs(CostConfig(transfer=TransferCost(1.0, 0.0, rack_bytes_per_s=1e9), is_guess=False))
    choice = LoadOrCompute(costs)
    assert choice.loads(0, NUM_TOKENS, CACHED, 0, 0, NBYTES)
    assert not choice.loads(0, NUM_TOKENS, CACHED, 0, NBYTES)


def test_bytes_from_another_node_count_by_their_own_rate() -> None:
    choice = measured(0.1, 1.0)
    assert choice.loads(0, NUM_TOKENS, CACHED, NBYTES, 0)
    assert not choice.loads(0, NUM_TOKENS, CACHED, NBYTES, 1 << 40)


def test_after_some_decisions_to_compute_an_instance_loads_again() -> None:
    choice = measured(1.0, 0.1)
    assert [loads(choice) for _ in range(PROBE_EVERY + 2)] == [*[False] * PROBE_EVERY, True, False]
    assert not loads(choice, instance=1)
