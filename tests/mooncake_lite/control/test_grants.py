"""What ranks were ordered to do and never report, report twice, or report as no sound rank does."""

from __future__ import annotations

import pytest

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.grants import WORK_S, Grants
from mooncake_lite.control.life import Stage
from tests.mooncake_lite.control.plane import SUMS, Plane, only

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


def test_a_longer_prediction_gives_work_more_time() -> None:
    plane = measured()
    costs = plane.control.state.costs
    costs.measured_prefill(PREFILL, 4096, 0, 400.0)
    plane.arrive("a", 1500)
    expected = 3 * float(costs.prefill_s(PREFILL, 1500, 0))
    assert expected > WORK_S + 1.0
    assert not any(isinstance(effect, fx.ListOpen) for effect in wait(plane, expected - 0.5))
    only(fx.ListOpen, wait(plane, 0.6))


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


# ------------------------------------------------------------------------------ transfers


def puts_wanted(number: int = 1) -> ev.PutsWanted:
    return ev.PutsWanted(DECODE, 0, number, [7, 8], [7, 8], [(None, 0), (7, 1)], ["gone", "gone"])


def test_all_grants_of_a_dead_rank_are_given_up_at_once_and_nothing_of_it_lands() -> None:
    given_up: list[tuple[int, str, bool]] = []
    grants = Grants(lambda effect: None)
    for rank in (1, 2, 1):
        grants.open(
            rank, None, lambda grant, reason, late, now: given_up.append((grant.number, reason, late)), 0.0
        )
    grants.rank_lost(1, False, 1.0)
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
    "keys has 1, its tokens are 2 full blocks": ev.Swapped(2, 0, "d", 1, 170, [1], [1]),
    "requests has 0": ev.PutsWanted(2, 0, 5, [1], [1], ONE_PLACE, []),
    "object_ids has 1, checksums has 0": ev.PutsEnded(2, 0, 1, [1], []),
    "1 checksums for a block of 2 layers": ev.PutsEnded(2, 0, 1, [1], [[5]]),
    "it names objects that were not granted": ev.PutsEnded(2, 0, 1, [], [], [999]),
    "ok has 1, checksums has 2": ev.BlocksLoaded(3, 0, 1, [True], [SUMS] * 2, 0.1),
    "before has 2": ev.PutsWanted(2, 0, 5, [1], [1], ONE_PLACE * 2, ["a"]),
    "digests has 0": ev.TierIndexed(3, 0, [1], [], True),
}


@pytest.mark.parametrize("problem", MALFORMED)
def test_a_rank_that_reports_what_no_sound_rank_does_is_killed_with_the_reason(problem: str) -> None:
    plane = Plane()
    decoding(plane, "d")
    plane.on(puts_wanted())
    plane.arrive("a", 150)
    event = MALFORMED[problem]
    ended = only(fx.EndRank, plane.on(event))
    assert ended.rank == event.rank
    assert f"sent a malformed {type(event).__name__}: " in ended.reason
    assert problem in ended.reason
    assert not plane.on(event), "it is killed once"


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


def test_a_request_id_that_comes_twice_is_one_request() -> None:
    plane = Plane()
    only(fx.StartPrefill, plane.arrive("a", 150))
    assert plane.arrive("a", 150) == []
    assert plane.control.open_requests == 1
