"""What ranks were ordered to do and never report, report twice, or report as no sound rank does."""

from __future__ import annotations

import pytest

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.grants import TRANSFER_S, UNKNOWN_S, WORK_S, Grants
from mooncake_lite.control.life import Stage
from store.quarantine import QUARANTINE_S
from tests.mooncake_lite.control.plane import BLOCK, LAYOUT, SUMS, Plane, only

pytestmark = pytest.mark.quick

PREFILL, DECODE, STORE = 1, 2, 3


def wait(plane: Plane, seconds: float) -> list[fx.Effect]:
    """Let time pass, and the alarm ring."""
    plane.now += seconds
    return plane.on(ev.Tick())


def listed(plane: Plane, asked: fx.ListOpen, *work: tuple[str, int]) -> list[fx.Effect]:
    return plane.on(ev.OpenListed(asked.rank, 0, asked.number, list(work)))


def measured() -> Plane:
    """A plane that knows how long prompts take: not long."""
    plane = Plane()
    plane.control.state.costs.measured_prefill(PREFILL, 4096, 0, 0.1)
    return plane


def decoding(plane: Plane, name: str = "a") -> fx.StartDecode:
    order = only(fx.StartDecode, plane.prefilled(only(fx.StartPrefill, plane.arrive(name, 150))))
    plane.on(ev.DecodeLoaded(DECODE, 0, name, order.attempt))
    return order


# ------------------------------------------------------------------------------ work that is not reported


def test_a_rank_that_reports_nothing_is_asked_and_a_request_that_it_lacks_is_tried_again() -> None:
    plane = measured()
    job = only(fx.StartPrefill, plane.arrive("a", 150))
    assert wait(plane, WORK_S - 1.0) == []
    asked = only(fx.ListOpen, wait(plane, 1.0))
    assert asked.rank == PREFILL
    assert not any(isinstance(effect, fx.Retried) for effect in listed(plane, asked, ("a", job.attempt)))
    asked = only(fx.ListOpen, wait(plane, WORK_S))
    lost = only(fx.Retried, listed(plane, asked, ("b", 1), ("a", job.attempt - 1)))
    assert lost.reason == "rank 1 does not have the request"
    assert plane.bytes_in("quarantined") == 3 * LAYOUT.nbytes, "its last report may have told of late bytes"
    again = only(fx.StartPrefill, wait(plane, 0.6))
    assert (again.request_id, again.attempt) == ("a", 2)
    assert plane.prefilled(job) == [], "the first attempt is over"


def test_a_rank_that_does_not_say_what_it_has_before_the_next_check_is_lost() -> None:
    plane = measured()
    plane.arrive("a", 150)
    only(fx.ListOpen, wait(plane, WORK_S))
    assert wait(plane, WORK_S - 1.0) == []
    stop = only(fx.Stop, wait(plane, 1.0))
    assert (stop.reason, stop.lost) == ("rank 1 (prefill) did not say what it works on", True)


def test_a_question_that_cannot_be_sent_is_asked_again_and_costs_no_rank() -> None:
    plane = measured()
    plane.arrive("a", 150)
    plane.on(ev.Undelivered(only(fx.ListOpen, wait(plane, WORK_S)), "its queue is full"))
    asked = only(fx.ListOpen, wait(plane, WORK_S))
    listed(plane, asked, ("a", 1))
    assert not plane.control.stopped


def test_an_order_that_was_given_after_the_question_is_not_lost_by_its_answer() -> None:
    plane = measured()
    order = decoding(plane)
    asked = only(fx.ListOpen, wait(plane, WORK_S))
    later = only(fx.StartDecode, plane.prefilled(only(fx.StartPrefill, plane.arrive("b", 150))))
    assert later.rank == asked.rank
    listed(plane, asked, ("a", order.attempt))
    assert plane.control.requests.stage_of("b") is Stage.LOADING


def test_an_answer_to_an_earlier_question_changes_nothing() -> None:
    plane = measured()
    plane.arrive("a", 150)
    first = only(fx.ListOpen, wait(plane, WORK_S))
    listed(plane, first, ("a", 1))
    only(fx.ListOpen, wait(plane, WORK_S))
    assert listed(plane, first) == []
    assert plane.control.requests.stage_of("a") is Stage.PREFILLING


def test_a_longer_prediction_gives_work_more_time() -> None:
    plane = measured()
    costs = plane.control.state.costs
    costs.measured_prefill(PREFILL, 4096, 0, 400.0)
    plane.arrive("a", 1500)
    expected = 3 * float(costs.prefill_s(PREFILL, 1500, 0))
    assert expected > WORK_S + 1.0
    assert not any(isinstance(effect, fx.ListOpen) for effect in wait(plane, expected - 0.5))
    only(fx.ListOpen, wait(plane, 0.6))


def test_a_request_that_may_have_sent_tokens_fails_and_is_not_refused() -> None:
    plane = Plane(blocks=4)
    job = only(fx.StartPrefill, plane.arrive("a", 3 * BLOCK))
    plane.on(ev.RequestFailed(PREFILL, 0, "a", job.attempt, "a cable"))
    pinned = only(fx.StartPrefill, plane.arrive("p", 2 * BLOCK, [1, 2]))
    plane.prefilled(pinned, finished=[0])
    plane.on(ev.PoolCommand(1, "pin", keys=[1, 2], hard=True))
    effects = wait(plane, 0.6)
    assert "pool full" in only(fx.Fail, effects).reason
    assert not any(isinstance(effect, fx.Reject) for effect in effects)


def test_before_any_prompt_was_measured_work_has_five_minutes() -> None:
    plane = Plane()
    plane.arrive("a", 150)
    assert wait(plane, UNKNOWN_S - 1.0) == []
    only(fx.ListOpen, wait(plane, 1.0))


def test_a_rank_may_answer_as_late_as_its_longest_work_allows() -> None:
    """It answers between two passes, and that of another request may take long."""
    plane = measured()
    order = decoding(plane)
    plane.control.dispatcher._requests.work(plane.control.requests["a"], DECODE, 100.0, plane.now)
    again = only(fx.StartDecode, plane.prefilled(only(fx.StartPrefill, plane.arrive("b", 150))))
    asked = only(fx.ListOpen, wait(plane, WORK_S))
    assert wait(plane, 2 * WORK_S) == []
    listed(plane, asked, ("a", order.attempt), ("b", again.attempt))
    assert not plane.control.stopped


def test_a_cancel_that_is_lost_comes_again_with_the_next_check() -> None:
    plane = measured()
    order = decoding(plane)
    assert only(fx.CancelOn, plane.on(ev.RequestCancelled("a"))).attempt == order.attempt
    again = listed(plane, only(fx.ListOpen, wait(plane, WORK_S)), ("a", order.attempt))
    assert only(fx.CancelOn, again) == fx.CancelOn(DECODE, "a", order.attempt)
    gone = listed(plane, only(fx.ListOpen, wait(plane, WORK_S)))
    assert only(fx.Forget, gone) == fx.Forget("a", "cancelled")


def test_the_end_of_an_answer_implies_that_its_kv_was_loaded() -> None:
    plane = measured()
    order = only(fx.StartDecode, plane.prefilled(only(fx.StartPrefill, plane.arrive("a", 150))))
    assert only(fx.Forget, plane.on(ev.DecodeEnded(DECODE, 0, "a", order.attempt))).outcome == "finished"
    assert plane.control.directory.stats()["owners"] == 0


def test_a_preemption_implies_that_the_kv_was_loaded() -> None:
    plane = measured()
    order = only(fx.StartDecode, plane.prefilled(only(fx.StartPrefill, plane.arrive("a", 150))))
    effects = plane.on(ev.Preempted(DECODE, 0, "a", order.attempt, 160, [], []))
    assert only(fx.StartPrefill, effects).attempt == 2


# ------------------------------------------------------------------------------ transfers


def puts_wanted(number: int = 1) -> ev.PutsWanted:
    return ev.PutsWanted(DECODE, 0, number, [7, 8], [7, 8], [(None, 0), (7, 1)], ["gone", "gone"])


def test_places_whose_put_is_never_reported_are_free_after_the_last_late_byte() -> None:
    plane = Plane()
    only(fx.GrantPuts, plane.on(puts_wanted()))
    wait(plane, TRANSFER_S)
    assert (plane.bytes_in("writing"), plane.bytes_in("quarantined")) == (0, 2 * LAYOUT.nbytes)
    wait(plane, QUARANTINE_S)
    assert plane.bytes_in("quarantined") == 0
    assert None not in only(fx.GrantPuts, plane.on(puts_wanted(2))).places, "the blocks may be put again"


def test_a_swap_that_cannot_be_granted_ends_by_itself_and_the_request_goes_on() -> None:
    plane = Plane()
    order = decoding(plane)
    about = DECODE, 0, "a", order.attempt
    grant = only(fx.GrantSwap, plane.on(ev.SwapWanted(*about, 160, [], [])))
    plane.on(ev.Undelivered(grant, "its queue is full"))
    assert plane.bytes_in("private") == 0
    assert plane.control.requests.stage_of("a") is Stage.DECODING
    assert only(fx.StartPrefill, plane.on(ev.Preempted(*about, 161, [], []))).request_id == "a"


def test_a_swap_that_is_never_reported_frees_its_places_and_its_late_report_recomputes() -> None:
    plane = measured()
    order = decoding(plane)
    about = DECODE, 0, "a", order.attempt
    only(fx.GrantSwap, plane.on(ev.SwapWanted(*about, 160, [], [])))
    for _ in range(4):
        asked = [effect for effect in wait(plane, WORK_S) if isinstance(effect, fx.ListOpen)]
        for one in asked:
            listed(plane, one, ("a", order.attempt))
    assert plane.bytes_in("quarantined") == 3 * LAYOUT.nbytes
    assert only(fx.StartPrefill, plane.on(ev.Swapped(*about, 161, [], []))).request_id == "a"


def test_a_save_that_is_never_reported_leaves_blocks_that_may_be_evicted() -> None:
    plane = Plane(blocks=4)
    save = only(
        fx.SaveBlocks, plane.prefilled(only(fx.StartPrefill, plane.arrive("a", 2 * BLOCK)), finished=[0])
    )
    plane.on(ev.BlocksSaved(STORE, 0, save.keys[:1], "durable"))
    assert plane.bytes_in("unsaved") == LAYOUT.nbytes
    wait(plane, TRANSFER_S)
    stats = plane.control.directory.stats()
    assert (stats["unsaved_bytes"], stats["saving"]) == (0, 0)


def test_a_removal_that_a_tier_never_answers_ends_and_says_that_blocks_may_come_back() -> None:
    plane = Plane(tier=[1, 2])
    removal = plane.on(ev.PoolCommand(1, "rm", keys=[1, 2]))
    assert only(fx.RemoveBlocks, removal).keys == [1, 2]
    answer = only(fx.AnswerCommand, wait(plane, TRANSFER_S))
    assert answer.ended
    assert "2 of 2 blocks may come back" in answer.problem


def test_all_grants_of_a_dead_rank_are_given_up_at_once_and_nothing_of_it_lands() -> None:
    given_up: list[tuple[int, str, bool]] = []
    grants = Grants(lambda effect: None)
    for rank in (1, 2, 1):
        grants.open(
            rank, None, lambda grant, reason, late, now: given_up.append((grant.number, reason, late)), 0.0
        )
    grants.rank_lost(1, 1.0)
    assert given_up == [(1, "rank 1 is lost", False), (3, "rank 1 is lost", False)]
    assert len(grants) == 1


# ------------------------------------------------------------------------------ twice, and malformed


def test_the_same_report_twice_changes_nothing_the_second_time() -> None:
    plane = Plane()
    told: list[ev.Event] = []

    def twice(event: ev.Event) -> list[fx.Effect]:
        effects = plane.on(event)
        told.append(event)
        for each in told:
            assert plane.on(each) == [], f"{each} after {event}"
        return effects

    arrived = ev.RequestArrived("a", 150, 16, [1, 2], [1, 2])
    job = only(fx.StartPrefill, twice(arrived))
    sums = [SUMS] * len(job.store)
    twice(ev.PrefillEnded(PREFILL, 0, "a", 1, sums, [], 0.0, 0.1, 0.0))
    twice(ev.DecodeLoaded(DECODE, 0, "a", 1))
    grant = only(fx.GrantPuts, twice(puts_wanted()))
    ids = [place.object_id for place in grant.places if place is not None]
    twice(ev.PutsEnded(DECODE, 0, 1, ids, [SUMS] * 2))
    only(fx.GrantSwap, twice(ev.SwapWanted(DECODE, 0, "a", 1, 160, [], [])))
    twice(ev.Preempted(DECODE, 0, "a", 1, 161, [], []))
    twice(ev.RequestFailed(PREFILL, 0, "a", 2, "a cable"))
    told.remove(arrived)  # a client may send the id again when its request has ended
    twice(ev.RequestCancelled("a"))


ONE_PLACE = [(None, 0)]
MALFORMED: dict[str, ev.RankEvent] = {
    "checksums has 1, its order has 2 blocks": ev.PrefillEnded(1, 0, "a", 1, [SUMS], [], 0.0, 0.1, 0.0),
    "3 checksums for a block of 2 layers": ev.PrefillEnded(
        1, 0, "a", 1, [SUMS, [1, 2, 3]], [], 0.0, 0.1, 0.0
    ),
    "keys has 2, digests has 1": ev.Preempted(2, 0, "d", 1, 170, [1, 2], [1]),
    "requests has 0": ev.PutsWanted(2, 0, 5, [1], [1], ONE_PLACE, []),
    "object_ids has 1, checksums has 0": ev.PutsEnded(2, 0, 1, [1], []),
    "1 checksums for a block of 2 layers": ev.PutsEnded(2, 0, 1, [1], [[5]]),
    "it names objects that were not granted": ev.PutsEnded(2, 0, 1, [], [], [999]),
    "ok has 1, checksums has 2": ev.BlocksLoaded(3, 0, 1, [True], [SUMS] * 2, 0.1),
    "before has 2": ev.PutsWanted(2, 0, 5, [1], [1], ONE_PLACE * 2, ["a"]),
    "digests has 0": ev.TierIndexed(3, 0, [1], [], True),
}


@pytest.mark.parametrize("problem", MALFORMED)
def test_a_rank_that_reports_what_no_sound_rank_does_is_lost_with_the_reason(problem: str) -> None:
    plane = Plane()
    decoding(plane, "d")
    plane.on(puts_wanted())
    plane.arrive("a", 150)
    event = MALFORMED[problem]
    stop = only(fx.Stop, plane.on(event))
    assert stop.lost
    assert f"rank {event.rank} (" in stop.reason
    assert f"sent a malformed {type(event).__name__}: " in stop.reason
    assert problem in stop.reason


def test_a_report_about_what_is_over_is_not_held_against_its_order() -> None:
    """Its blocks cannot be counted any more, so only lengths that must agree are compared."""
    plane = Plane()
    assert plane.on(ev.BlocksLoaded(STORE, 0, 77, [True], [SUMS], 0.1)) == []
    assert plane.on(ev.PutsEnded(DECODE, 0, 77, [5], [SUMS])) == []
    assert not plane.control.stopped


def test_a_rank_cannot_end_what_another_one_was_ordered() -> None:
    plane = Plane(tier=[1, 2])
    load = only(fx.LoadBlocks, plane.arrive("a", 150, [1, 2]))
    assert plane.on(ev.BlocksLoaded(DECODE, 0, load.number, [True] * 2, [SUMS] * 2, 0.1)) == []
    assert plane.control.requests.stage_of("a") is Stage.PROMOTING
    only(fx.StartPrefill, plane.on(ev.BlocksLoaded(STORE, 0, load.number, [True] * 2, [SUMS] * 2, 0.1)))


@pytest.mark.parametrize("class_id", [-1, 99])
def test_a_request_of_an_unknown_class_is_refused_alone(class_id: int) -> None:
    plane = Plane()
    effects = plane.arrive("a", 150, class_id=class_id)
    assert only(fx.Reject, effects).reason == f"service class {class_id} is unknown"
    assert only(fx.Forget, effects) == fx.Forget("a", "rejected")
    only(fx.StartPrefill, plane.arrive("b", 150))


def test_a_request_id_that_comes_twice_is_one_request() -> None:
    plane = Plane()
    only(fx.StartPrefill, plane.arrive("a", 150))
    assert plane.arrive("a", 150) == []
    assert plane.control.open_requests == 1
