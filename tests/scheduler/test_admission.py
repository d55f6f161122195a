"""What is refused at arrival, as sentences."""

from __future__ import annotations

import pytest

import scheduler as s
from scheduler.admission import BoundedQueue
from tests.scheduler.cluster import cluster, placed, request, started

pytestmark = pytest.mark.quick

ADMISSION = BoundedQueue()


def test_one_request_more_than_may_wait_is_refused_with_a_time_to_retry() -> None:
    state = cluster(max_queue=2)
    placed(state, "a")
    started(state)
    for name in "bc":
        assert ADMISSION.on_arrival(state, request(name), 0.0) is None
        placed(state, name)
    assert ADMISSION.on_arrival(state, request("d"), 0.0) == s.Rejection(
        "d", "2 requests are waiting, the limit is 2", 9.6
    ), "the rest of a, and those that wait"


def test_held_requests_count_as_waiting() -> None:
    state = cluster(max_queue=1)
    state.wait_in_line(request("a"), 0.0)
    refused = ADMISSION.on_arrival(state, request("b"), 0.0)
    assert refused is not None
    assert "limit is 1" in refused.reason


@pytest.mark.parametrize("where", ["held", "queued", "decoding"])
def test_the_same_request_id_is_not_taken_twice(where: str) -> None:
    state = cluster()
    if where == "held":
        state.wait_in_line(request("a"), 0.0)
    else:
        placed(state, "a")
    if where == "decoding":
        started(state)
        state.end_prefill("a", 0.0)
    assert ADMISSION.on_arrival(state, request("a"), 0.0) == s.Rejection("a", "request id a is in use", 0.0)


def test_retry_after_follows_the_measured_rate_within_its_limits() -> None:
    def retry_after_s(seconds: float) -> float:
        state = cluster(max_queue=1)
        state.costs.measured_prefill(1, 1000, 0, seconds)
        placed(state, "a", 4000)
        refused = ADMISSION.on_arrival(state, request("b", 4000), 0.0)
        assert refused is not None
        return refused.retry_after_s

    assert retry_after_s(10.0) == pytest.approx(40.0)  # 4000 tokens at 10 ms
    assert (retry_after_s(0.1), retry_after_s(1000.0)) == (1.0, 60.0)


def test_retry_after_of_a_full_line_is_when_all_that_waits_has_begun() -> None:
    state = cluster(slots=64, max_queue=40)
    state.costs.measured_prefill(1, 1000, 0, 0.5)
    for number in range(40):
        placed(state, f"r{number}")
    refused = ADMISSION.on_arrival(state, request("one more"), 0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(40 * 0.32)


def test_a_request_that_would_wait_longer_than_its_client_is_refused_at_once() -> None:
    state = cluster(prefill=2)
    state.costs.measured_prefill(1, 1000, 0, 100.0)  # 0.1 s per token
    placed(state, "a", 7000)
    placed(state, "b", 7100)
    for limit_s, admitted in ((701.0, True), (650.0, False), (600.0, False)):
        refused = ADMISSION.on_arrival(state, request("c", wait_limit_s=limit_s), 0.0)
        assert (refused is None) == admitted, limit_s
    assert refused is not None
    assert refused.reason.startswith("the predicted wait is 700 s, the limit 600 s; ")
    assert refused.retry_after_s == 60.0
    assert ADMISSION.on_arrival(state, s.Request("c", 640, (), 64, 16), 0.0) is None, "without a limit"


def test_the_held_line_counts_shared_by_all_prefill_instances_and_without_what_is_cached() -> None:
    state = cluster(prefill=2)
    state.costs.measured_prefill(1, 1000, 0, 100.0)
    state.index.stored(7, 21, "dram")
    state.wait_in_line(request("a", 8000), 0.0)
    state.wait_in_line(request("b", 4064, (7,)), 0.0)
    assert s.predicted_wait_s(state, 0.0) == pytest.approx(600.0)
    state.forget("a", 0.0)
    assert s.predicted_wait_s(state, 0.0) == pytest.approx(200.0)


def test_a_guessed_rate_refuses_no_request() -> None:
    state = cluster()
    placed(state, "a", 10_000_000)
    assert ADMISSION.on_arrival(state, request("b", wait_limit_s=1.0), 0.0) is None
    state.costs.measured_prefill(1, 1000, 0, 5.0)
    assert ADMISSION.on_arrival(state, request("b", wait_limit_s=1.0), 0.0) is not None
