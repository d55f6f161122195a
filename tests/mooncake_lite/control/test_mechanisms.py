"""What is tried and never works is known, however it fails."""

from __future__ import annotations

from itertools import count

import pytest

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.grants import TRANSFER_S
from mooncake_lite.control.mechanisms import MANY, Mechanisms
from tests.mooncake_lite.control.plane import BLOCK, SUMS, Plane, only

pytestmark = pytest.mark.quick


def load(plane: Plane, key: int, how: str) -> None:
    """Serve a request whose prefix is on SSD. how: what becomes of the load."""
    order = only(fx.LoadBlocks, plane.arrive(f"r{key}", 2 * BLOCK, [key, 1000 + key]))
    assert order.keys == [key]
    if how == "undelivered":
        effects = plane.on(ev.Undelivered(order, "its queue is full"))
    elif how == "unanswered":
        plane.now += TRANSFER_S
        effects = plane.on(ev.Tick())
    else:
        sums, problem = ([SUMS], "") if how == "loaded" else ([[]], "no disk" if how == "no disk" else "")
        effects = plane.on(ev.BlocksLoaded(3, 0, order.number, [how == "loaded"], sums, 0.1, problem))
    job = only(fx.StartPrefill, effects)
    plane.prefilled(job)
    plane.on(ev.DecodeEnded(2, 0, job.request_id, job.attempt))


@pytest.mark.parametrize("how", ["bad", "no disk", "undelivered", "unanswered"])
def test_loads_that_all_fail_are_known_as_broken_until_one_works(how: str) -> None:
    plane, keys = Plane(tier=range(1, 100)), count(1)
    for _ in range(MANY - 1):
        load(plane, next(keys), how)
    assert plane.control.mechanisms.broken == []
    load(plane, next(keys), how)
    assert plane.control.mechanisms.broken == ["ssd_loads"]
    load(plane, next(keys), "loaded")
    assert plane.control.mechanisms.broken == []
    assert plane.control.mechanisms.counts["ssd_loads"] == {"tried": MANY + 1, "failed": MANY}
    whys = {
        "bad": "evicted or damaged",
        "undelivered": "its queue is full",
        "unanswered": "rank 3 did not answer",
    }
    assert whys.get(how, how) in plane.control.mechanisms.reasons["ssd_loads"]


@pytest.mark.parametrize("state", ["bad", "dropped"])
def test_a_save_counts_once_when_its_end_is_known(state: str) -> None:
    plane = Plane()
    order = None
    for number in range(3):
        job = only(fx.StartPrefill, plane.arrive(f"r{number}", BLOCK, [number + 1]))
        order = only(fx.SaveBlocks, plane.prefilled(job))
        plane.on(ev.BlocksSaved(3, 0, order.keys, "written"))
        for _ in range(2):  # a report that comes twice
            plane.on(ev.BlocksSaved(3, 0, order.keys, "durable" if number else state))  # type: ignore[arg-type]
    assert plane.control.mechanisms.counts["ssd_saves"] == {"tried": 3, "failed": 1}
    assert plane.control.mechanisms.reasons == {"ssd_saves": state}


def test_a_save_that_takes_too_long_says_so() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", BLOCK, [1]))
    order = only(fx.SaveBlocks, plane.prefilled(job))
    plane.now += TRANSFER_S
    plane.on(ev.Tick())
    assert plane.control.mechanisms.counts["ssd_saves"] == {"tried": 1, "failed": 1}
    assert plane.control.mechanisms.reasons["ssd_saves"].startswith(f"rank {order.rank} did not answer")


def test_a_prefix_that_is_computed_all_the_same_was_not_loaded() -> None:
    plane = Plane()
    plane.serve("first", 3 * BLOCK, [1, 2, 3])
    for number, computed in enumerate((BLOCK, 3 * BLOCK + 1)):
        job = only(fx.StartPrefill, plane.arrive(f"r{number}", 3 * BLOCK + 1, [1, 2, 3]))
        assert len(job.load) == 3
        plane.prefilled(job, computed_tokens=computed)
    assert plane.control.mechanisms.counts["prefix_loads"] == {"tried": 6, "failed": 3}
    assert "computed all of a prompt" in plane.control.mechanisms.reasons["prefix_loads"]


def test_requests_that_ranks_give_up_are_failures_of_what_the_rank_did() -> None:
    plane = Plane()
    for number in range(2):
        job = only(fx.StartPrefill, plane.arrive(f"p{number}", BLOCK, []))
        plane.on(ev.RequestFailed(1, 0, job.request_id, job.attempt, "no engine", for_good=True))
    job = only(fx.StartPrefill, plane.arrive("d", BLOCK, []))
    order = only(fx.StartDecode, plane.prefilled(job))
    plane.on(ev.RequestFailed(2, 0, "d", order.attempt, "no pages", for_good=True))
    counts = plane.control.mechanisms.counts
    assert counts == {"prefills": {"tried": 3, "failed": 2}, "decodes": {"tried": 1, "failed": 1}}
    assert plane.control.mechanisms.reasons == {"prefills": "no engine", "decodes": "no pages"}


def test_a_rank_that_does_both_gives_up_prompts_and_answers_which_count_apart() -> None:
    config = ControlConfig(
        layout=(2, 1, BLOCK, 8, 4, "none"), roles=["steward", "compute"], nodes=[0, 0], mode="colocated"
    )
    control = Control(config)
    control.on(ev.RankJoined(1, 0, 1, ("prefill", "decode"), 0, slots=4), 0.0)
    control.on(ev.GatewayReady("gateway-0"), 0.0)
    for number in range(3):
        arrived = ev.RequestArrived(f"r{number}", BLOCK, 16, [], [])
        about = 1, 0, f"r{number}", only(fx.StartServe, control.on(arrived, 1.0)).attempt
        if number:
            control.on(ev.PromptComputed(*about, BLOCK, 0.1, 0.0), 2.0)
        control.on(ev.RequestFailed(*about, "no pages", for_good=True), 3.0)
    counts = control.mechanisms.counts
    assert counts == {"prefills": {"tried": 3, "failed": 1}, "decodes": {"tried": 2, "failed": 2}}


def test_prompts_that_ranks_drop_because_their_clients_have_left_have_not_failed() -> None:
    plane = Plane()
    for number in range(MANY):
        job = only(fx.StartPrefill, plane.arrive(f"r{number}", BLOCK, []))
        assert only(fx.CancelOn, plane.on(ev.RequestCancelled(job.request_id))).rank == 1
        plane.on(ev.RequestFailed(1, 0, job.request_id, job.attempt, "cancelled"))
    assert plane.control.mechanisms.broken == []


@pytest.mark.parametrize("how", ["all of it", "its only branch"])
def test_answers_that_ranks_drop_because_their_clients_have_left_have_not_worked(how: str) -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", BLOCK, []))
    about = 2, 0, "a", only(fx.StartDecode, plane.prefilled(job)).attempt
    plane.on(ev.DecodeLoaded(*about))
    plane.on(ev.RequestCancelled("a", -1 if how == "all of it" else 0))
    plane.on(ev.DecodeEnded(*about))
    assert plane.control.open_requests == 0
    assert plane.control.mechanisms.counts.keys() == {"prefills"}


def test_a_dropped_branch_beside_one_that_goes_on_has_not_worked_and_an_answer_that_was_whole_has() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", BLOCK, [], n=2))
    about = 2, 0, "a", only(fx.StartDecode, plane.prefilled(job)).attempt
    plane.on(ev.DecodeLoaded(*about))
    plane.on(ev.RequestCancelled("a", 1))
    plane.on(ev.DecodeEnded(*about, 1))
    assert plane.control.mechanisms.counts.keys() == {"prefills"}
    plane.on(ev.RequestCancelled("a"))
    plane.on(ev.DecodeEnded(*about, 0, 5))  # it was answered before its rank heard of that
    assert plane.control.mechanisms.counts["decodes"] == {"tried": 1, "failed": 0}


def test_what_was_not_tried_is_not_broken() -> None:
    mechanisms = Mechanisms()
    mechanisms.count("copies", 0, 0)
    mechanisms.count("", MANY, MANY)
    assert (mechanisms.counts, mechanisms.broken) == ({}, [])


def test_puts_that_a_rank_could_not_write_or_never_told_of_are_failures() -> None:
    plane = Plane()
    for number, failed in enumerate((0, 1, 2), 1):
        keys = [10 * number, 10 * number + 1]
        wanted = ev.PutsWanted(2, 0, number, keys, keys, [(None, 0), (keys[0], 1)], ["gone", "gone"])
        places = only(fx.GrantPuts, plane.on(wanted)).places
        ids = [place.object_id for place in places if place is not None]
        written, lost = ids[failed:], ids[:failed]
        plane.on(ev.PutsEnded(2, 0, number, written, [SUMS] * len(written), lost))
        assert plane.control.mechanisms.reasons.get("puts") == (
            "rank 2 could not write them" if failed else None
        )
    plane.on(ev.PutsWanted(2, 0, 4, [99], [99], [(None, 0)], ["gone"]))
    plane.now += TRANSFER_S
    plane.on(ev.Tick())
    assert plane.control.mechanisms.counts["puts"] == {"tried": 7, "failed": 4}


@pytest.mark.parametrize("how", ["swapped", "given up"])
def test_a_swap_that_its_rank_gives_up_is_a_failure(how: str) -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 2 * BLOCK, []))
    order = only(fx.StartDecode, plane.prefilled(job))
    about = 2, 0, "a", order.attempt, 2 * BLOCK + 1, list[int](), list[int]()
    plane.on(ev.DecodeLoaded(*about[:4]))
    grant = only(fx.GrantSwap, plane.on(ev.SwapWanted(*about)))
    assert grant.places is not None
    sums = [SUMS] * len(grant.places)
    plane.on(ev.Swapped(*about, checksums=sums) if how == "swapped" else ev.Preempted(*about))
    assert plane.control.mechanisms.counts["swaps"] == {"tried": 1, "failed": int(how != "swapped")}
    assert plane.control.mechanisms.reasons.keys() == ({"swaps"} if how != "swapped" else set())


def test_a_swap_whose_branch_ends_meanwhile_has_neither_worked_nor_failed() -> None:
    plane = Plane()
    job = only(fx.StartPrefill, plane.arrive("a", 2 * BLOCK, [], n=2))
    about = 2, 0, "a", only(fx.StartDecode, plane.prefilled(job)).attempt
    plane.on(ev.DecodeLoaded(*about))
    wanted = ev.SwapWanted(*about, 2 * BLOCK + 1, [], [], 1)
    assert only(fx.GrantSwap, plane.on(wanted)).places is not None
    plane.on(ev.DecodeEnded(*about, 1))
    assert plane.control.mechanisms.counts.keys() == {"prefills", "decodes"}
