"""The search, the simulations around its answer, and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_lite.cli import main
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner.answer import ASSUMED, least_dram, wanted
from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Found, Limit, Nodes
from mooncake_lite.planner.prices import Prices, cost_of, read_prices
from mooncake_lite.planner.search import Search, with_nodes
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.planner.warnings import warnings_of
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import sped
from mooncake_lite.workloads.traces import Trace, read_trace
from tests.mooncake_lite.simulator.test_sweep import is_gone
from tests.mooncake_lite.workloads.made import write
from tests.patience import patient, wait_until

pytestmark = pytest.mark.quick

CLUSTER = Cluster(profile=named_profile(PAPER_MACHINES), nodes={"prefill": 1, "decode": 1})
TTFT, TBT = Limit(1.0, 0.9), Limit(0.06, 0.9)


def found(nodes: Nodes, ttft: bool = True, tbt: bool = True) -> Found:
    return Found(nodes, 0.95 if ttft else 0.5, 0.95 if tbt else 0.5, (0.5, 1.0), (0.05, 0.06))


class Drawn(Search):
    """A search over a cluster that needs (p, d) nodes at least, and counts what it looked at.

    odd   number of nodes that decode which misses the limit by a hair
    """

    def __init__(self, needed: Nodes, extra: int = 0, odd: int = 0) -> None:
        super().__init__(CLUSTER, Trace([]), TTFT, TBT)
        self._needed, self._extra, self._odd = needed, extra, odd

    def at(self, nodes: Nodes) -> Found:
        prefills, decodes = self._needed
        more = self._extra if nodes[1] < decodes + 2 else 0  # few nodes that decode keep links busy
        self.found[nodes] = found(nodes, nodes[0] >= prefills + more, nodes[1] >= decodes)
        if nodes[1] == self._odd:
            self.found[nodes] = replace(self.found[nodes], tbt=0.895)
        return self.found[nodes]


@pytest.mark.parametrize("needed", [(1, 1), (4, 2), (3, 19), (40, 7), (150, 120)])
@pytest.mark.parametrize("begin", [(1, 1), (5, 5), (64, 64)])
def test_the_search_ends_at_the_smallest_numbers_from_wherever_it_begins(needed: Nodes, begin: Nodes) -> None:
    search = Drawn(needed)
    assert search.smallest(begin).nodes == needed
    assert len(search.found) <= 45


def test_the_search_sees_that_one_number_may_depend_on_the_other() -> None:
    assert Drawn((4, 3), extra=2).smallest((1, 1)).nodes == (6, 3)


def test_the_search_looks_past_a_number_that_does_not_for_once() -> None:
    """Shares are not quite monotonous: five nodes may do where six do not."""
    assert Drawn((4, 5), odd=6).smallest((4, 7)).nodes == (4, 5)
    assert Drawn((4, 5), odd=6).smallest((4, 9)).nodes == (4, 5)


def test_slots_and_stores_are_part_of_the_load() -> None:
    jobs = jobs_of(made(KINDS["rag"], 100, 2.0, 1))
    first = First(CLUSTER, jobs, TTFT, TBT)
    slow = First(ASSUMED["overheads of the program"](CLUSTER, 10.0), jobs, TTFT, TBT)
    slot_s = CLUSTER.overheads.step_s + 2 * CLUSTER.overheads.message_s
    assert slow.load()[0] - first.load()[0] == pytest.approx(jobs.rate * 9 * slot_s)
    stored = jobs.cached > 0
    assert (first.service_s[stored] > first.compute_s[stored] + slot_s).all()
    assert first.service_s[~stored] == pytest.approx(first.compute_s[~stored] + slot_s)


def test_a_limit_that_no_cluster_keeps_is_refused_with_how_near_it_came() -> None:
    trace = made(KINDS["rag"], 60, 2.0, 1)
    search = Search(CLUSTER, trace, Limit(0.05, 0.9), TBT)
    with pytest.raises(
        ConfigError, match=r"no number of nodes keeps the limit on first tokens: 90\.0% within 50"
    ):
        search.smallest((1, 1))


def test_a_candidate_that_keeps_the_limits_is_followed_by_those_with_one_node_fewer() -> None:
    known, search = dict[Nodes, Found](), Drawn((4, 3))
    assert wanted(search, known, (4, 3)) == [(4, 3), (3, 3), (4, 2)]
    known[4, 3], known[3, 3] = found((4, 3)), found((3, 3), ttft=False)
    assert wanted(search, known, (4, 3)) == [(4, 2)]
    known[4, 2] = found((4, 2))  # better: go on from there
    assert wanted(search, known, (4, 3)) == [(3, 2), (4, 1)]
    known[3, 2], known[4, 1] = found((3, 2), ttft=False), found((4, 1), tbt=False)
    assert wanted(search, known, (4, 3)) == []


def test_a_candidate_that_does_not_gets_one_more_node_of_the_kind_that_is_short() -> None:
    known, search = {(4, 3): found((4, 3), ttft=False)}, Drawn((1, 1))
    search.at = lambda nodes: Found(nodes, 0.95, 0.95 + 0.1 * (nodes[1] > 4), (0.5, 1.0), (0.05, 0.06))  # type: ignore[method-assign]
    assert wanted(search, known, (4, 3))[0] == (8, 3)  # replays promise 0.45 too much for any number
    known[8, 3] = replace(found((8, 3)), tbt=0.87)
    assert wanted(search, known, (4, 3))[0] == (8, 5)  # 0.08 too much, which five nodes have to spare


def test_a_simulation_that_cannot_keep_a_limit_is_stopped_early() -> None:
    trace = made(KINDS["unique"], 200, 8.0, 3)
    told, _ = simulate(with_nodes(CLUSTER, (2, 2)), trace, TTFT, TBT)
    assert told.how == "stopped"
    assert told.ttft < TTFT.share
    assert told.lacks(TTFT, TBT).startswith("at most")
    told, _ = simulate(with_nodes(CLUSTER, (12, 4)), trace, Limit(9.0, 0.9), Limit(0.001, 0.9))
    assert told.how == "stopped"
    assert told.tbt < 0.9
    kept, outside = simulate(with_nodes(CLUSTER, (12, 4)), trace, Limit(9.0, 0.9), Limit(0.5, 0.9))
    assert (kept.how, kept.lacks(Limit(9.0, 0.9), Limit(0.5, 0.9))) == ("simulated", "")
    assert 0 < outside <= 1


def test_each_assumption_moves_the_answer_the_way_it_must() -> None:
    """Slower machines never do with fewer nodes, and the assumption that matters moves them."""
    trace = made(KINDS["rag"], 100, 6.0, 5)
    limits = Limit(1.6, 0.9), Limit(0.06, 0.9)

    def smallest(change: Callable[[Cluster], Cluster]) -> Nodes:
        return Search(change(CLUSTER), trace, *limits).smallest((3, 3)).nodes

    def changed(name: str, factor: float, cluster: Cluster) -> Cluster:
        return ASSUMED[name](cluster, factor)

    here = smallest(partial(changed, "links", 1.0))
    for name in ASSUMED:
        fast, slow = (smallest(partial(changed, name, factor)) for factor in (0.7, 1.3))
        assert sum(fast) <= sum(here) <= sum(slow), name
    assert smallest(partial(changed, "passes of prompts", 1.3))[0] > here[0]
    assert smallest(partial(changed, "decode steps", 1.3))[1] > here[1]


def test_the_least_memory_keeps_the_limits_and_half_of_it_does_not() -> None:
    trace = made(KINDS["rag"], 300, 4.0, 5)
    search = Search(CLUSTER, trace, Limit(1.5, 0.9), Limit(0.1, 0.9))
    nodes = search.smallest((2, 2)).nodes
    least = least_dram(search, nodes)
    assert least < CLUSTER.node_bytes
    assert search.at(nodes).keeps(*search.limits)


def test_costs_are_those_of_nodes_over_tokens() -> None:
    jobs = jobs_of(made(KINDS["rag"], 100, 2.0, 1))
    assert jobs.cached.any()
    prices = Prices(prefill_node_hour=36.0, decode_node_hour=18.0, dram_gb_hour=0.01, currency="USD")
    cost = cost_of(prices, (3, 2), 10**12, jobs)
    assert cost.per_hour == pytest.approx(3 * (36 + 10) + 2 * 18)
    tokens_an_hour = 3600 * jobs.rate * float(jobs.tokens.mean())
    assert cost.per_million_input == pytest.approx(3 * 46 / tokens_an_hour * 1e6)
    assert cost.per_million_output == pytest.approx(36 / (3600 * jobs.rate * float(jobs.answer.mean())) * 1e6)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("prefill_node_hour = -1", "0 or more"), ("gpu = 3", "unknown field"), ("x = [", "prices.toml"),
     ("prefill_node_hour = nan", "0 or more"), ("prefill_node_hour = 'a'", "Expected `float`")],
)  # fmt: skip
def test_prices_that_are_none_are_refused(tmp_path: Path, words: str, wanted: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(words)
    with pytest.raises(ConfigError, match=wanted):
        read_prices(file)


def test_what_makes_an_answer_doubtful_is_named() -> None:
    trace = made(KINDS["unique"], 150, 3.0, 2)
    search = Search(CLUSTER, trace, Limit(5.0, 0.9), TBT)
    first = First(CLUSTER, jobs_of(trace), Limit(5.0, 0.9), TBT)
    busy = " ".join(warnings_of(search, first, (2, 2)))
    assert "load: nodes that prefill compute for" in busy
    growing = made(KINDS["rag"], 400, 2.0, 2)
    first = First(CLUSTER, jobs_of(growing), TTFT, TBT)
    words = warnings_of(Search(CLUSTER, growing, TTFT, TBT), first, (4, 4))
    assert any(word.startswith("reuse grows: ") for word in words)


# ---------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plan") / "rag.jsonl", made(KINDS["rag"], 150, 6.0, 5))


LIMITS = ["--slo-ttft-ms", "1500@0.9", "--slo-tbt-ms", "60@0.9"]


def run(*words: str) -> int:
    return main(["plan", *words])


def test_the_command_finds_a_cluster_that_simulations_keep(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plots = tmp_path / "plan.json", tmp_path / "plots"
    assert run(str(trace_file), *LIMITS, "--json", str(out), "--plot", str(plots)) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    shown = capsys.readouterr().out
    nodes = told["nodes"]["prefill"], told["nodes"]["decode"]
    assert told["confirmed"]
    assert f"smallest cluster: {nodes[0]}P{nodes[1]}D" in shown
    rows = {tuple(row["nodes"]): row for row in told["candidates"] if row["how"] != "replayed"}
    assert rows[nodes]["ttft"] >= 0.9 <= rows[nodes]["tbt"]
    for fewer in ((nodes[0] - 1, nodes[1]), (nodes[0], nodes[1] - 1)):
        if min(fewer) and fewer in rows:
            assert min(rows[fewer]["ttft"], rows[fewer]["tbt"]) < 0.9
    assert 2 <= len(rows) <= 4
    assert {row["what"] for row in told["off"]} == set(ASSUMED)
    assert told["cost"]["per_hour"] == sum(nodes)
    assert 0.3 < told["workload"]["reused"] < 0.8
    assert (plots / "plan.svg").read_bytes().startswith(b"<?xml")


def test_a_quick_plan_is_what_the_replays_say_and_twice_the_rate_needs_more(
    trace_file: Path, tmp_path: Path
) -> None:
    file, ttft, tbt = tmp_path / "plan.json", Limit(1.5, 0.9), Limit(0.06, 0.9)
    assert run(str(trace_file), *LIMITS, "--rate", "12", "--quick", "--json", str(file)) == 0
    told, trace = json.loads(file.read_text()), read_trace(trace_file)
    assert not told["confirmed"]
    assert told["workload"]["requests_per_s"] == pytest.approx(12.0)
    slow, fast = (
        Search(CLUSTER, sped(trace, rate / jobs_of(trace).rate), ttft, tbt).smallest((3, 2)).nodes
        for rate in (6, 12)
    )
    assert tuple(told["nodes"].values()) == fast
    assert sum(fast) > sum(slow)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--slo-ttft-ms", "900@1.5", "--slo-tbt-ms", "50"], "write milliseconds and a share of requests"),
        (["--slo-ttft-ms", "nan", "--slo-tbt-ms", "50"], "write milliseconds and a share of requests"),
        (["--slo-ttft-ms", "1@0.9", "--slo-tbt-ms", "50"], "no number of nodes keeps"),
        ([*LIMITS, "--profile", "none.json"], "none.json"),
        ([*LIMITS, "--prices", "none.toml"], "none.toml: no such file"),
        ([*LIMITS, "--policy", "dynamo"], "'dynamo' is not one of"),
        ([*LIMITS, "--mode", "colocated"], "use --compare --nodes N"),
        ([*LIMITS, "--node-dram", "1MB"], "a block has"),
        ([*LIMITS, "--rate", "0"], "--rate"),
    ],
)  # fmt: skip
def test_bad_words_are_one_line_with_the_fix(
    trace_file: Path, words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(trace_file), *words) == 2
    told = capsys.readouterr().err
    assert wanted in told
    assert "Traceback" not in told


def test_requests_that_all_come_at_once_have_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "batch.jsonl", made(KINDS["batch"], 20, 1.0, 1))
    assert run(str(file), *LIMITS) == 2
    assert "all requests come at once" in capsys.readouterr().err


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_plan_that_is_interrupted_or_killed_ends_its_processes_without_a_traceback(
    sign: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C comes to all processes of the terminal, at any time; a kill to one."""
    file = write(tmp_path / "long.jsonl", made(KINDS["rag"], 4_000, 6.0, 5))
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_lite", "plan", str(file), *LIMITS, "--jobs", "2"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        below = psutil.Process(process.pid)

        def began() -> bool:
            """Tell whether there are both processes, beside Python's tracker; killed ones have to compute."""
            used_s = [one.cpu_times().user for one in below.children()]
            return len(used_s) >= 3 and (sign == signal.SIGINT or sum(used_s) > 0.5)

        assert wait_until(began, patient(60.0))
        children = below.children()
        os.killpg(process.pid, sign) if sign == signal.SIGINT else process.kill()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (130 if sign == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said
    assert is_gone(process.pid, limit_s=20)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
