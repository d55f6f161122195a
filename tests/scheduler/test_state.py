"""The books of the cluster as sentences."""

from __future__ import annotations

from itertools import pairwise

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
    state.forget("a", 0.0)
    assert len(state.open_prefills())
    assert "a" not in state


def test_held_requests_come_in_their_order_and_a_resumed_one_before_them() -> None:
    state = cluster()
    state.wait_in_line(request("a"), 0.0)
    state.wait_in_line(request("b"), 0.0)
    state.wait_in_line(request("resumed"), 0.0, front=True)
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
    state.forget("a", 0.0)
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
    state.defer("a", 0.0)
    assert state.startable() is None
    assert state.num_waiting == 2
    state.retry("a")
    assert started(state) == ["a"]


def test_a_request_can_be_deferred_without_a_start() -> None:
    state = cluster()
    placed(state, "a")
    state.defer("a", 0.0)
    assert state.startable() is None
    state.retry("a")
    assert state.startable() == "a"


def test_a_deferred_request_does_not_hold_up_other_instances() -> None:
    state = cluster(prefill=2)
    for name in "ab":
        placed(state, name)
    state.defer("a", 0.0)
    assert started(state) == ["b"]


def test_a_cancelled_deferred_head_lets_the_next_request_start() -> None:
    state = cluster()
    for name in "ab":
        placed(state, name)
    state.defer("a", 0.0)
    assert started(state) == []
    state.forget("a", 0.0)
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
        state.wait_in_line(request("a"), 0.0)


def ten_seconds_each(slots: int, names: str) -> s.State:
    """One prefill instance, and queued requests of ten seconds each."""
    state = cluster(prefill=0, slots=1000)
    state.add_instance(1, 0, ["prefill"], slots)
    for name in names:
        placed(state, name, 2000)
    return state


def test_two_starts_of_ten_seconds_in_a_row_make_a_queue_of_ten_seconds_each_time() -> None:
    state = ten_seconds_each(1, "ab")
    state.start("a", 0.0)
    state.end_prefill("a", 10.0)
    state.start("b", 15.0)
    assert state.queue_s(15.0) == pytest.approx([10.0])
    assert state.queue_s(19.0) == pytest.approx([6.0])


def test_two_slots_share_one_machine_so_two_starts_of_ten_seconds_take_twenty() -> None:
    state = ten_seconds_each(2, "ab")
    state.start("a", 0.0)
    state.start("b", 0.0)
    assert state.queue_s(0.0) == pytest.approx([20.0])
    state.end_prefill("a", 10.0)
    assert state.queue_s(10.0) == pytest.approx([10.0]), "b has waited for a"
    state.end_prefill("b", 12.0)
    assert state.queue_s(12.0) == pytest.approx([0.0])


def test_a_start_on_an_instance_that_is_late_adds_to_now() -> None:
    state = ten_seconds_each(2, "ab")
    state.start("a", 0.0)
    state.start("b", 50.0)
    assert state.queue_s(50.0) == pytest.approx([10.0])


def test_a_prefill_that_ends_early_leaves_no_more_work_than_the_others_have() -> None:
    state = ten_seconds_each(3, "abc")
    for name in "abc":
        state.start(name, 0.0)
    state.end_prefill("a", 1.0)
    state.end_prefill("b", 1.0)
    assert state.queue_s(1.0) == pytest.approx([10.0])


def test_a_start_that_is_deferred_at_once_gives_back_what_it_added() -> None:
    """A full pool tries the first deferred request again at every event."""
    state = ten_seconds_each(2, "ab")
    state.start("a", 0.0)
    for event in range(2000):
        state.start("b", event / 1000)
        state.defer("b", event / 1000)
        state.retry("b")
        state.check()
    assert state.queue_s(2.0) == pytest.approx([18.0]), "8 s of a, and b in the queue"


def test_clients_that_cancel_while_their_prompts_overlap_leave_no_work_behind() -> None:
    names = [f"r{number}" for number in range(154)]
    state = ten_seconds_each(2, "")
    placed(state, names[0], 2000)
    state.start(names[0], 0.0)
    for number, (old, new) in enumerate(pairwise(names), 1):
        placed(state, new, 2000)
        state.start(new, float(number))
        state.forget(old, float(number))
        state.check()
    assert state.queue_s(153.0)[0] <= 10.0


def test_a_cancelled_prefill_gives_back_the_seconds_that_it_cannot_have_used() -> None:
    state = ten_seconds_each(2, "ab")
    state.start("a", 0.0)
    state.start("b", 0.0)
    state.forget("a", 2.0)
    assert state.queue_s(2.0) == pytest.approx([10.0]), "the other 18 s, less 8 s of a"


def test_a_lost_prefill_instance_takes_only_the_requests_with_it_that_it_would_compute() -> None:
    state = cluster(prefill=2, slots=4)
    for name in "abc":
        placed(state, name)
    started(state)
    first = next(iter(state.prefills))
    decoding, *_ = state.on_instance(first)
    state.end_prefill(decoding, 0.0)
    for name in state.on_instance(first):
        state.forget(name, 0.0)
    state.note_pages(first, [7, 8], [])
    state.remove_instance(first)
    state.check()
    assert first not in state.prefills
    assert not state.pages.places()
    assert decoding in state
    state.forget(decoding, 1.0)
    state.check()


def test_the_slots_of_a_lost_decode_instance_are_gone() -> None:
    state = cluster(decode=2, slots=3)
    placed(state, "a")
    lost = state.placement_of("a").decode
    assert state.on_instance(lost) == ["a"]
    with pytest.raises(AssertionError, match="need instance"):
        state.remove_instance(lost)
    state.forget("a", 0.0)
    state.remove_instance(lost)
    assert (state.decode_slots, state.num_taken) == (3, 0)
    state.check()
