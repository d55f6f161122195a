"""What the control plane promises to every request, and to what it holds in the pool."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import asdict

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.life import TRANSITIONS, Stage, Step
from mooncake_lite.control.request import Try
from mooncake_lite.control.requests import PAUSE_S
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


def test_the_branches_of_a_failed_try_wait_as_their_request_would_and_it_counts_for_each() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 40, n=2))
    plane.prefilled(job)
    plane.on(ev.RequestFailed(2, 0, "a", job.attempt, "no page is free"))
    answers = [ev.AnswerSoFar(branch, 1, False, [], []) for branch in (0, 1)]
    told = plane.on(ev.Recalled("a", job.attempt, answers))
    assert not any(isinstance(effect, fx.StartPrefill) for effect in told)
    assert [plane.control.requests[name].tries for name in ("a#0", "a#1")] == [1, 1]
    plane.now += PAUSE_S
    assert only(fx.StartPrefill, plane.on(ev.Tick())).request_id == "a#0"


def test_a_stop_string_in_the_last_token_ends_a_request_though_nobody_says_that_it_was_received() -> None:
    plane = Plane()
    plane.prefilled(only(fx.StartPrefill, plane.arrive("a", 40)))
    plane.on(ev.DecodeLoaded(2, 0, "a", 1))
    plane.control.on(ev.DecodeEnded(2, 0, "a", 1), plane.now)
    assert plane.control.requests.stage_of("a") is Stage.ENDING
    ended = only(fx.Forget, plane.on(ev.RequestCancelled("a", branch=0, answered=True)))
    assert (ended.request_id, ended.outcome) == ("a", "finished")


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


def so_far(keys: list[int], digests: list[int], num_tokens: int = 0) -> ev.AnswerSoFar:
    return ev.AnswerSoFar(0, num_tokens, False, keys, digests)


def test_the_queue_time_of_a_request_counts_what_it_waited_at_an_earlier_conductor() -> None:
    plane = Plane()
    start = only(fx.StartPrefill, plane.arrive("a", 40, answers=[so_far([], [])], waited_s=60.0))
    assert start.queued_s == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (ev.RequestArrived("a", 150, 16, [1], [1]), "keys has 1, its tokens are 2 full blocks"),
        (ev.RequestArrived("a", 150, 16, [1, 2], [1]), "keys has 2, digests has 1"),
        (ev.RequestArrived("a", 150, 16, [], [1, 2]), "keys has 0, digests has 2"),
        (ev.RequestArrived("a", 150, 16, [], [], n=0), "0 answers to a prompt of 150 tokens"),
        (ev.RequestArrived("a", 0, 16, [], []), "1 answers to a prompt of 0 tokens"),
        (ev.RequestArrived("a", 150, 16, [], [], class_id=9), "service class 9 is unknown"),
        (
            ev.RequestArrived("a", 150, 16, [1, 2], [1, 2], answers=[so_far([1, 2], [1, 2], 50)]),
            "keys has 2, its tokens are 3 full blocks",
        ),
    ],
)
def test_a_request_that_no_sound_gateway_sends_is_refused_with_the_reason(
    event: ev.RequestArrived, problem: str
) -> None:
    plane = Plane()
    effects = plane.on(event)
    assert problem in only(fx.Reject, effects).reason
    assert only(fx.Forget, effects).outcome == "rejected"
    only(fx.StartPrefill, plane.arrive("a", 150))


def test_an_answer_so_far_that_no_sound_gateway_sends_fails_its_request() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 150, [1, 2]))
    only(fx.Recall, plane.on(ev.RequestFailed(1, 0, "a", job.attempt, "a cable")))
    effects = plane.on(ev.Recalled("a", job.attempt, [so_far([1, 2], [1, 2], 50)]))
    reason = "its gateway sent a malformed Recalled: keys has 2, its tokens are 3 full blocks"
    assert only(fx.Fail, effects).reason == reason
    only(fx.StartPrefill, plane.arrive("b", 150))


def test_what_a_request_asks_stays_as_it_was_whatever_becomes_of_its_tries() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 150, [1, 2], tenant="t", slo_ttft_s=9.0))
    record = plane.control.requests["a"]
    asked, first = record.asked, record.present
    plane.prefilled(job)
    plane.on(ev.DecodeLoaded(2, 0, "a", 1))
    plane.on(ev.Preempted(2, 0, "a", 1, 200, [1, 2, 3], [1, 2, 3]))
    assert (record.asked, asked.num_tokens, asked.keys) == (asked, 150, [1, 2])
    assert (record.num_tokens, record.keys) == (200, [1, 2, 3])
    assert record.present is not first
    with pytest.raises(AttributeError):
        asked.n = 2  # type: ignore[misc]


@pytest.mark.parametrize("how", ["preempted", "recalled", "undelivered", "does not fit"])
def test_nothing_of_a_try_that_has_ended_is_left_in_the_next_one(how: str) -> None:
    plane = Plane(blocks=8, tier=[1])
    load = only(fx.LoadBlocks, plane.arrive("a", 150, [1, 2]))
    sums = [SUMS] * len(load.refs)
    job = only(fx.StartPrefill, plane.on(ev.BlocksLoaded(3, 0, load.number, [True], sums, 0.1)))
    record = plane.control.requests["a"]
    plane.arrive("b", 8 * BLOCK)  # is next, and the pool is full
    if how == "undelivered":
        plane.on(ev.Undelivered(job, "a cable"))
    elif how == "recalled":
        plane.on(ev.RequestFailed(1, 0, "a", 1, "a cable"))
    else:
        plane.prefilled(job)
        plane.on(ev.DecodeLoaded(2, 0, "a", 1))
    if how == "preempted":
        plane.control.dispatcher.learning = "no request starts yet"
        plane.on(ev.Preempted(2, 0, "a", 1, 200, [1, 2, 3], [1, 2, 3]))
    if how == "does not fit":
        record = plane.control.requests["b"]
        assert record.present.shortage.least_bytes > 0
        assert (record.present.prefill, record.present.decode) == (1, 2)
        expected = Try(
            1, 2, record.present.fetch, record.present.most_blocks, shortage=record.present.shortage
        )
    else:
        expected = Try(grant=record.present.grant)
    assert asdict(record.present) == asdict(expected)
    assert bool(record.present.grant) is (how in ("recalled", "undelivered"))


def test_a_request_with_an_ended_branch_fails_and_is_not_refused_though_its_prompt_was_not_reported() -> None:
    layout, roles = (2, 1, BLOCK, 8, 4, "none"), ["steward", "compute", "compute"]
    control = Control(ControlConfig(layout=layout, roles=roles, nodes=[0] * 3, mode="colocated"))
    for rank in (1, 2):
        control.on(ev.RankJoined(rank, 0, rank, ("prefill", "decode"), 0, slots=4), 0.0)
    control.on(ev.GatewayReady("gateway-0"), 0.0)
    job = only(fx.StartServe, control.on(ev.RequestArrived("a", 150, 16, [], [], n=2), 1.0))
    control.on(ev.AnswerReceived("a", 0), 2.0)
    control.on(ev.DecodeEnded(job.rank, 0, "a", job.attempt, 0, 5), 2.0)
    for rank in (job.rank, 3 - job.rank):  # the first one works on it
        control.on(ev.RankLost(rank, 0, "died"), 3.0)
    control.on(ev.Recalled("a", job.attempt, [ev.AnswerSoFar(1, 0, False)]), 4.0)
    effects = control.on(ev.Tick(), 4.0 + control.config.wait_for_rank_s)
    assert only(fx.Fail, effects).request_id == "a"


def test_a_tail_is_compared_with_the_checksums_that_its_prefill_told() -> None:
    plane = Plane(verify=True)
    job = only(fx.StartPrefill, plane.arrive("a", BLOCK + 9))
    order = only(fx.StartDecode, plane.prefilled(job, tail_checksums=SUMS))
    assert order.tail is not None
    assert order.tail.check == check_of(SUMS)
