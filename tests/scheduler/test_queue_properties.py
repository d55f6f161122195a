"""What queues promise, on one server with the books of the scheduler, for any arrivals.

Each request computes its prompt alone. Seconds are predicted as they are.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import combinations
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as s
from scheduler.costs import CostConfig, Costs, PrefillCost
from scheduler.queues import QUEUES, QueueConfig
from scheduler.queues.contract import Queue
from tests.conftest import examples
from tests.scheduler.cluster import NO_TERMS

pytestmark = pytest.mark.quick

QUICK = settings(max_examples=examples(60))
TOKENS_PER_S = 10
WEIGHTS = (4.0, 2.0, 1.0)


class Job(NamedTuple):
    arrived_s: float
    tokens: int
    class_id: int = 0
    limit_s: float = 1e9

    @property
    def work_s(self) -> float:
        return self.tokens / TOKENS_PER_S


JOBS = st.lists(
    st.builds(
        Job, st.integers(0, 300).map(lambda tenths: tenths / 10), st.integers(1, 200), st.integers(0, 2),
        st.sampled_from([1.0, 20.0, 1e9]),
    ),
    min_size=2,
    max_size=25,
)  # fmt: skip


def begun(queue: Queue, jobs: list[Job], cancels: dict[int, float] | None = None) -> list[float]:
    """When each prefill begins. Every request that came begins once, and the server is never idle in vain.

    cancels   job -> when its client gives up, if it still waits then: such a job begins at inf
    """
    costs = CostConfig(prefill=PrefillCost(0.0, 1 / TOKENS_PER_S), is_guess=False)
    state = s.State(10**6, Costs(costs), queue)
    state.add_instance(1, 0, ["prefill"], 1)
    state.add_instance(2, 0, ["decode"], len(jobs))
    times: dict[int, float] = {}
    gone: set[int] = set()
    events = [(job.arrived_s, 1, number) for number, job in enumerate(jobs)]
    events += [(at, 2, number) for number, at in (cancels or {}).items()]
    events.sort()
    while events:
        now, what, number = heappop(events)
        job, name = jobs[number], f"{number}"
        if what == 2:
            if name in state and number not in times:
                gone.add(number)
                state.forget(name, now)
        elif what == 1:
            wanted = s.Request(
                name, job.tokens, (), 64, 16, job.class_id, arrived_s=now, slo_ttft_s=job.limit_s
            )
            state.place(wanted, s.Placement(name, 1, 2, False, 0, NO_TERMS), now)
        else:
            state.end_prefill(name, now)
        if (first := state.startable()) is not None:
            state.start(first, now)
            assert int(first) not in times
            times[int(first)] = now
            heappush(events, (now + jobs[int(first)].work_s, 0, int(first)))
        state.check()
        assert state.num_running or not state.num_waiting
    assert times.keys() | gone == {*range(len(jobs))}
    return [times.get(number, inf) for number in range(len(jobs))]


@pytest.mark.parametrize("name", QUEUES)
@given(jobs=JOBS)
@settings(max_examples=examples(20))
def test_no_queue_loses_a_request(name: str, jobs: list[Job]) -> None:
    begun(QUEUES[name](QueueConfig(WEIGHTS)), jobs)


@given(jobs=JOBS, ageing=st.sampled_from([0.05, 0.1, 1.0]))
@QUICK
def test_aged_srpt_starves_no_request(jobs: list[Job], ageing: float) -> None:
    """Of those that come more than S / a after a request of S seconds, none begins before it."""
    times = begun(QUEUES["aged-srpt"](QueueConfig(ageing=ageing)), jobs)
    for job, began_s in zip(jobs, times):
        for other, other_s in zip(jobs, times):
            if other.arrived_s > job.arrived_s + job.work_s / ageing:
                assert other_s > began_s


def test_srpt_starves_a_long_request_and_aged_srpt_does_not() -> None:
    """Requests of 1 s keep coming every 0.5 s. Those of the first 18 s pass one of 10 s: (10 - 1) / 0.5."""
    jobs = [Job(0.0, 10), Job(0.0, 100), *(Job(0.5 * number, 10) for number in range(1, 80))]
    waits_s = {name: begun(QUEUES[name](QueueConfig(ageing=0.5)), jobs)[1] for name in ("srpt", "aged-srpt")}
    assert waits_s["srpt"] == pytest.approx(80.0), "no other request is left"
    assert waits_s["aged-srpt"] == pytest.approx(36.0, abs=1.0)


@given(jobs=JOBS)
@QUICK
def test_a_request_with_an_earlier_deadline_never_waits_for_a_later_one(jobs: list[Job]) -> None:
    times = begun(QUEUES["deadline"](QueueConfig()), jobs)
    for (one, one_s), (other, other_s) in combinations(zip(jobs, times), 2):
        if one.arrived_s + one.limit_s < other.arrived_s + other.limit_s and one.arrived_s <= other_s:
            assert one_s <= other_s


@given(jobs=JOBS, cancels=st.dictionaries(st.integers(0, 24), st.integers(0, 600).map(lambda at: at / 10)))
@QUICK
def test_under_fair_the_others_begin_as_if_a_request_cancelled_in_the_line_had_never_come(
    jobs: list[Job], cancels: dict[int, float]
) -> None:
    cancels = {
        number: max(at, jobs[number].arrived_s) for number, at in cancels.items() if number < len(jobs)
    }
    times = begun(QUEUES["fair"](QueueConfig(WEIGHTS)), jobs, cancels)
    served = [number for number, at in enumerate(times) if at < inf]
    alone = begun(QUEUES["fair"](QueueConfig(WEIGHTS)), [jobs[number] for number in served])
    assert [times[number] for number in served] == alone


BURSTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(3, 8), st.integers(1, 40)),
    min_size=2,
    max_size=5,
)
"""When, of which class, how many requests and of how many tokens."""


@given(bursts=BURSTS)
@QUICK
def test_two_classes_that_wait_get_seconds_by_their_weights_at_any_time(
    bursts: list[tuple[int, int, int, int]],
) -> None:
    """|W_f / r_f - W_g / r_g| <= l_f / r_f + l_g / r_g in every interval in which both flows wait.

    P. Goyal, H. Vin and H. Cheng, 1997. W counts the requests that are served within the interval.
    """
    jobs = [Job(at, tokens, class_id) for at, class_id, count, tokens in bursts for _ in range(count)]
    times = begun(QUEUES["fair"](QueueConfig(WEIGHTS)), jobs)
    moments = sorted({*times, *(job.arrived_s for job in jobs)})
    for f, g in combinations(range(3), 2):
        flows = [[(job, at) for job, at in zip(jobs, times) if job.class_id == flow] for flow in (f, g)]
        if not all(flows):
            continue
        bound = sum(max(job.work_s for job, _ in flow) / WEIGHTS[n] for flow, n in zip(flows, (f, g)))
        for begin_s, end_s in combinations(moments, 2):
            inner = [(at, flow) for at in moments if begin_s <= at < end_s for flow in flows]
            if not all(any(job.arrived_s <= at < start for job, start in flow) for at, flow in inner):
                continue
            got = [
                sum(job.work_s for job, at in flow if begin_s <= at and at + job.work_s <= end_s) / WEIGHTS[n]
                for flow, n in zip(flows, (f, g))
            ]
            assert abs(got[0] - got[1]) <= bound + 1e-9
