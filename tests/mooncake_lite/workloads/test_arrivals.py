"""Arrivals: the shape of each process, the order of turns, and traces put together."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, stdev

import pytest

from mooncake_lite.errors import ConfigError
from mooncake_lite.workloads.arrivals import ARRIVALS, interleaved, merged, retimed
from mooncake_lite.workloads.traces import Trace, TraceRequest

pytestmark = pytest.mark.quick

TRACE = Trace([TraceRequest(0, 512, 1, [number]) for number in range(4000)])


def arrived_s(process: str, rate: float = 10.0, seed: int = 3) -> list[float]:
    return [one.timestamp / 1e3 for one in retimed(TRACE, process, rate, seed).requests]


@pytest.mark.parametrize("process", ARRIVALS)
def test_arrivals_ascend_within_the_time_that_the_rate_gives(process: str) -> None:
    times = arrived_s(process)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 400
    assert times == arrived_s(process)
    if process != "together":
        assert times[-1] > 380
        assert times != arrived_s(process, seed=4)


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("bursts", 3.0)])
def test_gaps_vary_as_much_as_the_process_says(process: str, cv: float) -> None:
    gaps = [after - before for before, after in pairwise(arrived_s(process))]
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.15)


def test_a_day_has_four_times_the_rate_of_its_night() -> None:
    times = arrived_s("day")
    night = sum(one < 40 or one > 360 for one in times) / 80
    noon = sum(160 < one < 240 for one in times) / 80
    assert noon / night == pytest.approx(1.56 / 0.44, rel=0.15)


def test_a_trace_that_would_take_longer_than_traces_may_is_refused() -> None:
    with pytest.raises(ConfigError, match="4,000 requests at 1e-06 per second"):
        retimed(TRACE, "poisson", 1e-6, 1)


def test_turns_keep_the_order_of_their_session_and_so_many_sessions_are_open() -> None:
    sessions = [[(float(turn + 1), (name, turn)) for turn in range(3)] for name in "abcd"]
    order = list(interleaved((iter(each) for each in sessions), 2))
    assert order[:6] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert sorted(order) == [(name, turn) for name in "abcd" for turn in range(3)]
    assert [turn for name, turn in order if name == "d"] == [0, 1, 2]


def test_merged_traces_share_nothing_with_each_other() -> None:
    one = Trace([TraceRequest(0, 1024, 1, [1, 2]), TraceRequest(9, 1024, 1, [1, 3])])
    other = Trace([TraceRequest(5, 512, 1, [1]), TraceRequest(9, 512, 1, [1])])
    requests = merged([one, other]).requests
    assert [each.timestamp for each in requests] == [0, 5, 9, 9]
    assert [each.hash_ids for each in requests] == [[0, 1], [2], [0, 3], [2]]
