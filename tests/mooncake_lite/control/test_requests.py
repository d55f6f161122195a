"""What the control plane promises to every request, and to what it holds in the pool."""

from __future__ import annotations

from math import inf

import pytest

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.life import TRANSITIONS, Stage, Step
from scheduler import Placement, Rejection, Request, State, Wait
from scheduler.classes import ServiceClass
from store.layout import check_of
from tests.mooncake_lite.control.plane import BLOCK, SUMS, Plane, only

pytestmark = pytest.mark.quick


def puts_wanted(*requests: str) -> ev.PutsWanted:
    """Rank 2 has filled blocks 7 and 8, one after the other, for these requests."""
    return ev.PutsWanted(2, 0, 1, [7, 8], [7, 8], [(None, 0), (7, 1)], list(requests))


def test_the_queue_time_of_a_preempted_request_begins_with_its_preemption() -> None:
    plane = Plane()
    first = only(fx.StartPrefill, plane.arrive("a", 150))
    plane.prefilled(first)
    plane.on(ev.DecodeLoaded(2, 0, "a", 1))
    plane.now += 50.0
    again = only(fx.StartPrefill, plane.on(ev.Preempted(2, 0, "a", 1, 200, [], [])))
    assert again.queued_s < 1.0


def test_a_lost_rank_counts_for_the_requests_that_it_works_on_and_for_no_other() -> None:
    plane = Plane(blocks=64)
    stages = {"decoding": Stage.DECODING, "loading": Stage.LOADING, "prefilling": Stage.PREFILLING}
    for name in stages:
        job = only(fx.StartPrefill, plane.arrive(name, 40))
        if name != "prefilling":
            plane.prefilled(job)
        if name == "decoding":
            plane.on(ev.DecodeLoaded(2, 0, name, job.attempt))
    plane.arrive("queued", 40)
    requests = plane.control.requests
    assert {name: requests.stage_of(name) for name in stages} == stages
    assert requests.stage_of("queued") is Stage.QUEUED
    plane.on(ev.RankLost(3, 0, "died"))  # a store rank: it computes nothing
    assert [requests[name].losses for name in (*stages, "queued")] == [0, 0, 0, 0]
    plane.on(ev.RankLost(2, 0, "failed: out of memory"))
    assert [requests[name].losses for name in (*stages, "queued")] == [2, 2, 0, 0]
    plane.on(ev.RankLost(1, 0, "died: connecting failed: no route"))
    assert [requests[name].losses for name in (*stages, "queued")] == [2, 2, 1, 0]


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


def test_a_tail_is_compared_with_the_checksums_that_its_prefill_told() -> None:
    plane = Plane(verify=True)
    job = only(fx.StartPrefill, plane.arrive("a", BLOCK + 9))
    order = only(fx.StartDecode, plane.prefilled(job, tail_checksums=SUMS))
    assert order.tail is not None
    assert order.tail.check == check_of(SUMS)
