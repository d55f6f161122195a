"""Intervals of simulated figures, and what the profile does not cover."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from random import Random
from statistics import stdev
from typing import Any

import pytest

from mooncake_lite.cli import main
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.profiles.file import OverheadsSection, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.intervals import FIGURES, drawn, intervals, student
from mooncake_lite.tools.workload_make import sessions_of
from mooncake_lite.workloads.traces import write_trace

CLUSTER = Cluster(profile=named_profile("LLaMA3-70B-8xA800"), nodes={"prefill": 1, "decode": 1})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 6.314), (2, 2.920), (3, 2.353), (4, 2.132), (7, 1.895), (19, 1.729), (99, 1.660)],
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student(freedom) == pytest.approx(expected, rel=0.006)


def result(value: float) -> dict[str, Any]:
    spread = {"mean": value}
    return {"ttft_s": spread, "tbt_s": spread, "tpot_s": spread, "e2e_s": spread, "goodput_rps": value,
            "hit_rate": {"all": value}}  # fmt: skip


@pytest.mark.quick
def test_nine_of_ten_further_runs_lie_in_the_interval() -> None:
    dice, hits = Random(1), 0
    for _ in range(1000):
        low, high = intervals([result(dice.gauss(10.0, 1.0)) for _ in range(6)])["ttft_s"]
        hits += low <= dice.gauss(10.0, 1.0) <= high
    assert 870 <= hits <= 930


@pytest.mark.quick
def test_a_figure_that_one_run_lacks_has_no_interval() -> None:
    found = intervals([result(1.0), {**result(0.5), "ttft_s": {"mean": None}}])
    assert set(found) == set(FIGURES) - {"ttft_s"}
    assert found["hit_rate"][1] == 1.0


@pytest.mark.quick
def test_machines_differ_from_their_profile_and_the_costs_told_do_not() -> None:
    prompt, step = PassLoad(8_192, 33_558_528), PassLoad(0, 0, 4, 8_192)
    usual = pass_seconds(CLUSTER.profile)
    others = [drawn(CLUSTER, {"decode": 1.0}, seed) for seed in range(60)]
    for load, least, most in ((prompt, 0.02, 0.1), (step, 0.12, 0.3)):
        factors = [pass_seconds(one.machines)(load) / usual(load) for one in others if one.machines]
        deviation = (sum((factor - 1) ** 2 for factor in factors) / len(factors)) ** 0.5
        assert least < deviation < most
    assert {one.costs for one in others} == {CLUSTER.costs}
    assert len({one.overheads for one in others}) == len(others)
    assert CLUSTER.overheads == OverheadsSection()


@pytest.mark.quick
def test_overheads_that_were_guessed_differ_more_than_those_that_were_measured() -> None:
    def deviation(cluster: Cluster) -> float:
        usual = cluster.overheads.step_s
        return stdev(log(drawn(cluster, {}, seed).machines.overheads.step_s / usual) for seed in range(60))

    assert CLUSTER.profile.overheads is None
    measured = CLUSTER.profile.with_section("overheads", OverheadsSection())
    assert deviation(CLUSTER) > 1.2 * deviation(replace(CLUSTER, profile=measured)) > 0.0


@pytest.mark.quick
def test_the_command_gives_intervals_and_says_what_is_not_covered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").write_bytes(write_trace(sessions_of(15, 0.3, seed=2)))
    words = [str(tmp_path / "trace"), "--nodes", "1P1D", "--runs", "4", "--json", str(tmp_path / "out")]
    assert main(["simulate", "cluster", *words]) == 0
    told = capsys.readouterr().out
    assert "90 % of live runs are expected within: ttft_s " in told
    said = "larger than any pass that the profile was measured with: "
    beyond, _, follows = told.partition(said)[2].partition("\n")
    assert beyond.endswith("% of decode passes")
    assert follows.startswith("their times are extrapolated: ")
    assert "--runs 5" in follows
    found = json.loads((tmp_path / "out").read_text())
    low, high = found["intervals"]["tpot_s"]
    assert 0 < low < found["tpot_s"]["mean"] < high
    assert 0 < found["outside_profile"]["decode"] <= 1


@pytest.mark.quick
@pytest.mark.parametrize("fields", [{"step_s": 0.0}, {"message_s": -1.0}, {"request_s": 1e9}])
def test_overheads_are_above_0_and_no_longer_than_a_minute(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="every overhead must be above 0, and at most 60 s"):
        OverheadsSection(**fields)
