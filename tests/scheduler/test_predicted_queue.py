"""The promises of the queue `predicted`. They are stated and proven in scheduler/queues/predicted.py.

One server with k decode slots, p of them plain. Prefills take no time, and service times are fixed.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import permutations
from math import floor, inf
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as s
from scheduler.plain_alone import Bound
from scheduler.queues.contract import Queue
from scheduler.queues.fcfs import FCFS
from scheduler.queues.predicted import Predicted
from scheduler.trusted_slots import TrustedSlots
from tests.conftest import examples
from tests.scheduler.cluster import NO_TERMS

pytestmark = pytest.mark.quick

QUICK = settings(max_examples=examples(60))
TENTHS = st.integers(1, 400).map(lambda tenths: tenths / 10)


class Job(NamedTuple):
    """A request that needs n slots for so many seconds."""

    arrived_s: float
    work_s: float
    predicted: float = 0.0
    n: int = 1


def starts(queue: Queue, slots: int, jobs: list[Job]) -> list[float]:
    """When each job gets its slots; inf: never."""
    return played(queue, slots, jobs)[0]


def played(queue: Queue, slots: int, jobs: list[Job]) -> tuple[list[float], Bound | None]:
    """When each job gets its slots, and the bound that was computed meanwhile."""
    state = s.State(10**6, queue=queue)
    state.add_instance(1, 0, ["prefill"], len(jobs))
    state.add_instance(2, 0, ["decode"], slots)
    begun = [inf] * len(jobs)
    events: list[tuple[float, int, int]] = []  # time, 0 for an end and 1 for an arrival, number of the job
    for number, job in enumerate(jobs):
        heappush(events, (job.arrived_s, 1, number))
    while events:
        now, is_arrival, number = heappop(events)
        if is_arrival:
            state.wait_in_line(request(number, jobs[number]), now)
        else:
            state.forget(f"{number}", now)
        if events and events[0][0] == now:
            continue
        while (head := state.held.head()) is not None and len(state.open_prefills(head.n)):
            state.place(head, s.Placement(head.request_id, 1, 2, False, 0, NO_TERMS), now)
            begun[int(head.request_id)] = now
            heappush(events, (now + jobs[int(head.request_id)].work_s, 0, int(head.request_id)))
        state.check()
    return begun, state.held.bound(inf)


def request(number: int, job: Job) -> s.Request:
    return s.Request(
        f"{number}", 64, (), 64, 16, n=job.n, arrived_s=job.arrived_s, predicted_tokens=job.predicted
    )


def on_plain_slots_alone(plain: int, jobs: list[Job]) -> list[float]:
    """When each job would begin first come, first served; a wide one takes all plain slots."""
    return starts(FCFS(), plain, [job._replace(n=min(job.n, plain)) for job in jobs])


SOON = st.integers(0, 100).map(lambda tenths: tenths / 10)
JOBS = st.builds(Job, SOON, TENTHS, st.integers(1, 50).map(float), st.integers(1, 6))
ANY = st.lists(JOBS, min_size=8, max_size=25)
TRUST = st.sampled_from([0.25, 0.5, 0.75])


@given(jobs=ANY, slots=st.integers(1, 6), trust=TRUST, lies=st.booleans())
@QUICK
def test_no_request_starts_later_than_first_come_first_served_on_the_plain_slots_alone(
    jobs: list[Job], slots: int, trust: float, lies: bool
) -> None:
    """Lengths are predicted at will, or with `lies` the longest answers are called the shortest."""
    plain = slots - int(trust * slots)
    jobs = [job._replace(n=min(job.n, plain)) for job in jobs]
    if lies:
        jobs = [job._replace(predicted=100.0 - job.work_s) for job in jobs]
    alone = on_plain_slots_alone(plain, jobs)
    for ours_s, theirs_s in zip(starts(Predicted(trust), slots, jobs), alone):
        assert ours_s <= theirs_s + 1e-9


@given(jobs=ANY, slots=st.integers(2, 6), trust=st.sampled_from([0.5, 0.75]), wide=st.booleans())
@QUICK
def test_the_bound_that_is_computed_is_that_of_the_plain_slots_alone(
    jobs: list[Job], slots: int, trust: float, wide: bool
) -> None:
    """With a request that needs trusted slots besides, the bound begins it when it really begins."""
    plain = slots - floor(trust * slots)
    jobs = [job._replace(n=min(job.n, slots if wide else plain)) for job in jobs]
    begun, bound = played(Predicted(trust), slots, jobs)
    arrived_s = sum(job.arrived_s for job in jobs)
    assert bound is not None
    assert (bound.requests, bound.late) == (len(jobs), 0)
    assert bound.waited_s == pytest.approx(sum(begun) - arrived_s)
    assert bound.waited_s <= bound.most_s + 1e-6
    if not wide:
        assert bound.most_s == pytest.approx(sum(on_plain_slots_alone(plain, jobs)) - arrived_s)


def best_sum(slots: int, work_s: list[float]) -> float:
    """The least sum of times from the start to the ends: of all orders, each as early as it can be."""
    best = inf
    for order in permutations(sorted(work_s)):
        free_s, total = [0.0] * slots, 0.0
        for one in order:
            free_s[0] += one
            total += free_s[0]
            free_s.sort()
        best = min(best, total)
    return best


@given(
    work=st.lists(TENTHS, min_size=1, max_size=5),
    predicted=st.lists(TENTHS, min_size=7, max_size=7),
    slots=st.integers(1, 3),
    trust=st.sampled_from([0.34, 0.5, 0.67, 1.0]),
    kind=st.sampled_from(["perfect", "any", "reversed"]),
)
@settings(max_examples=examples(200))
def test_both_promises_hold_against_the_best_of_all_orders(
    work: list[float], predicted: list[float], slots: int, trust: float, kind: str
) -> None:
    """All wait from the start. `make soak` tries 10,000 cases."""
    told = {"perfect": work, "any": predicted, "reversed": [50.0 - one for one in work]}[kind]
    jobs = [Job(0.0, one, y) for one, y in zip(work, told)]
    q = floor(trust * slots)
    ours = sum(starts(Predicted(trust), slots, jobs)) + sum(work)
    if slots > q:
        assert ours <= sum(on_plain_slots_alone(slots - q, jobs)) + sum(work) + 1e-6
    if q:
        factor = slots / q if 2 * q <= slots + 1 else 1 + (slots - 1) / (2 * q)
        error = sum(abs(one - y) for one, y in zip(work, told))
        assert ours <= factor * best_sum(slots, work) + (len(work) - 1) / q * error + 1e-6


def test_with_seven_answers_the_promises_hold_and_something_is_lost() -> None:
    """Two slots, one trusted: a long answer fills the plain slot, and the others share the trusted one."""
    work = [6.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    told = [Job(0.0, one, one) for one in work]
    ratio = (sum(starts(Predicted(0.5), 2, told)) + sum(work)) / best_sum(2, work)
    assert 1.25 < ratio <= 2.0
    lies = [job._replace(predicted=-job.work_s) for job in told]
    alone = on_plain_slots_alone(1, lies)
    assert sum(starts(Predicted(0.5), 2, lies)) <= sum(alone)


@given(jobs=st.lists(JOBS, min_size=4, max_size=12), slots=st.integers(2, 6), trust=TRUST)
@QUICK
def test_a_predictor_that_is_against_one_request_cannot_delay_it_further(
    jobs: list[Job], slots: int, trust: float
) -> None:
    """Each request in turn is called the longest, and all others are called the shortest."""
    plain = slots - int(trust * slots)
    jobs = [job._replace(n=min(job.n, plain), predicted=0.0) for job in jobs]
    alone = on_plain_slots_alone(plain, jobs)
    for victim, job in enumerate(jobs):
        against = [*jobs[:victim], job._replace(predicted=1e9), *jobs[victim + 1 :]]
        assert starts(Predicted(trust), slots, against)[victim] <= alone[victim] + 1e-9


@given(jobs=ANY, slots=st.integers(2, 6), trust=TRUST)
@QUICK
def test_each_request_wider_than_the_plain_slots_adds_at_most_the_longest_service_time(
    jobs: list[Job], slots: int, trust: float
) -> None:
    """Later than the plain slots alone by at most: wide requests up to it in the line, times the longest."""
    plain, longest_s = slots - int(trust * slots), max(job.work_s for job in jobs)
    jobs = sorted((job._replace(n=min(job.n, slots)) for job in jobs), key=lambda job: job.arrived_s)
    alone = on_plain_slots_alone(plain, jobs)
    wide = 0
    for job, ours_s, theirs_s in zip(jobs, starts(Predicted(trust), slots, jobs), alone):
        wide += job.n > plain
        assert ours_s <= theirs_s + wide * longest_s + 1e-9


def test_a_wide_request_that_is_called_the_longest_begins_while_short_ones_keep_coming() -> None:
    """It needs all 4 slots, and 2 are plain. By the lengths alone it would begin when no other comes."""
    short = [Job(0.1 * number, 1.0, predicted=1.0) for number in range(400)]
    wide = Job(2.0, 1.0, predicted=1e9, n=4)
    found = starts(Predicted(0.5), 4, [*short, wide])
    assert found[-1] < 20.0
    assert starts(Predicted(1.0), 4, [*short, wide])[-1] > 90.0


def test_a_short_answer_takes_no_plain_slot_that_the_first_in_the_line_waits_for() -> None:
    """The first needs both plain slots, and one of them is free from 4 s on."""
    jobs = [Job(0.0, 9.0), Job(0.0, 4.0), Job(0.5, 1.0, 50.0, n=2), Job(0.6, 9.0, 1.0), Job(0.7, 9.0, 1.0)]
    assert starts(Predicted(0.34), 3, jobs)[2:] == [9.0, 0.6, 9.6]
    jobs = [Job(0.0, 9.0), Job(0.5, 1.0, 50.0, n=2), Job(0.6, 20.0, 1.0)]
    assert starts(Predicted(0.34), 3, jobs)[1:] == [9.0, 0.6], "it takes the trusted slot"


def test_good_predictions_shorten_the_mean_wait() -> None:
    jobs = [Job(0.0, work_s, work_s) for work_s in (5.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0)]
    assert sum(starts(Predicted(0.5), 2, jobs)) < sum(starts(FCFS(), 2, jobs))


def test_with_full_trust_all_slots_go_by_length_and_without_trust_none() -> None:
    jobs = [Job(0.0, 2.0, 9.0), Job(0.1, 2.0, 8.0), Job(0.2, 2.0, 7.0), Job(0.3, 2.0, 6.0)]
    assert starts(Predicted(1.0), 1, jobs) == [0.0, 6.0, 4.0, 2.0]
    assert starts(Predicted(0.0), 1, jobs) == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("trust", [0.0, 0.3, 0.5, 1.0])
def test_slots_of_both_kinds_stay_within_their_numbers_when_an_instance_is_lost(trust: float) -> None:
    random = Random(int(100 * trust))
    for _ in range(200):
        slots, held = TrustedSlots(trust), {}
        sizes = [random.randint(1, 6) for _ in range(random.randint(2, 4))]
        for size in sizes:
            slots.change(size)
        lost = sizes.pop()
        for number in range(sum(sizes)):
            if random.random() < 0.8:
                slots.take(f"r{number}", 1, is_first=random.random() < 0.5)
                held[f"r{number}"] = 1
        slots.change(-lost)
        slots.check()
        for name in held:
            slots.keep(name, 0)
        slots.check()
        assert slots.has_free(sum(sizes))


def begun(state: s.State, instance: int) -> list[int]:
    """Begin what may begin on one decode instance; the numbers of the jobs."""
    found = []
    while (head := state.held.head()) is not None and len(state.open_prefills(head.n)):
        state.place(head, s.Placement(head.request_id, 1, instance, False, 0, NO_TERMS), 9.0)
        found.append(int(head.request_id))
        state.check()
    return found


@pytest.mark.parametrize(
    ("trust", "expected"), [(0.0, [4, 3, 0, 1]), (0.5, [4, 3, 1, 2]), (1.0, [4, 3, 1, 2])]
)
def test_requests_that_wait_before_there_is_any_slot_begin_as_if_they_had_come_later(
    trust: float, expected: list[int]
) -> None:
    """Gateways have sent them to a new conductor, which has heard of no decode rank yet."""
    state = s.State(10**6, queue=Predicted(trust))
    state.add_instance(1, 0, ["prefill"], 9)
    for number, (predicted, front) in enumerate([(9.0, 0), (5.0, 0), (7.0, 0), (8.0, 1), (6.0, 1)]):
        state.wait_in_line(request(number, Job(0.0, 1.0, predicted)), 0.0, front=bool(front))
    assert begun(state, 2) == []
    state.add_instance(2, 0, ["decode"], 4)
    state.check()
    assert begun(state, 2) == expected


@pytest.mark.parametrize("trust", [0.5, 1.0])
def test_a_request_that_needs_more_slots_than_there_are_waits_for_another_instance(trust: float) -> None:
    state = s.State(10**6, queue=Predicted(trust))
    state.add_instance(1, 0, ["prefill"], 9)
    state.add_instance(2, 0, ["decode"], 2)
    state.wait_in_line(request(0, Job(0.0, 1.0, 5.0, n=3)), 0.0)
    assert begun(state, 2) == []
    state.add_instance(3, 0, ["decode"], 6)
    state.check()
    assert begun(state, 3) == [0]
