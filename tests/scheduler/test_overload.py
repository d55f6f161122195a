"""The forms of admission against the paper's section on overload (arXiv 2407.00079, 7; its sentences in our
words), and what is ours beside them.

A block of 16 tokens takes 0.1 s to prefill. A decode step takes 10 ms, and 10 ms for each sequence in it.
"""

from __future__ import annotations

from math import inf

import pytest

import scheduler as s
from scheduler.admission import DEFAULT, NEED_LIMITS, BoundedQueue, Predictive, Shed
from scheduler.costs import DecodeCost, LoadCost, PrefillCost, TransferCost
from scheduler.decode_load import DecodeLoad
from scheduler.placement.choose import other_decode
from tests.scheduler.cluster import BLOCK_TOKENS, choose, started

pytestmark = pytest.mark.quick

PROFILE = s.CostConfig(
    prefill=PrefillCost(0.0, 0.1 / 16), decode=DecodeCost(0.01, 0.01, 0.0),
    transfer=TransferCost(1e12, 0.0), load=LoadCost(1e12, 1e12, 0.0), is_guess=False,
)  # fmt: skip


def cluster(decode: int = 1, slots: int = 8, costs: s.CostConfig = PROFILE, max_queue: int = 64) -> s.State:
    """One prefill instance, numbered 1, and decode instances 11.. on one node."""
    state = s.State(max_queue, s.Costs(costs))
    state.add_instance(1, 0, ["prefill"], 1)
    for number in range(decode):
        state.add_instance(11 + number, 0, ["decode"], slots)
    return state


def request(
    name: str, ttft_s: float = inf, tbt_s: float = inf, n: int = 1, tokens: int = 16, max_tokens: int = 0
) -> s.Request:
    return s.Request(
        name, tokens, (), BLOCK_TOKENS, max_tokens, n=n, slo_ttft_s=ttft_s, slo_tbt_s=tbt_s,
        predicted_tokens=max_tokens,
    )  # fmt: skip


def place(state: s.State, wanted: s.Request, now: float = 0.0) -> s.Placement:
    placement = choose(state, wanted, now)
    assert isinstance(placement, s.Placement)
    state.place(wanted, placement, now)
    return placement


def decoding(state: s.State, name: str, now: float = 0.0, n: int = 1) -> None:
    """Let a request decode from now on."""
    place(state, request(name, n=n), now)
    assert started(state) == [name]
    state.end_prefill(name, now)


def refusal(form: str, state: s.State, wanted: s.Request, now: float = 0.0) -> s.Rejection | None:
    """What a form says on arrival, as the control plane asks it."""
    admission = s.ADMISSIONS[form]()
    if (refused := admission.on_arrival(state, wanted, now)) is not None:
        return refused
    decision = choose(state, wanted, now)
    placement = decision if isinstance(decision, s.Placement) else None
    return admission.on_place(state, wanted, placement, now)


@pytest.mark.parametrize("form", ["early-rejection", "predictive"])
def test_load_is_predicted_ttft_over_its_limit_and_predicted_tbt_over_its_limit(form: str) -> None:
    """Section 7.1: load is SLO satisfaction: predicted TTFT over its limit, predicted TBT over its limit."""
    state = cluster()
    decoding(state, "a")
    assert refusal(form, state, request("b", ttft_s=0.101, tbt_s=0.031)) is None
    over_ttft = refusal(form, state, request("b", ttft_s=0.099, tbt_s=0.031))
    over_tbt = refusal(form, state, request("b", ttft_s=0.101, tbt_s=0.029))
    assert over_ttft is not None
    assert over_ttft.reason == (
        "the predicted time to first token is 100 ms, the limit 99 ms; send it again later"
    )
    assert over_tbt is not None
    assert over_tbt.reason == (
        "the predicted time between tokens is 30 ms, the limit 29 ms; send it again later"
    )


def test_the_baseline_looks_at_decode_load_only_after_prefill_and_a_refusal_then_wastes_the_prefill() -> None:
    """Section 7.2: decode load is looked at only after prefill, and a refusal then wastes the prefill."""
    state, admission = cluster(), s.ADMISSIONS["after-prefill"]()
    decoding(state, "a")
    late, fine = request("b", tbt_s=0.029), request("c", tbt_s=0.041)
    for wanted in (late, fine):
        assert refusal("after-prefill", state, wanted) is None
        place(state, wanted)
        started(state)
        state.end_prefill(wanted.request_id, 0.1)
    refused = admission.on_decode(state, late, 0.1)
    assert refused is not None
    assert "the predicted time between tokens is 40 ms, the limit 29 ms" in refused.reason
    assert admission.on_decode(state, fine, 0.1) is None
    assert [s.ADMISSIONS[name]().withholds for name in s.ADMISSIONS].count(True) == 1


def test_early_rejection_judges_on_arrival_by_both_pools() -> None:
    """Section 7.2: early rejection decides at arrival, by the load of both pools."""
    state = cluster()
    place(state, request("a", tokens=1600))
    assert refusal("early-rejection", state, request("b", ttft_s=5.0)) is not None, "the prefill pool"
    assert refusal("early-rejection", state, request("b", tbt_s=0.01)) is not None, "the decode pool"
    assert refusal("early-rejection", state, request("b", ttft_s=11.0, tbt_s=0.021)) is None


def test_the_decode_load_now_is_not_the_decode_load_when_this_prefill_ends() -> None:
    """Section 7.3: that is the weakness of early rejection: the two pools oscillate out of phase."""
    state = cluster()
    for name in "abc":
        place(state, request(name))
    wanted = request("d", tbt_s=0.035)
    assert refusal("early-rejection", state, wanted) is None, "nothing decodes now"
    assert refusal("predictive", state, wanted) is not None, "three will when its prefill ends"


def test_prediction_adds_every_request_whose_prefill_ends_by_the_end_of_this_one() -> None:
    """Section 7.4: take the moment t when this prefill would end; add those whose prefill ends by t."""
    load = DecodeLoad()
    load.begins("a", 1, 0.0)
    load.expects("b", 2, 0.5)
    load.expects("c", 1, 2.0)
    assert [load.sequences(at, 0.1, 0.03) for at in (0.1, 0.5, 1.9, 2.0)] == [1, 3, 3, 4]


def test_prediction_drops_those_that_will_have_decoded_for_longer_than_t_d() -> None:
    """Section 7.4: drop those that will have decoded for longer than t_d, here 50 tokens of 20 ms."""
    load = DecodeLoad()
    load.answered(50)
    assert load.answer_tokens == 50
    load.begins("b", 2, 2.0)
    load.expects("c", 1, 3.5)
    assert [load.sequences(at, 2.5, 0.02) for at in (2.9, 3.1, 3.6, 4.6)] == [2, 0, 1, 0]
    assert load.sequences(9.5, 9.0, 0.02) == 1, "c is late and has not begun: it will not have ended"
    assert load.sequences(3.1, 2.5, 0.04) == 2, "slower steps end later"
    load.keeps("b", 1)
    load.check(2)


def test_a_sequence_that_should_have_ended_has_a_long_answer_and_decodes_on() -> None:
    load = DecodeLoad()
    load.answered(50)
    load.answered(90)  # 40 more than the mean so far
    (mean, step_s) = (load.answer_tokens or 0.0), 0.1
    load.begins("long", 2, 0.0)
    overdue_s = mean * step_s + 1.0
    assert load.sequences(overdue_s, overdue_s, step_s) == 2
    assert load.sequences(overdue_s + 3.9, overdue_s, step_s) == 2
    assert load.sequences(overdue_s + 4.1, overdue_s, step_s) == 0
    # Seen earlier, they end after the mean.
    assert load.sequences(overdue_s, 0.0, step_s) == 0


def test_the_predicted_time_between_tokens_is_that_at_which_as_many_sequences_decode() -> None:
    """Ours, where the paper's t_d is a constant: answers have 10 tokens, and seven sequences began at 0.02 s.

    With 100 ms between tokens they would still decode at 1 s, and tokens would come every 90 ms. With 90 ms
    they have ended by then.
    """
    state = cluster(slots=16)
    state.decode_load.answered(10)
    decoding(state, "old", now=0.02, n=7)

    def predicted_s(limit_s: float) -> float:
        return Predictive().tbt_s(state, request("b", tbt_s=limit_s), None, 0.97, 0.03)

    assert [predicted_s(limit_s) for limit_s in (0.08, 0.1, 0.2, inf)] == pytest.approx([0.02] * 4)
    decoding(state, "new", now=0.5, n=4)
    assert predicted_s(0.1) == pytest.approx(0.13), "the old ones still decode, because steps are slow"
    assert predicted_s(0.2) == pytest.approx(0.13)
    assert predicted_s(0.08) == pytest.approx(0.13), "they do so however short the limit: steps are slow now"


def test_prediction_rejects_by_the_mean_of_the_decode_instances() -> None:
    """Section 7.4: reject if the mean predicted TBT over its limit exceeds 1."""
    state = cluster(decode=2)
    decoding(state, "a", n=3)
    decoding(state, "b")
    wanted = request("c", tbt_s=0.034)
    assert refusal("predictive", state, wanted) is not None, "(4 + 1) / 2 sequences: 35 ms"
    assert refusal("early-rejection", state, wanted) is None, "the instance that it would get: 30 ms"
    assert refusal("predictive", state, request("c", tbt_s=0.036)) is None


def test_answers_to_one_prompt_are_as_many_sequences() -> None:
    for form in ("early-rejection", "predictive"):
        state = cluster()
        decoding(state, "a", n=2)
        assert refusal(form, state, request("b", tbt_s=0.051, n=2)) is None
        assert refusal(form, state, request("b", tbt_s=0.049, n=2)) is not None


@pytest.mark.parametrize("form", sorted(NEED_LIMITS))
def test_a_guess_refuses_no_request(form: str) -> None:
    state = cluster(costs=s.CostConfig())
    place(state, request("a", tokens=10_000))
    wanted = request("b", ttft_s=1e-6, tbt_s=1e-6)
    assert refusal(form, state, wanted) is None
    state.costs.measured_steps(11, 16, 16, 0, 1.0)
    assert (refusal(form, state, wanted) is None) == (form == "after-prefill"), "steps are measured"
    state.costs.measured_prefill(1, 1000, 0, 5.0)
    assert refusal(form, state, wanted) is not None


@pytest.mark.parametrize("form", sorted(NEED_LIMITS))
def test_every_form_but_none_keeps_the_bound_of_the_queue_and_takes_an_id_once(form: str) -> None:
    state = cluster(max_queue=1)
    place(state, request("a"))
    refused = refusal(form, state, request("b"))
    assert refused is not None
    assert refused.reason == "1 requests are waiting, the limit is 1"
    assert refusal("none", state, request("b")) is None
    assert refusal("none", state, request("a")) is not None


def test_the_default_refuses_by_latency_only_what_has_a_limit() -> None:
    state = cluster()
    for name in "abc":
        place(state, request(name, tokens=16_000))
    assert refusal(DEFAULT, state, request("d")) is None
    assert refusal(DEFAULT, state, request("d", ttft_s=1.0)) is not None
    assert refusal(DEFAULT, state, request("d", tbt_s=1e-3)) is not None


@pytest.mark.parametrize("form", ["early-rejection", "predictive", "shed", "after-prefill"])
def test_the_time_that_a_request_was_held_counts_as_part_of_its_time_to_first_token(form: str) -> None:
    state, admission = cluster(), s.ADMISSIONS[form]()
    wanted = request("a", ttft_s=2.0)
    state.wait_in_line(wanted, 0.0)
    for now, is_refused in ((1.3, False), (1.95, True)):
        found = choose(state, wanted, now)
        assert isinstance(found, s.Placement)
        assert (admission.on_place(state, wanted, found, now) is not None) is is_refused


def test_a_held_request_that_gets_a_place_does_not_wait_for_itself() -> None:
    state = cluster()
    wanted = request("a", tbt_s=0.021)
    state.wait_in_line(wanted, 0.0)
    assert Predictive().on_place(state, wanted, choose(state, wanted, 0.0), 0.0) is None  # type: ignore[arg-type]


def test_retry_after_is_when_the_first_token_would_come_in_time() -> None:
    state = cluster()
    place(state, request("a", tokens=1600))
    refused = refusal("early-rejection", state, request("b", ttft_s=4.0))
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(10.1 - 4.0)


def test_retry_after_is_when_enough_decodes_have_ended() -> None:
    state = cluster()
    state.decode_load.answered(500)
    for name in "abcd":
        decoding(state, name)
    waits_s = {}
    for limit_s in (0.051, 0.041, 0.005):
        refused = refusal("early-rejection", state, request("e", tbt_s=limit_s))
        waits_s[limit_s] = refused.retry_after_s if refused else None
    assert waits_s[0.051] == pytest.approx(30 * 9 / 40), "500 steps of 60 ms, of which 20 ms are its own"
    assert waits_s[0.041] == pytest.approx(30 * 19 / 40)
    assert waits_s[0.005] == pytest.approx(30.0), "alone it would be too slow too: not before all have ended"


def test_without_a_measured_decode_its_length_comes_from_the_predicted_answer() -> None:
    state = cluster()
    decoding(state, "a")
    refused = refusal("early-rejection", state, request("b", tbt_s=0.02, max_tokens=1000))
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(1000 * 0.03)


def test_a_request_without_a_place_waits_for_slots_with_those_before_it() -> None:
    state = cluster(slots=2)
    state.decode_load.answered(100)
    decoding(state, "a")
    decoding(state, "b")
    assert refusal("early-rejection", state, request("c", ttft_s=1.7)) is None, "100 x 30 ms / 2, and its own"
    state.wait_in_line(request("d", n=2), 0.0)
    refused = refusal("early-rejection", state, request("c", ttft_s=1.7))
    assert refused is not None
    assert "is 4.6 s, the limit 1.7 s" in refused.reason


def test_retry_after_of_a_full_line_waits_for_decode_slots_too() -> None:
    state = cluster(slots=1)
    state.max_queue = 4
    state.decode_load.answered(1000)
    decoding(state, "a")
    for name in "bcde":
        state.wait_in_line(request(name), 0.0)
    refused = BoundedQueue().on_arrival(state, request("f"), 0.0)
    assert refused is not None
    assert refused.retry_after_s == 60.0, "five answers of 20 s"


def test_a_prefix_in_the_pool_counts_for_a_request_without_a_place() -> None:
    state = cluster(slots=1)
    state.index.add_holder(21, 0)
    for key in (5, 6):
        state.index.stored(key, 21, "dram")
    decoding(state, "a")
    wanted = s.Request("b", 144, (5, 6), BLOCK_TOKENS, 0, slo_ttft_s=0.2)
    assert refusal("early-rejection", state, wanted) is None, "16 tokens are left to compute"


def test_shedding_refuses_a_share_that_grows_with_the_load_and_the_same_requests_each_time() -> None:
    def refused(limit_s: float) -> set[str]:
        state = cluster()
        place(state, request("a", tokens=144))  # then 1 s to the first token
        found = {f"r{n}": refusal("shed", state, request(f"r{n}", ttft_s=limit_s)) for n in range(200)}
        assert all(one is None or one.retry_after_s == 1.0 for one in found.values())
        return {name for name, one in found.items() if one is not None}

    none, half, everything = refused(1 / 0.69), refused(1 / 0.85), refused(1 / 1.01)
    assert (len(none), len(everything)) == (0, 200)
    assert 70 <= len(half) <= 130
    assert half < everything
    assert refused(1 / 0.85) == half
    assert Shed().tbt_s(cluster(), request("a"), None, 0.0, 0.0) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("limit_s", "slots", "better"),
    [(0.035, 8, (12, 0.02)), (0.045, 8, None), (0.019, 8, None), (inf, 8, None), (0.035, 4, (12, 0.02))],
)
def test_a_request_goes_to_another_decode_instance_where_its_limit_is_kept(
    limit_s: float, slots: int, better: tuple[int, float] | None
) -> None:
    """Section 3: a decode node checks the TBT limit again on arrival and may still refuse.

    Ours moves the request or keeps it. It does not refuse it, because its first token has been sent.
    """
    state = cluster(decode=2, slots=slots)
    decoding(state, "a")
    decoding(state, "gone", n=slots)
    assert state.placement_of("gone").decode == 12
    decoding(state, "b")
    wanted = request("c", tbt_s=limit_s)
    placement = place(state, wanted)
    assert placement.decode == 11
    started(state)
    state.end_prefill("c", 0.0)
    assert other_decode(state, "c") is None, "12 is full, so c stays, and never waits"
    state.forget("gone", 0.0)
    found = other_decode(state, "c")
    assert found == (better and (better[0], pytest.approx(better[1])))
    if found is not None:
        state.move("c", found[0])
        state.check()
        assert other_decode(state, "c") is None


def test_a_request_is_not_moved_by_a_guess() -> None:
    state = cluster(decode=2, costs=s.CostConfig())
    place(state, request("a", tbt_s=1e-6))
    assert other_decode(state, "a") is None


def test_a_request_is_moved_to_an_instance_that_has_exactly_the_slots_that_it_needs() -> None:
    state = cluster(slots=4)
    state.add_instance(12, 0, ["decode"], 2)
    decoding(state, "a", n=2)
    decoding(state, "gone", n=2)
    assert place(state, request("c", tbt_s=0.035, n=2)).decode == 11
    started(state)
    state.end_prefill("c", 0.0)
    state.forget("gone", 0.0)
    assert state.decodes[12].free == 2
    assert other_decode(state, "c") == (12, pytest.approx(0.03))


def test_prediction_counts_no_more_sequences_than_there_are_slots_beside_the_request() -> None:
    state = cluster(slots=4)
    decoding(state, "a", n=3)
    for name in "bcd":
        state.wait_in_line(request(name), 0.0)
    limited = request("e", tbt_s=0.055)
    assert Predictive().tbt_s(state, limited, None, 0.1, 0.0) == pytest.approx(0.05), "4 of 4 slots"
