"""Whether blocks of the pool are loaded or computed: by the rates that the rank has measured."""

from __future__ import annotations

import pytest

from scheduler.instance import DECODE, PREFILL, Limits
from scheduler.instance.load_or_compute import PROBE_EVERY, Rates, worth_loading
from scheduler.instance.outcomes import Computed, Ended
from tests.scheduler.instance.rank import Rank, job
from tests.scheduler.instance.test_loads_and_stores import in_pool

pytestmark = pytest.mark.quick


def measured(load_s_per_block: float, compute_s_per_token: float) -> Rates:
    rates = Rates()
    rates.loaded(10, 10 * load_s_per_block)
    rates.prefilled(1000, 1000 * compute_s_per_token)
    return rates


def test_without_measurements_blocks_are_loaded() -> None:
    assert worth_loading(Rates(), 64)


def test_the_cheaper_of_both_is_chosen() -> None:
    assert worth_loading(measured(0.01, 0.001), 64)
    assert not worth_loading(measured(0.1, 0.001), 64)


def test_after_some_decisions_to_compute_the_rate_of_loading_is_measured_again() -> None:
    rates = measured(0.1, 0.001)
    rates.computed = PROBE_EVERY
    assert worth_loading(rates, 64)
    rates.loaded(10, 1.0)
    assert rates.computed == 0


def test_a_prompt_is_computed_when_loading_takes_longer() -> None:
    rank = Rank(PREFILL, limits=Limits(64))
    rank.state.rates = measured(100.0, 0.001)
    rank.arrive(job("a", [PREFILL], range(17), load=in_pool(rank, range(16)), store=[1]))
    computed = rank.until(Computed)
    assert (computed.tokens, computed.loaded) == (17, 0)
    assert rank.state.rates.computed == 1
    rank.settle()
    rank.assert_idle()


def test_a_decode_rank_always_loads() -> None:
    rank = Rank(DECODE)
    rank.state.rates = measured(100.0, 0.001)
    rank.arrive(job("a", [DECODE], range(9), load=in_pool(rank, range(8)), max_tokens=2))
    rank.until(Ended)
    rank.assert_idle()
