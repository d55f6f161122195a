"""The books of the cluster as sentences."""

from __future__ import annotations

import pytest

import scheduler as s
from tests.scheduler.cluster import NO_TERMS, choose, cluster, placed, request, started

pytestmark = pytest.mark.quick


def test_a_prefill_instance_works_on_as_many_requests_as_it_has_slots_in_order_of_arrival() -> None:
    state = cluster(prefill=0)
    state.add_instance(1, 0, ["prefill"], 2)
    for name in "abc":
        placed(state, name)
    assert started(state) == ["a", "b"]
    state.end_prefill("b", 0.0)
    assert started(state) == ["c"]
    assert (state.num_waiting, state.num_running) == (0, 3)


def test_a_decode_slot_is_taken_at_placement_and_free_when_the_request_is_forgotten() -> None:
    state = cluster(slots=1)
    placed(state, "a")
    assert not len(state.open_prefills())
    started(state)
    state.end_prefill("a", 0.0)
    assert not len(state.open_prefills())
    state.forget("a")
    assert len(state.open_prefills())
    assert "a" not in state


def test_held_requests_come_in_their_order_and_a_resumed_one_before_them() -> None:
    state = cluster()
    state.hold(request("a"), 0.0)
    state.hold(request("b"), 0.0)
    state.hold(request("resumed"), 0.0, front=True)
    order = []
    while (head := state.held.head()) is not None:
        order.append(head.request_id)
        state.place(head, s.Placement(head.request_id, 1, 11, False, 0, NO_TERMS), 0.0)
    assert order == ["resumed", "a", "b"]
    assert started(state) == ["resumed"]
    state.check()


def test_a_resumed_request_is_queued_before_those_that_wait() -> None:
    state = cluster()
    for name in "abc":
        placed(state, name)
    started(state)
    state.end_prefill("a", 0.0)
    state.forget("a")
    again = request("a", 700)
    choice = choose(state, again, 0.0)
    assert isinstance(choice, s.Placement)
    state.place(again, choice, 0.0, front=True)
    assert started(state) == ["a"]


def test_a_deferred_request_keeps_its_place_at_the_head_and_is_not_tried_before_capacity_frees() -> None:
    state = cluster()
    for name in "ab":
        placed(state, name)
    state.start("a", 0.0)
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
        state.place(request("a"), placement, 0.0)
    with pytest.raises(AssertionError):
        state.hold(request("a"), 0.0)
