"""Lower bounds on TTFT: against all schedules of tiny instances, against each other, and what serves."""

from __future__ import annotations

import json
from itertools import combinations, permutations, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mooncake_lite.cli import main
from mooncake_lite.planner.bounds import (
    bounds_of,
    central_queue_s,
    fewest_late,
    interval_load_s,
    shortest_remaining_s,
)
from mooncake_lite.planner.jobs import Jobs
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.workloads.metrics import PERCENTILES, spread_of
from tests.mooncake_lite.workloads.made import made_trace, write

pytestmark = pytest.mark.quick

NAMES = ("mean", "p50", "p90", "p99")
ROUNDING = 1e-9


def seconds(load: PassLoad) -> float:
    return load.new_tokens / 1000


def jobs(arrived_s: list[float], service_s: list[float]) -> Jobs:
    tokens = np.array([round(1000 * one) for one in service_s])
    return Jobs(np.array(arrived_s), tokens, np.zeros_like(tokens), np.ones_like(tokens))


def drawn(dice: Random, count: int, span_s: float) -> tuple[list[float], list[float]]:
    """Arrivals within a span, some at once, and times of very different lengths."""
    arrived_s = sorted(round(span_s * dice.random(), dice.choice([0, 3])) for _ in range(count))
    return arrived_s, [round(dice.choice([0.2, 1, 5]) * dice.uniform(0.5, 1.5), 3) for _ in range(count)]


def of_all_schedules(arrived_s: list[float], service_s: list[float], nodes: int) -> dict[str, float]:
    """The least mean and percentiles of any schedule that lets each request run through on one node.

    For each order and each assignment, each request begins as early as it can: a schedule that lets a node
    idle is never better in any of these figures.
    """
    best = dict.fromkeys(NAMES, np.inf)
    for order in permutations(range(len(arrived_s))):
        for places in product(range(nodes), repeat=len(order)):
            free_s, took_s = [0.0] * nodes, list[float]()
            for number, place in zip(order, places):
                free_s[place] = max(free_s[place], arrived_s[number]) + service_s[number]
                took_s.append(free_s[place] - arrived_s[number])
            best = {name: min(best[name], value) for name, value in _figures(took_s).items()}
    return best


def _figures(took_s: list[float]) -> dict[str, float]:
    """What spread_of gives, in a tenth of the time."""
    ranked, found = sorted(took_s), {"mean": sum(took_s) / len(took_s)}
    for percent in PERCENTILES:
        whole, part = divmod((len(ranked) - 1) * percent, 100)
        found[f"p{percent}"] = ranked[whole] + part / 100 * (
            ranked[min(whole + 1, len(ranked) - 1)] - ranked[whole]
        )
    return found


def test_the_figures_of_a_schedule_are_those_of_a_result() -> None:
    for count in (1, 2, 7, 11):
        took_s = [1.7**number for number in range(count)]
        assert _figures(took_s) == pytest.approx(spread_of(took_s))


def test_no_schedule_beats_a_bound() -> None:
    """Of all schedules of 40 tiny instances. Loads bound some of them, mean and percentiles both."""
    above = dict.fromkeys(NAMES, 0)
    for seed in range(40):
        dice = Random(seed)
        arrived_s, service_s = drawn(dice, dice.choice([4, 5]), dice.choice([0.0, 2.0, 6.0]))
        found = bounds_of(jobs(arrived_s, service_s), 2, seconds)
        best = of_all_schedules(arrived_s, service_s, 2)
        for name in NAMES:
            assert found.own[name] <= found.least[name] <= best[name] + ROUNDING, (seed, name)
            above[name] += found.least[name] > found.own[name] + ROUNDING
    assert min(above["mean"], above["p50"]) > 0, above


def test_on_one_node_loads_bound_all_figures() -> None:
    above = dict.fromkeys(NAMES, 0)
    for seed in range(30):
        dice = Random(seed)
        arrived_s, service_s = drawn(dice, dice.choice([4, 5, 6]), dice.choice([0.0, 2.0, 6.0]))
        found, best = (
            bounds_of(jobs(arrived_s, service_s), 1, seconds),
            of_all_schedules(arrived_s, service_s, 1),
        )
        for name in NAMES:
            assert found.least[name] <= best[name] + ROUNDING, (seed, name)
            above[name] += found.least[name] > found.own[name] + ROUNDING
    assert min(above.values()) > 5, above


def test_as_few_are_late_as_in_the_best_choice_of_those_in_time() -> None:
    """One machine, as fast as one or two nodes, does those in time in the order of their arrival."""

    def fit(chosen: tuple[int, ...], within_s: float) -> bool:
        end_s = 0.0
        for number in chosen:
            end_s = max(end_s, arrived_s[number]) + service_s[number] / nodes
            if max(end_s - arrived_s[number], service_s[number]) > within_s + ROUNDING:
                return False
        return True

    for seed in range(150):
        dice = Random(seed)
        nodes, within_s = dice.choice([1, 2]), dice.choice([0.7, 2.0, 4.0]) + 0.000_123
        arrived_s, service_s = drawn(dice, 8, dice.choice([0.0, 3.0, 9.0]))
        if seed % 2:  # of about one length, when it matters most which one leaves
            service_s = [round(dice.uniform(0.3, 0.9) * within_s, 3) for _ in service_s]
        most = max(
            count
            for count in range(9)
            if any(fit(chosen, within_s) for chosen in combinations(range(8), count))
        )
        assert fewest_late(arrived_s, service_s, nodes, within_s) == 8 - most, seed


def test_the_shortest_remaining_time_first_by_hand() -> None:
    """The second one comes after 1 s and takes 1 s; the first one then has 3 s left, and ends at 5 s."""
    assert shortest_remaining_s([0, 1], [4, 1]) == (5 + 1) / 2
    assert shortest_remaining_s([0, 0, 9], [2, 1, 1]) == (3 + 1 + 1) / 3
    assert shortest_remaining_s([0, 3], [4, 2]) == (4 + 3) / 2, (
        "two seconds are more than the one that is left"
    )


def test_a_burst_bounds_the_percentile_without_the_requests_that_may_be_late_by_hand() -> None:
    """Ten of 2 s at once on two nodes: nine in time take 9 s together."""
    assert interval_load_s([0] * 10, [2] * 10, 2, 90) == pytest.approx(9, rel=1e-3)
    assert interval_load_s([0] * 10, [2] * 10, 2, 50) == pytest.approx(5, rel=1e-3)
    assert interval_load_s([0] * 10, [2] * 9 + [50], 2, 90) == pytest.approx(9, rel=1e-3), (
        "the large one may be late"
    )
    assert interval_load_s(list(range(10)), [2] * 10, 2, 90) == 2, "alone"


@pytest.mark.parametrize("seed", range(6))
def test_a_bound_never_falls_with_speed_or_fewer_nodes_and_sums_never_with_more_jobs(seed: int) -> None:
    dice = Random(seed)
    arrived_s, service_s = drawn(dice, 120, 100.0)
    base = bounds_of(jobs(arrived_s, service_s), 4, seconds, 0.01)
    faster = bounds_of(jobs([one / 2 for one in arrived_s], service_s), 4, seconds, 0.01)
    fewer = bounds_of(jobs(arrived_s, service_s), 3, seconds, 0.01)
    within = 1 - 2e-4  # percentiles have this precision
    for name in NAMES:
        assert base.least[name] * within <= min(faster.least[name], fewer.least[name])
        assert base.least[name] <= min(base.central[name], base.shortest[name]) + ROUNDING
    assert fewer.load == pytest.approx(base.load * 4 / 3)
    place = dice.randrange(120)
    more = [[*these[:place], these[place], *these[place:]] for these in (arrived_s, service_s)]
    grown = bounds_of(jobs(*more), 4, seconds, 0.01)
    assert grown.least["mean"] * 121 >= base.least["mean"] * 120
    for within_s in (0.5, 2.0, 8.0):
        assert fewest_late(*more, 1, within_s) >= fewest_late(arrived_s, service_s, 1, within_s)


def test_a_central_queue_by_hand() -> None:
    arrived_s, service_s = [0, 0, 1, 1, 9, 9], [3, 2, 5, 1, 1, 1]
    assert central_queue_s(arrived_s, service_s, 2, arrived_s) == [3, 2, 6, 3, 1, 1]
    assert central_queue_s(arrived_s, service_s, 2, service_s) == [3, 2, 7, 2, 1, 1]


def test_overheads_are_in_all_figures_and_requests_at_once_have_no_load() -> None:
    these = jobs([0, 0], [1, 1])
    plain, late = bounds_of(these, 1, seconds), bounds_of(these, 1, seconds, 0.5)
    assert plain.load == np.inf
    for kind in ("own", "least", "central", "shortest"):
        assert getattr(late, kind) == pytest.approx(
            {name: value + 0.5 for name, value in getattr(plain, kind).items()}
        )


def shown(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "bounds.json"
    trace = write(tmp_path / "trace.jsonl", made_trace(80))
    assert main(["workload", "bounds", str(trace), "--json", str(file), *words]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize(("nodes", "speed"), [("4", "1"), ("2", "8")])
def test_a_simulated_cluster_is_above_the_bounds(
    nodes: str, speed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(tmp_path, "--nodes", nodes, "--speed", speed, "--simulate")
    assert (found["requests"], found["nodes"], found["config"]["speed"]) == (80, int(nodes), float(speed))
    for name in NAMES:
        assert found["own"][name] <= found["least"][name] <= found["simulated"][name]
    ratio = found["simulated"]["mean"] / found["least"]["mean"]
    assert f"{found['simulated']['mean']:.3f} ({ratio:.2f})" in capsys.readouterr().out


def test_where_loads_bound_nothing_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "No bound is above the time alone"
    found = shown(tmp_path, "--nodes", "8")
    assert said in capsys.readouterr().out
    assert found["least"] == found["own"]
    assert "simulated" not in found
    shown(tmp_path, "--nodes", "1", "--speed", "1000")
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file or directory"),
        (["nowhere", "--nodes", "0"], "'--nodes'"),
        (["nowhere", "--profile", "none"], "profile='none'"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", "bounds", *words]) == 2
    assert message in capsys.readouterr().err
