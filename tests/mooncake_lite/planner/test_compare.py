"""`plan --compare`: how a rate is found, what is told apart, and relations between ways to serve."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_lite.cli import main
from mooncake_lite.planner import compare, compare_report
from mooncake_lite.planner.compare import (
    LEAST,
    MOST,
    PATIENCE,
    PLAIN,
    POOLED,
    SHARED,
    TUNED,
    WINDOW,
    Contender,
    Question,
    Result,
    contenders,
    highest,
    mixed_bases,
    ranks,
    redrawn,
    tuned,
    without_reuse,
)
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Found, Limit
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.file import Profile, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.rescale import spread
from mooncake_lite.workloads.traces import Trace
from tests.mooncake_lite.workloads.made import made_trace, write

PAPER = named_profile("LLaMA3-70B-8xA800")
BOTH = PassLoad(512, 512 * 513 // 2, 4, 4096)


def with_base(seconds: float) -> Profile:
    """The paper's machines, as if a mixed pass had been measured."""
    compute = PAPER.compute
    fit = msgspec.structs.replace(compute.fit, mixed_base_s=seconds)
    return PAPER.with_section("compute", msgspec.structs.replace(compute, fit=fit))


def cluster(profile: Profile = PAPER) -> Cluster:
    return Cluster(profile=profile, nodes={"prefill": 1, "decode": 1})


@pytest.mark.quick
@pytest.mark.parametrize("begin", [LEAST, -7, 0, 3, MOST - 1])
def test_the_highest_level_is_found_from_anywhere_in_few_runs(begin: int) -> None:
    for limit in range(LEAST - 1, MOST):
        asked: list[int] = []

        def keeps(level: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(level)
            return level <= limit

        assert highest(keeps, begin) == limit
        assert len(asked) <= 2 * (2 + abs(limit - begin)).bit_length() + 2, "a gallop, and then halving"
        assert min(asked) >= LEAST


def result(kept: list[float], failed: list[float]) -> Result:
    return Result("", True, "", "", kept, failed)


@pytest.mark.quick
def test_overlapping_spreads_have_no_order() -> None:
    best, next_best = result([4.0, 4.2], [4.2, 4.4]), result([3.0, 4.0], [3.2, 4.2])
    assert best.goodput_rps > next_best.goodput_rps
    assert not best.is_above(next_best), "one seed keeps 4.0 with either"
    last = result([1.0, 1.1], [1.1, 1.2])
    assert ranks([best, last, next_best]) == [(1, 2), (3, 3), (1, 2)]
    touching = result([1.2, 1.3], [1.3, 1.4])
    assert touching.is_above(last), "all seeds keep 1.2, and none of the other's does"
    assert ranks([touching, last]) == [(1, 1), (2, 2)]


@pytest.mark.quick
def test_requests_without_reuse_are_the_same_ones_with_no_block_in_common() -> None:
    trace = made_trace(60)
    alone = without_reuse(trace)
    for one, other in zip(trace.requests, alone.requests, strict=True):
        assert len(one.hash_ids) == len(other.hash_ids)
        assert msgspec.structs.replace(other, hash_ids=one.hash_ids) == one
    assert max(Counter(block for one in alone.requests for block in one.hash_ids).values()) == 1
    assert jobs_of(alone).cached.sum() == 0 < jobs_of(trace).cached.sum()


@pytest.mark.quick
def test_redrawn_arrivals_keep_order_span_and_bursts() -> None:
    trace = made_trace(100)
    assert redrawn(trace, 0) == trace
    one, other = redrawn(trace, 1), redrawn(trace, 2)
    assert one != other
    for again in (one, other):
        for place in (0, WINDOW, 2 * WINDOW, 99):
            assert again.requests[place].timestamp == trace.requests[place].timestamp
        assert [each.hash_ids for each in again.requests] == [each.hash_ids for each in trace.requests]
        times = [each.timestamp for each in again.requests]
        assert times == sorted(times)


@pytest.mark.quick
def test_both_bases_of_a_mixed_pass_are_played_unless_one_is_measured() -> None:
    bases = mixed_bases(PAPER)
    assert list(bases) == ["97.7 ms", "26.1 ms"]
    longer, shorter = (one.compute.seconds(BOTH) for one in bases.values())
    assert longer == PAPER.compute.seconds(BOTH)
    assert longer - shorter == pytest.approx(0.0976692 - 0.0260903)
    measured = with_base(0.05)
    assert mixed_bases(measured) == {"": measured}


@pytest.mark.quick
def test_the_contenders_have_the_same_machines_and_differ_in_what_they_are_named_for() -> None:
    found = [one for chain in contenders(cluster(), 4) for one in chain]
    assert len(found) == len({(one.system, one.mixed) for one in found}) == 9
    for one in found:
        for each in one.clusters.values():
            assert sum(each.nodes.values()) == 4
            assert each.kv_bytes == cluster().kv_bytes
    by_name = {one.system: one.clusters for one in found}
    assert list(by_name[POOLED]) == list(by_name["split"]) == ["1P3D", "2P2D", "3P1D"]
    default = {"whole prompts, least-loaded", "whole prompts, kvcache-centric"}
    assert by_name[TUNED].keys() > by_name[PLAIN].keys() == default
    assert min(each.batched_tokens for each in by_name[TUNED].values() if each.batched_tokens) == 64
    ways = {name: each["2P2D"] for name, each in by_name.items() if "2P2D" in each}
    assert {name: each.layerwise for name, each in ways.items()} == {
        "split": "off", "split by layers": "on", POOLED: "auto"
    }  # fmt: skip
    lent = {name: {each.node_bytes for each in ways.values()} for name, ways in by_name.items()}
    assert (lent[TUNED], lent[SHARED]) == ({0}, {cluster().node_bytes})


class Known:
    """Clusters that are numbers: the levels that they keep. runs: those of each."""

    def __init__(self) -> None:
        self.runs = Counter[int]()

    def __call__(self, limit: Any) -> Callable[[int], bool]:
        def kept(level: int) -> bool:
            self.runs[limit] += 1
            return bool(level <= limit)

        return kept


def known(*limits: int, patience: int = PATIENCE) -> Contender:
    clusters: Any = {f"{limit}": limit for limit in limits}
    return Contender("", "", clusters, patience)


@pytest.mark.quick
@pytest.mark.parametrize("limits", [[1, 3, 9, 12, 7, 5], [30, 20, 10, -5], [-200, -201, -202, -203, 5, 4]])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_tuning_walks_to_the_best_configuration(limits: list[int], place: int) -> None:
    for level in (-200, -20, 40):
        assert tuned(known(*limits), Known(), (f"{limits[place]}", level)) == (f"{max(limits)}", max(limits))


@pytest.mark.quick
def test_what_is_worse_costs_one_run_and_what_is_beyond_it_none() -> None:
    keeps = Known()
    assert tuned(known(20, 5, 4, 3), keeps, ("20", 19)) == ("20", 20)
    assert (keeps.runs[5], keeps.runs[4], keeps.runs[3]) == (1, 1, 0)
    assert tuned(known(20, 5, 4, 3, 30, patience=9), keeps, ("20", 20)) == ("30", 30)


@pytest.mark.quick
def test_a_cluster_and_a_level_are_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Counter[float]()

    def counting(one: Cluster, trace: Trace, *rest: Any, **words: Any) -> tuple[Found, float]:
        runs[trace.requests[-1].timestamp] += 1
        return Found((1, 1), 1.0, 0.0, (0.0, 0.0), (0.0, 0.0)), 0.0

    monkeypatch.setattr(compare, "simulate", counting)
    keeps, one = Question(spread(made_trace(4), 1), Limit(1.0, 0.9), Limit(1.0, 0.9)).keeps(True), cluster()
    assert not any(keeps(one)(level) for level in (0, 1, 0, 1))
    assert list(runs.values()) == [1, 1]


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["colocated", "pooled"])
def test_a_run_that_is_stopped_is_judged_as_if_it_had_been_played_to_its_end(mode: str) -> None:
    nodes = {"compute": 2} if mode == "colocated" else {"prefill": 1, "decode": 1}
    one, trace = replace(cluster(), mode=mode, nodes=nodes), spread(made_trace(24), 1)
    records, verdicts = play(one, TraceSource(trace), 0).records, Counter[tuple[str, bool]]()
    for ttft, tbt in product((Limit(0.3, 0.9), Limit(9.0, 0.9)), (Limit(0.03, 0.9), Limit(9.0, 0.9))):
        early, even = (
            sum(getattr(each, name) <= limit.seconds for each in records)
            for name, limit in (("ttft_s", ttft), ("tbt_s", tbt))
        )
        kept = min(early, even) >= 0.9 * len(records)
        for judges in (True, False):
            found, _ = simulate(one, trace, ttft, tbt, judges=judges)
            assert found.keeps(ttft, tbt) == kept
            verdicts[found.how, kept] += judges
    assert verdicts["stopped", True] > 0 < verdicts["stopped", False]


@contextmanager
def one_thread(jobs: int, *, mpi: bool) -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def coarse(patch: pytest.MonkeyPatch) -> None:
    """Have rates a few that are tried."""
    for name, value in {"STEP": 1.3, "LEAST": -12, "MOST": 12}.items():
        patch.setattr(compare, name, value)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """All ways to serve on two machines, in coarse steps."""
    patch = pytest.MonkeyPatch()
    coarse(patch)
    patch.setattr(compare, "BUDGETS", (2048, 0))
    patch.setattr(compare_report, "processes", one_thread)
    try:
        limits = Limit(1.5, 0.9), Limit(0.3, 0.9)
        return compare_report.compared(cluster(with_base(0.03)), spread(made_trace(32), 1), *limits, 2, 3, 1)
    finally:
        patch.undo()


def test_reuse_never_lowers_goodput_and_tuning_neither(results: list[Result]) -> None:
    assert len(results) == 12
    by_key = {(one.system, one.reuse): one for one in results}
    gains = 0
    for system in {one.system for one in results}:
        shared, alone = by_key[system, True], by_key[system, False]
        assert shared.goodput_rps >= alone.goodput_rps > 0, system
        gains += shared.is_above(alone)
    assert gains > 0
    for reuse in (True, False):
        assert by_key[TUNED, reuse].goodput_rps >= by_key[PLAIN, reuse].goodput_rps


def test_each_seed_keeps_a_rate_and_not_the_next_one(results: list[Result]) -> None:
    for one in results:
        assert len(one.kept_rps) == len(one.failed_rps) == 3
        assert [high / low for low, high in zip(one.kept_rps, one.failed_rps)] == pytest.approx([1.3] * 3)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", spread(made_trace(24), 1))


SLO = ("--slo-ttft-ms", "1500", "--slo-tbt-ms", "300")


def test_a_comparison_is_a_table_json_and_a_figure(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_report, "processes", one_thread)
    coarse(monkeypatch)
    file = tmp_path / "found.json"
    words = ["--compare", "--nodes", "2", "--json", str(file), "--plot", str(tmp_path)]
    words += ["--system", "pooled", "--system", "split"]
    assert main(["plan", str(trace_file), *SLO, *words]) == 0
    out = capsys.readouterr().out
    for word in ("on 2 nodes", "3 seeds", "with reuse", "without reuse", "1P1D", "pooled", "split"):
        assert word in out
    found = json.loads(file.read_text())["comparison"]
    assert (found["nodes"], len(found["results"])) == (2, 4)
    pooled, split = (one for one in found["results"] if one["reuse"])
    told = (
        pooled["spread_rps"][0] >= split["spread_rps"][1] or split["spread_rps"][0] >= pooled["spread_rps"][1]
    )
    assert ("not distinguishable: pooled and split" in out or "split and pooled" in out) is not told
    assert "with reuse" in (tmp_path / "comparison.svg").read_text()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "4"], "--nodes and --system belong to --compare"),
        (["--system", "pooled"], "--nodes and --system belong to --compare"),
        (["--compare", "--system", "mooncake"], "'--system'"),
        (["--compare", "--nodes", "1"], "'--nodes'"),
        (["--compare", "--seeds", "2"], "'--seeds'"),
    ],
)
def test_a_wrong_option_is_named(
    words: list[str], message: str, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(trace_file), *SLO, *words]) == 2
    told = capsys.readouterr().err
    assert message in told


@pytest.mark.quick
def test_a_long_trace_is_refused_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = write(tmp_path / "long.jsonl", Trace(made_trace(2001).requests))
    assert main(["plan", str(long), *SLO, "--compare", "--nodes", "2"]) == 2
    assert "there are 2,001; add --limit-requests 2000" in capsys.readouterr().err
