"""The costs: their formulas over numbers and columns, their corrections, and the length of answers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.costs import CostConfig, Costs, DecodeCost, LoadCost, PrefillCost, TransferCost
from scheduler.costs.lengths import Lengths
from scheduler.costs.refine import LIMIT, Average, Corrections

pytestmark = pytest.mark.quick

CONFIG = CostConfig(
    prefill=PrefillCost(0.06, 1e-4, 1e-9, 2e-6),
    decode=DecodeCost(0.026, 1e-4, 3e-8),
    transfer=TransferCost(2e9, 1e-3),
    load=LoadCost(8e9, 1e9, 5e-3),
    is_guess=False,
)


# ------------------------------------------------------------------------------ formulas


@given(st.integers(1, 2000), st.data())
def test_a_prefill_pays_each_computed_token_and_each_pair_of_its_attention(n: int, data: Any) -> None:
    """The paper: "T_prefill: a polynomial in (length, prefix length), fitted offline"."""
    cached = data.draw(st.integers(0, n - 1))
    pairs = sum(position + 1 for position in range(cached, n))
    wanted = 0.06 + 1e-4 * (n - cached) + 1e-9 * pairs + 2e-6 * cached
    assert CONFIG.prefill.seconds(n, cached) == pytest.approx(wanted, rel=1e-9)
    assert CONFIG.prefill.marginal_s(n, cached) == pytest.approx(wanted - 0.06 - 2e-6 * cached, rel=1e-6)


def test_a_prefill_of_few_tokens_pays_terms_of_its_own() -> None:
    cost = PrefillCost(0.05, 1e-3, 2e-7, 3e-5, 32, 0.01, 5e-4)
    pairs_s = 2e-7 * sum(range(101, 133))
    assert cost.seconds(132, 100) == pytest.approx(0.01 + 32 * 5e-4 + pairs_s + 100 * 3e-5)
    assert cost.seconds(133, 100) == pytest.approx(0.05 + 33 * 1e-3 + pairs_s + 133 * 2e-7 + 100 * 3e-5)
    cached = np.array([0.0, 100.0, 101.0, 132.0])
    assert cost.seconds(133, cached).tolist() == pytest.approx([cost.seconds(133, one) for one in cached])


def test_blocks_computed_one_after_the_other_cost_what_their_prompt_costs() -> None:
    parts = [CONFIG.prefill.marginal_s(start + 64, start) for start in range(0, 6400, 64)]
    assert sum(parts) == pytest.approx(CONFIG.prefill.marginal_s(6400, 0))


def test_a_decode_step_reads_the_weights_once_and_the_kv_of_each_sequence() -> None:
    assert CONFIG.decode.step_s(4, 8000) == pytest.approx(0.026 + 4e-4 + 2.4e-4)
    several = sum(CONFIG.decode.step_s(batch, 100 * batch) for batch in (1, 2, 5))
    assert CONFIG.decode.step_s(8, 800, 3) == pytest.approx(several)


def test_transfers_of_one_sender_share_its_bandwidth() -> None:
    assert CONFIG.transfer.seconds(10**9) == pytest.approx(0.501)
    assert CONFIG.transfer.seconds(10**9, 3) == pytest.approx(2.001)
    assert CONFIG.transfer.seconds(0, 3) == 0


def test_a_load_pays_its_tier_and_no_bytes_take_no_time() -> None:
    assert CONFIG.load.seconds("dram", 8 * 10**9) == pytest.approx(1.0)
    assert CONFIG.load.seconds("ssd", 10**9) == pytest.approx(1.005)
    assert CONFIG.load.seconds("ssd", 0) == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PrefillCost(0.0, -1e-3), "every coefficient must be 0 or more"),
        (lambda: DecodeCost(float("nan"), 0.0, 0.0), "every coefficient must be 0 or more"),
        (lambda: TransferCost(0.0, 0.0), "far_bytes_per_s must be above 0"),
        (lambda: LoadCost(1e9, 1e9, -1.0), "the latency 0 or more"),
    ],
)
def test_an_impossible_cost_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_columns_give_what_their_numbers_give() -> None:
    costs = Costs(CONFIG)
    for instance, factor in ((0, 2.0), (3, 0.5)):
        costs.measured_prefill(instance, 4096, 0, factor * CONFIG.prefill.seconds(4096, 0))
        costs.measured_steps(instance, 100, 100, 0, factor * CONFIG.decode.step_s(100, 0, 100))
    instances, cached, batch = np.arange(6), np.arange(6) * 512, np.arange(6)
    nbytes = np.arange(6) * 10**6
    columns = {
        "prefill": costs.prefill_s(instances, 8192, cached),
        "queue": costs.slot_s(instances, cached.astype(float)),
        "tbt": costs.tbt_s(instances, batch, cached, 100, 2),
        "transfer": costs.transfer_s(instances, nbytes, batch),
        "fetch": costs.fetch_s(instances, nbytes, 2 * nbytes, batch, nbytes),
    }
    for at in range(6):
        assert columns["prefill"][at] == pytest.approx(costs.prefill_s(at, 8192, 512 * at))
        assert columns["queue"][at] == pytest.approx(costs.slot_s(at, 512.0 * at))
        assert columns["tbt"][at] == pytest.approx(costs.tbt_s(at, at, 512 * at, 100, 2))
        assert columns["transfer"][at] == pytest.approx(costs.transfer_s(at, at * 10**6, at))
        assert columns["fetch"][at] == pytest.approx(
            costs.fetch_s(at, at * 10**6, 2 * at * 10**6, at, at * 10**6)
        )


def test_a_fetch_adds_its_parts_and_tbt_counts_the_new_request() -> None:
    costs = Costs(CONFIG)
    fetch_s = costs.fetch_s(1, 8 * 10**9, 2 * 10**9, ssd=10**9)
    assert fetch_s == pytest.approx(1.0 + 1.001 + 1.005)
    assert costs.tbt_s(1, 3, 3000, 1000, 2) == pytest.approx(CONFIG.decode.step_s(5, 5000))


def test_a_configuration_survives_a_recording() -> None:
    raw = msgspec.msgpack.encode(CONFIG)
    assert msgspec.msgpack.decode(raw, type=CostConfig) == CONFIG


# ------------------------------------------------------------------------------ corrections


def prefilled(costs: Costs, tokens: int, seconds: float, times: int = 1, instance: int = 1) -> None:
    for _ in range(times):
        costs.measured_prefill(instance, tokens, 0, seconds)


def test_without_a_profile_the_first_measurement_replaces_the_guess() -> None:
    costs = Costs(CostConfig())
    assert not costs.is_measured
    prefilled(costs, 1000, 100.0)
    assert costs.is_measured
    assert costs.prefill_s(1, 10, 0) == pytest.approx(1.0)


def test_full_hits_do_not_change_the_correction() -> None:
    costs = Costs(CostConfig())
    prefilled(costs, 1000, 1.0)
    prefilled(costs, 1, 0.05, times=1000)
    assert costs.prefill_s(1, 1000, 0) == pytest.approx(1.0)


def test_a_small_measurement_has_little_weight() -> None:
    costs = Costs(CostConfig())
    prefilled(costs, 32, 3.2)
    assert costs.recompute_s(10, 0) == pytest.approx(1.0), "the only measurement there is"
    prefilled(costs, 1000, 1.0)
    assert costs.recompute_s(10, 0) < 0.2


def test_eight_measurements_of_32_tokens_weigh_about_as_much_as_one_of_256() -> None:
    found = []
    for times, tokens in ((8, 32), (1, 256)):
        costs = Costs(CostConfig())
        prefilled(costs, 1000, 1.0, times=60)
        prefilled(costs, tokens, tokens * 0.003, times=times)
        found.append(costs.recompute_s(1000, 0))
    assert found[0] == pytest.approx(found[1], rel=0.03)


def test_a_correction_follows_a_change_by_a_fifth_per_measurement() -> None:
    costs = Costs(CostConfig())
    prefilled(costs, 1000, 1.0, times=60)
    prefilled(costs, 1000, 2.0)
    assert costs.prefill_s(1, 1000, 0) == pytest.approx(1.2)


def test_a_cost_of_nothing_is_never_corrected() -> None:
    costs = Costs(CostConfig(prefill=PrefillCost(0.0, 0.0), decode=DecodeCost(0.0, 0.0, 0.0)))
    prefilled(costs, 1000, 1.0)
    costs.measured_steps(1, 10, 10, 10, 1.0)
    assert not costs.is_measured
    assert costs.prefill_s(1, 1000, 0) == costs.step_s(1, 1, 1) == 0


def test_no_tokens_or_no_time_are_no_measurement() -> None:
    costs = Costs(CostConfig())
    costs.measured_prefill(1, 1000, 1000, 1.0)
    costs.measured_prefill(1, 1000, 0, 0.0)
    costs.measured_steps(1, 0, 0, 0, 0.0)
    costs.measured_fetch(1, 0, 0, 1.0)
    assert (costs.is_measured, costs.is_step_measured) == (False, False)
    assert costs.prefill_s(1, 1000, 0) == CostConfig().prefill.seconds(1000, 0)


def test_a_profile_is_corrected_by_a_factor_of_8_at_most_and_counts_as_measured() -> None:
    costs = Costs(CONFIG)
    assert costs.is_measured
    assert costs.is_step_measured
    prefilled(costs, 4096, 1000.0, times=60)
    assert costs.prefill_s(1, 4096, 0) == pytest.approx(8 * CONFIG.prefill.seconds(4096, 0))
    prefilled(costs, 4096, 1e-6, times=60)
    assert costs.prefill_s(1, 4096, 0) == pytest.approx(CONFIG.prefill.seconds(4096, 0) / 8, rel=0.01)


def test_a_profile_counts_as_one_measurement_before_the_first_and_a_guess_does_not() -> None:
    for limit, expected in ((8.0, average_of(1.0, 4.0)), (float("inf"), 4.0)):
        corrections = Corrections(1.0, limit)
        assert not corrections.is_measured
        corrections.measured(2, 1.0, 4.0)
        assert corrections.of(2) == corrections.of_all == pytest.approx(expected)


def test_a_short_first_measurement_hardly_changes_what_a_profile_says() -> None:
    corrections = Corrections(1.0, 8.0)
    corrections.measured(2, 0.1, 0.4)
    assert 1.0 < corrections.of(2) < 1.4


def test_an_instance_has_its_own_correction_and_others_have_that_of_all() -> None:
    corrections = Corrections(1.0, float("inf"))
    assert corrections.of(7) == corrections.of_all == 1.0
    corrections.measured(2, 1.0, 4.0)
    assert list(corrections.of(np.array([0, 2, 3, 9]))) == [4.0, 4.0, 4.0, 4.0]
    corrections.measured(5, 1.0, 1.0)
    found = corrections.of(np.array([0, 2, 5, 6, 99]))
    assert (found[1], found[2]) == (4.0, pytest.approx(average_of(4.0, 1.0)))
    assert found[0] == found[3] == found[4] == pytest.approx(corrections.of_all)
    assert 1.0 < corrections.of_all < 4.0
    corrections.measured(2, 1.0, 1.0)
    assert corrections.of(2) == pytest.approx(average_of(4.0, 1.0))


def test_a_column_that_was_asked_for_before_gets_the_factors_of_now() -> None:
    corrections, instances = Corrections(1.0, 8.0), np.array([1, 2])
    before = corrections.of(instances)
    corrections.measured(2, 1.0, 4.0)
    corrections.measured(1, 1.0, 2.0)
    found = list(corrections.of(instances))
    assert found == list(corrections.of(instances.copy())) == [corrections.of(1), corrections.of(2)]
    assert min(found) > 1.0
    assert list(before) == [1.0, 1.0], "a decision keeps the factors that it was made with"


def average_of(*values: float) -> float:
    average = Average()
    for value in values:
        average.add(value)
    return average.value


def test_a_slow_step_corrects_every_step_of_its_instance() -> None:
    costs = Costs(CONFIG)
    costs.measured_steps(4, 50, 200, 10**6, 2 * CONFIG.decode.step_s(200, 10**6, 50))
    assert costs.step_s(4, 7, 900) == pytest.approx(average_of(1.0, 2.0) * CONFIG.decode.step_s(7, 900))


def test_a_fetch_corrects_loads_and_transfers_in_their_predicted_shares() -> None:
    costs = Costs(CONFIG)
    expected = costs.fetch_s(1, 4 * 10**9, 4 * 10**9)
    costs.measured_fetch(1, 4 * 10**9, 4 * 10**9, 3 * expected)
    factor = average_of(1.0, 3.0)
    assert costs.load_s(1, "dram", 10**9) == pytest.approx(factor * CONFIG.load.seconds("dram", 10**9))
    assert costs.transfer_s(1, 10**9) == pytest.approx(factor * CONFIG.transfer.seconds(10**9))
    costs.measured_load(3, "ssd", 10**9, 2.01)
    assert costs.load_s(3, "ssd", 10**9) == pytest.approx(average_of(1.0, 2.0) * 1.005)
    assert costs.fetch_s(9, 0, ssd=10**9) == pytest.approx(average_of(1.0, 2.0) * 1.005)


# ------------------------------------------------------------------------------ lengths


def test_a_length_is_the_moving_mean_of_answers_to_prompts_of_about_this_length() -> None:
    lengths = Lengths()
    assert lengths.predicted(0, 100, 512) == 512, "nothing is known"
    lengths.answered(0, 100, 10)
    assert lengths.predicted(0, 127, 512) == 10
    assert lengths.predicted(0, 128, 512) == 512, "longer prompts"
    assert lengths.predicted(1, 100, 512) == 512, "another class"
    for _ in range(500):
        lengths.answered(0, 100, 300)
    assert lengths.predicted(0, 100, 512) == pytest.approx(300, rel=0.01)
    assert lengths.predicted(0, 100, 200) == 200, "never above max_tokens"


def test_of_an_answer_that_has_begun_only_the_rest_is_predicted() -> None:
    lengths = Lengths()
    assert lengths.predicted(0, 100, 512, 500) == 12, "nothing is known"
    lengths.answered(0, 100, 40)
    assert lengths.predicted(0, 100, 512, 30) == 10
    assert lengths.predicted(0, 100, 512, 60) == 1, "it is longer than most, and has not ended"


def test_one_stall_makes_the_queue_eight_times_as_long_at_most() -> None:
    costs = Costs(CostConfig(prefill=PrefillCost(0.0, 0.001), is_guess=False))
    costs.measured_slot(1000, 0, 1.0, 3600.0)
    assert costs.slot_s(1, 1.0) == pytest.approx(LIMIT)
    assert costs.held_s(1.0) == pytest.approx(LIMIT)
