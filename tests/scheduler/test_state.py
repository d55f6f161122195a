"""The books of the cluster as sentences."""

from __future__ import annotations

import pytest

import scheduler as s
from scheduler.prefill_rate import FIRST_GUESS_S_PER_TOKEN
from tests.scheduler.cluster import cluster, placed, request, started

pytestmark = pytest.mark.quick


def test_a_prefill_instance_works_on_as_many_requests_as_it_has_slots_in_order_of_arrival() -> None:
    state = cluster(prefill=0)
    state.add_instance(1, 0, ["prefill"], 2)
    for name in "abc":
        placed(state, name)
    assert started(state) == ["a", "b"]
    state.end_prefill("b")
    assert started(state) == ["c"]
    assert (state.num_waiting, state.num_running) == (0, 3)


def test_a_decode_slot_is_taken_at_placement_and_free_when_the_request_is_forgotten() -> None:
    state = cluster(slots=1)
    placed(state, "a")
    assert not state.has_decode_place
    started(state)
    state.end_prefill("a")
    assert not state.has_decode_place
    state.forget("a")
    assert state.has_decode_place
    assert "a" not in state


def test_held_requests_come_in_their_order_and_a_resumed_one_before_them() -> None:
    state = cluster()
    state.hold(request("a"))
    state.hold(request("b"))
    state.hold(request("resumed"), front=True)
    order = []
    while (head := state.next_held()) is not None:
        order.append(head.request_id)
        state.place(head, s.Placement(head.request_id, 1, 11, 0, s.Terms(0, 640, 0, 640, 0, 4)))
    assert order == ["resumed", "a", "b"]
    assert started(state) == ["resumed"]
    state.check()


def test_a_resumed_request_is_queued_before_those_that_wait() -> None:
    state = cluster()
    for name in "abc":
        placed(state, name)
    started(state)
    state.end_prefill("a")
    state.forget("a")
    again = request("a", 700)
    choice = s.LeastTokens().choose(state, again, 0.0)
    assert isinstance(choice, s.Placement)
    state.place(again, choice, front=True)
    assert started(state) == ["a"]


def test_a_deferred_request_keeps_its_place_at_the_head_and_is_not_tried_before_capacity_frees() -> None:
    state = cluster()
    for name in "ab":
        placed(state, name)
    state.start("a")
    state.defer("a")
    assert state.startable() is None
    assert state.num_waiting == 2
    state.retry()
    assert started(state) == ["a"]


def test_a_request_can_be_deferred_without_a_start() -> None:
    state = cluster()
    placed(state, "a")
    state.defer("a")
    assert state.startable() is None
    state.retry()
    assert state.startable() == "a"


def test_a_deferred_request_does_not_hold_up_other_instances() -> None:
    state = cluster(prefill=2)
    for name in "ab":
        placed(state, name)
    state.defer("a")
    assert started(state) == ["b"]


def test_a_cancelled_deferred_head_lets_the_next_request_start() -> None:
    state = cluster()
    for name in "ab":
        placed(state, name)
    state.defer("a")
    state.forget("a")
    assert started(state) == ["b"]


def test_an_instance_of_both_duties_can_have_other_slots_for_each() -> None:
    state = cluster(prefill=0, decode=0)
    state.add_instance(1, 0, ["prefill"], 1)
    state.add_instance(1, 0, ["decode"], 3)
    assert [placed(state, name).decode for name in "abc"] == [1, 1, 1]
    assert started(state) == ["a"]
    state.add_instance(2, 0, {"prefill", "decode"}, 2)
    assert (placed(state, "d").prefill, placed(state, "e").decode) == (2, 2)
    state.check()


def test_a_request_id_cannot_be_placed_or_held_twice() -> None:
    state = cluster()
    placement = placed(state, "a")
    with pytest.raises(AssertionError):
        state.place(request("a"), placement)
    with pytest.raises(AssertionError):
        state.hold(request("a"))


def test_full_hits_do_not_change_the_measured_rate() -> None:
    state = cluster()
    state.measured_prefill(1000, 1.0)
    for _ in range(1000):
        state.measured_prefill(1, 0.05)
    assert state.prefill_s_per_token == pytest.approx(0.001)


def test_a_measurement_of_few_tokens_has_little_weight() -> None:
    state = cluster()
    state.measured_prefill(32, 3.2)
    assert state.prefill_s_per_token == pytest.approx(0.1), "the only measurement there is"
    state.measured_prefill(1000, 1.0)
    assert state.prefill_s_per_token < 0.02


def test_eight_measurements_of_32_tokens_weigh_about_as_much_as_one_of_256() -> None:
    rates = []
    for times, tokens in ((8, 32), (1, 256)):
        state = cluster()
        for _ in range(60):
            state.measured_prefill(1000, 1.0)
        for _ in range(times):
            state.measured_prefill(tokens, tokens * 0.003)
        rates.append(state.prefill_s_per_token)
    assert rates[0] == pytest.approx(rates[1], rel=0.03)


def test_the_rate_follows_a_change_by_a_fifth_per_measurement() -> None:
    state = cluster()
    for _ in range(60):
        state.measured_prefill(1000, 1.0)
    state.measured_prefill(1000, 2.0)
    assert state.prefill_s_per_token == pytest.approx(0.0012)


def test_no_tokens_or_no_time_are_no_measurement() -> None:
    state = cluster()
    state.measured_prefill(0, 1.0)
    state.measured_prefill(1000, 0.0)
    assert not state.knows_prefill_rate
    assert state.prefill_s_per_token == FIRST_GUESS_S_PER_TOKEN
