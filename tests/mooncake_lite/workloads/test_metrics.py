"""The metrics of a run, against numbers worked out by hand."""

from __future__ import annotations

import json

import pytest

from mooncake_lite.workloads.metrics import FAILED, REJECTED, Record, is_within, summary

pytestmark = pytest.mark.quick


def test_the_latencies_of_one_request() -> None:
    one = Record(10.0, (11.0, 11.5, 11.75))
    assert (one.ttft_s, one.e2e_s, one.tpot_s, one.tbt_s) == (1.0, 1.75, 0.375, 0.5)
    assert Record(10.0, (11.0, 11.75), tokens=4).tpot_s == 0.25
    assert (Record(0.0, (1.0,)).tpot_s, Record(0.0, (1.0,)).tbt_s) == (0.0, 0.0)


@pytest.mark.parametrize(("gaps", "tbt_s"), [(10, 10), (11, 10.5), (20, 19.5), (21, 20), (1, 1)])
def test_tbt_is_the_mean_of_the_slowest_tenth_of_the_gaps(gaps: int, tbt_s: float) -> None:
    """Gaps of 1 to n seconds."""
    times = [sum(range(n + 1)) for n in range(gaps + 1)]
    assert Record(0.0, times).tbt_s == tbt_s


def test_a_run_is_summed_up() -> None:
    records = [
        Record(0.0, (1.0, 2.0)),
        Record(1.0, (4.0, 4.5, 5.0)),
        Record(2.0, outcome=REJECTED, cause="HTTP 429"),
        Record(3.0, (3.5,), outcome=FAILED, cause="broke off"),
        Record(6.0, outcome=REJECTED, cause="HTTP 429"),
    ]
    found = summary(records, slo_ttft_s=2.0, slo_tbt_s=1.0)
    assert (found["requests"], found["completed"]) == (5, 2)
    assert (found["rejected"], found["failed"]) == ({"HTTP 429": 2}, {"broke off": 1})
    assert (found["slo_share"], found["span_s"], found["goodput_rps"]) == (0.2, 6.0, 1 / 6)
    assert found["ttft_s"] == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
    assert (found["tpot_s"]["mean"], found["itl_s"]["mean"]) == (0.75, pytest.approx(2 / 3))
    assert (found["e2e_s"]["mean"], found["output_tokens"]) == (3.0, 5)


def test_a_request_is_within_the_limits_up_to_them() -> None:
    one = Record(0.0, (1.0, 1.5))
    assert is_within(one, 1.0, 0.5)
    assert not is_within(one, 0.99, 0.5)
    assert not is_within(one, 1.0, 0.49)
    assert not is_within(Record(0.0, (1.0,), FAILED), 9.0, 9.0)


def test_a_run_without_an_answer_has_no_latencies_and_is_still_json() -> None:
    found = summary([Record(0.0, outcome=REJECTED, cause="x")], 1.0, 1.0)
    assert (found["slo_share"], found["goodput_rps"]) == (0.0, None)
    assert found["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert json.loads(json.dumps(summary([], 1.0, 1.0), allow_nan=False))["slo_share"] is None
