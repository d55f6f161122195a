"""What the control plane promises to every request, and to what it holds in the pool."""

from __future__ import annotations

from math import inf

import pytest

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.grants import TRANSFER_S
from mooncake_lite.control.life import TRANSITIONS, Stage, Step
from scheduler import Placement, Rejection, Request, State, Wait
from scheduler.classes import ServiceClass
from store.quarantine import QUARANTINE_S
from tests.mooncake_lite.control.plane import BLOCK, LAYOUT, SUMS, Plane, only

pytestmark = pytest.mark.quick


def outcomes(effects: list[fx.Effect]) -> list[tuple[str, str]]:
    return [(effect.request_id, effect.outcome) for effect in effects if isinstance(effect, fx.Forget)]


# ------------------------------------------------------------------------------ failed transfers


def test_space_into_which_late_bytes_may_land_is_used_again_after_two_minutes() -> None:
    plane = Plane(blocks=3)
    job = only(fx.StartPrefill, plane.arrive("a", 150))
    failed = ev.RequestFailed(1, 0, "a", job.attempt, "a cable", may_still_write=True, for_good=True)
    plane.on(failed)
    assert plane.bytes_in("quarantined") == 3 * LAYOUT.nbytes
    assert plane.arrive("b", 150)[-1] != fx.Forget("b", "rejected")  # it waits: the space will be free
    plane.now += QUARANTINE_S - 1.0
    assert not any(isinstance(effect, fx.StartPrefill) for effect in plane.on(ev.Tick()))
    plane.now += 1.0
    assert only(fx.StartPrefill, plane.on(ev.Tick())).request_id == "b"
    assert plane.bytes_in("quarantined") == 0


def test_space_of_a_transfer_that_can_write_nothing_more_is_free_at_once() -> None:
    plane = Plane(blocks=3)
    job = only(fx.StartPrefill, plane.arrive("a", 150))
    plane.on(ev.RequestFailed(1, 0, "a", job.attempt, "refused", may_still_write=False))
    assert plane.bytes_in("quarantined", "writing", "private") == 0


def test_a_request_that_can_never_fit_is_refused_at_once_also_beside_a_quarantine() -> None:
    plane = Plane(blocks=4)
    job = only(fx.StartPrefill, plane.arrive("a", 100))
    plane.on(ev.RequestFailed(1, 0, "a", job.attempt, "a cable", may_still_write=True))
    effects = plane.arrive("b", 6 * BLOCK)
    assert only(fx.Reject, effects).reason.startswith("pool full: ")
    assert outcomes(effects) == [("b", "rejected")]


def test_a_request_that_reuses_a_pinned_prefix_waits_for_the_rest_of_its_space() -> None:
    plane = Plane(blocks=3)
    job = plane.serve("first", 2 * BLOCK, [1, 2])
    plane.on(ev.BlocksSaved(3, 0, [1, 2], "written"))
    plane.on(ev.PoolCommand(1, "pin", keys=[1, 2], hard=True))
    assert len(job.store) == 2
    busy = only(fx.StartPrefill, plane.arrive("busy", 10, []))
    assert plane.arrive("second", 3 * BLOCK, [1, 2, 3])[-1] != fx.Forget("second", "rejected")
    plane.prefilled(busy, finished=[0])
    assert plane.control.requests.stage_of("second") is Stage.PREFILLING


# ------------------------------------------------------------------------------ orders that cannot be sent


@pytest.mark.parametrize("kind", [fx.StartPrefill, fx.StartDecode])
def test_a_request_whose_order_cannot_be_sent_fails_after_three_tries_and_leaves_nothing(kind: type) -> None:
    plane = Plane()
    effects = plane.arrive("a", 150)
    for number in range(1, 4):
        order = only(fx.StartPrefill, effects)
        assert order.attempt == number
        if kind is fx.StartDecode:
            order = only(fx.StartDecode, plane.prefilled(order))  # type: ignore[assignment]
        effects = plane.on(ev.Undelivered(order, "rank 1 cannot be reached"))
        if number < 3:
            assert only(fx.Retried, effects) == fx.Retried("a", number, "rank 1 cannot be reached")
            plane.now += 0.49 * number
            assert plane.on(ev.Tick()) == []
            plane.now += 0.02 * number
            effects = plane.on(ev.Tick())
    assert only(fx.Fail, effects).reason == "rank 1 cannot be reached"
    assert outcomes(effects) == [("a", "failed")]
    assert plane.bytes_in("writing", "private", "quarantined") == 0
    assert plane.control.directory.stats()["owners"] == 0


def test_blocks_whose_load_cannot_be_ordered_are_computed() -> None:
    plane = Plane(tier=[1, 2])
    load = only(fx.LoadBlocks, plane.arrive("a", 150, [1, 2]))
    job = only(fx.StartPrefill, plane.on(ev.Undelivered(load, "rank 3 cannot be reached")))
    assert (job.load, len(job.store)) == ([], 150 // BLOCK)
    assert plane.control.directory.stats()["keys_ssd"] == 2, "the tier has them still"


def test_blocks_whose_save_cannot_be_ordered_may_be_evicted() -> None:
    plane = Plane(blocks=4)
    job = only(fx.StartPrefill, plane.arrive("a", 2 * BLOCK))
    save = only(fx.SaveBlocks, plane.prefilled(job))
    assert plane.bytes_in("unsaved") == 2 * LAYOUT.nbytes
    plane.on(ev.Undelivered(save, "rank 3 cannot be reached"))
    assert plane.bytes_in("unsaved") == 0


def puts_wanted(*requests: str) -> ev.PutsWanted:
    """Rank 2 has filled blocks 7 and 8, one after the other, for these requests."""
    return ev.PutsWanted(2, 0, 1, [7, 8], [7, 8], [(None, 0), (7, 1)], list(requests))


def test_places_that_a_decode_rank_never_hears_of_are_free_again() -> None:
    plane = Plane()
    grant = only(fx.GrantPuts, plane.on(puts_wanted("gone", "gone")))
    assert plane.bytes_in("writing") == 2 * LAYOUT.nbytes
    plane.on(ev.Undelivered(grant, "rank 2 cannot be reached"))
    assert plane.bytes_in("writing") == 0


def test_blocks_of_a_store_rank_that_never_answers_are_computed_and_its_late_bytes_hurt_nobody() -> None:
    plane = Plane(tier=[1, 2])
    load = only(fx.LoadBlocks, plane.arrive("a", 150, [1, 2]))
    plane.now += TRANSFER_S
    assert only(fx.StartPrefill, plane.on(ev.Tick())).load == []
    assert plane.bytes_in("quarantined") == 2 * LAYOUT.nbytes
    assert plane.on(ev.BlocksLoaded(3, 0, load.number, [True] * 2, [SUMS] * 2, 0.1)) == []
    plane.now += QUARANTINE_S
    plane.on(ev.Tick())
    assert plane.bytes_in("quarantined") == 0


# ------------------------------------------------------------------------------ attempts and epochs


def test_an_answer_of_an_earlier_attempt_or_epoch_changes_nothing() -> None:
    plane = Plane()
    first = only(fx.StartPrefill, plane.arrive("a", 150))
    order = only(fx.StartDecode, plane.prefilled(first))
    plane.on(ev.DecodeLoaded(2, 0, "a", 1))
    again = only(fx.StartPrefill, plane.on(ev.Preempted(2, 0, "a", order.attempt, 200, [], [])))
    assert again.attempt == 2
    before = (plane.control.directory.stats(), plane.control.requests.stage_of("a"))
    assert plane.prefilled(first) == []
    assert plane.on(ev.DecodeEnded(2, 0, "a", 1)) == []
    assert plane.on(ev.RequestFailed(1, 1, "a", 2, "of another start of this rank")) == []
    assert (plane.control.directory.stats(), plane.control.requests.stage_of("a")) == before
    assert plane.control.ignored == 3
    assert plane.control.open_requests == 1


def test_the_queue_time_of_a_preempted_request_begins_with_its_preemption() -> None:
    plane = Plane()
    first = only(fx.StartPrefill, plane.arrive("a", 150))
    plane.prefilled(first)
    plane.on(ev.DecodeLoaded(2, 0, "a", 1))
    plane.now += 50.0
    again = only(fx.StartPrefill, plane.on(ev.Preempted(2, 0, "a", 1, 200, [], [])))
    assert again.queued_s < 1.0


# ------------------------------------------------------------------------------ admission


def test_a_request_that_would_wait_longer_than_its_gateway_does_is_refused_at_once() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("measured", 1000, []))
    plane.prefilled(job, compute_s=100.0, computed_tokens=1000, finished=[0])  # 0.1 s per token
    plane.arrive("long", 1500, [])
    effects = plane.arrive("late", 100, [], wait_limit_s=100.0)
    assert "the predicted wait is 150 s, the limit 100 s" in only(fx.Reject, effects).reason
    assert outcomes(effects) == [("late", "rejected")]
    assert outcomes(plane.arrive("patient", 100, [], wait_limit_s=600.0)) == []


def test_a_request_waits_in_line_while_no_decode_slot_is_free() -> None:
    plane = Plane(slots=1)
    job = only(fx.StartPrefill, plane.arrive("a", 100))
    plane.prefilled(job)
    assert plane.arrive("b", 100) == []
    assert plane.control.requests.stage_of("b") is Stage.HELD
    plane.on(ev.DecodeLoaded(2, 0, "a", 1))
    effects = plane.on(ev.DecodeEnded(2, 0, "a", 1))
    assert only(fx.StartPrefill, effects).request_id == "b"


# ------------------------------------------------------------------------------ the end


def test_a_lost_rank_fails_every_open_request_once_and_ends_the_cluster() -> None:
    plane = Plane()
    for name in ("a", "b"):
        plane.arrive(name, 150)
    effects = plane.on(ev.RankLost(2, 0, "died: killed by signal 9"))
    stop = only(fx.Stop, effects)
    assert (stop.reason, stop.lost) == ("rank 2 (decode) died: killed by signal 9", True)
    assert sorted(outcomes(effects)) == [("a", "failed"), ("b", "failed")]
    fails = [effect for effect in effects if isinstance(effect, fx.Fail)]
    assert [fail.reason for fail in fails] == [f"the cluster stops: {stop.reason}"] * 2
    assert plane.on(ev.RankLost(1, 0, "died")) == []


def test_every_stage_but_the_last_can_be_cancelled_and_no_step_leads_out_of_over() -> None:
    for stage in Stage:
        can = (stage, Step.CANCEL) in TRANSITIONS
        assert can is (stage not in (Stage.OVER, Stage.CANCELLED)), stage
        assert stage is not Stage.OVER or not any(before is Stage.OVER for before, _ in TRANSITIONS)


def test_the_picture_in_the_docs_is_drawn_from_the_table() -> None:
    from docs.tools.draw_life import PAGE, drawn

    assert PAGE.read_text() == drawn(PAGE.read_text()), "run docs/tools/draw_life.py"


def test_policies_see_the_class_the_tenant_and_the_limits_of_a_request() -> None:
    classes = [ServiceClass(name="gold", slo_ttft_s=0.5, slo_tbt_s=0.05), ServiceClass(name="batch")]
    plane = Plane(classes=classes)
    seen: list[Request] = []
    choose = plane.control.dispatcher.choose

    def listening(state: State, request: Request, now: float) -> Placement | Wait | Rejection:
        seen.append(request)
        return choose(state, request, now)

    plane.control.dispatcher.choose = listening
    plane.arrive("a", 40, class_id=0, tenant="alice", slo_tbt_s=0.02)
    plane.arrive("b", 40, class_id=1)
    assert [(r.class_id, r.tenant, r.slo_ttft_s, r.slo_tbt_s) for r in seen] == [
        *((0, "alice", 0.5, 0.02), (1, "", inf, inf))
    ]


def test_blocks_that_decode_fills_are_of_the_class_of_their_request() -> None:
    plane = Plane()
    plane.arrive("a", 40, class_id=0)
    wanted = puts_wanted("a", "gone")
    places = [place for place in only(fx.GrantPuts, plane.on(wanted)).places if place is not None]
    plane.on(ev.PutsEnded(2, 0, 1, [place.object_id for place in places], [SUMS, SUMS]))
    lowest = len(plane.control.config.classes) - 1
    assert lowest > 1
    assert [plane.control.directory.find(key).class_id for key in (7, 8)] == [0, lowest]


def test_what_a_request_puts_is_of_its_class_the_tail_too() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 2 * BLOCK + 1, class_id=2))
    assert job.tail is not None
    found = [plane.control.directory.object(ref.object_id) for ref in (*job.store, job.tail)]
    assert [obj.class_id for obj in found] == [2, 2, 2]
