"""Measures how often `mooncake-lite plan` is right: its smallest clusters beside those of many simulations.

    python docs/tools/measure_plan.py [--trace FILE] [--only KIND] --json docs/reference/measured/plan.json

Each cell is a workload at a rate, with limits of 1.2 or 3 times the 90th percentiles of an empty cluster. The
truth is where simulations lead that start at the plan's answer and end where one node fewer of either kind
does not keep the limits, however many it takes. Beside it: closed forms, replays of queues, the plan with at
most four simulations, and the rule "load rounded up, plus one".
"""

from __future__ import annotations

import json
from concurrent.futures import Executor, ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import Any

import click
import numpy as np

from mooncake_lite.config.progress import plain_table, wide_console
from mooncake_lite.planner.answer import MOST_SIMULATIONS, best_of, wanted
from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Found, Limit, Nodes
from mooncake_lite.planner.replay import replay
from mooncake_lite.planner.search import Search, with_nodes
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.sweep import processes
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import sped, spread
from mooncake_lite.workloads.traces import Trace, read_trace

MANY = (60, 60)
MOST = 24
"""Simulations of a cell."""

CELLS: dict[str, tuple[str, int, float]] = {
    "conversation": ("", 1500, 2.5), "conversation, slow": ("", 1500, 1.5), "rag": ("rag", 1500, 10.0),
    "rag, fast": ("rag", 2000, 16.0), "code": ("code", 2500, 60.0), "viral": ("viral", 1500, 8.0),
    "viral, fast": ("viral", 2000, 14.0), "unique": ("unique", 1500, 4.0),
    "unique, fast": ("unique", 2000, 6.0),
    "agents": ("agents", 1000, 0.8), "reasoning": ("reasoning", 400, 1.0),
}  # fmt: skip
"""name -> kind of `workload make`, "" for the trace, requests, and requests per second."""


def trace_of(kind: str, requests: int, rate: float, path: Path | None) -> Trace:
    """Return a workload."""
    if kind:
        return made(KINDS[kind], requests, rate, 11)
    assert path is not None, "--trace FILE is missing"
    found = spread(read_trace(path).first(requests), 0)
    return sped(found, rate / jobs_of(found).rate)


def truth_of(search: Search, begin: Nodes, executor: Executor) -> Any:
    """Return the smallest cluster by simulations, that of a plan with a few of them, and all simulations."""
    limits = search.limits
    found: dict[Nodes, Found] = {}
    planned: Nodes | None = None
    while len(found) < MOST and (nodes := wanted(search, found, begin)):
        for one in nodes[:2]:
            if len(found) == MOST_SIMULATIONS:
                planned = best_of(search, found) or begin
            run = executor.submit(simulate, with_nodes(search.cluster, one), search.trace, *limits)
            found[one], _ = run.result()
    truth = best_of(search, found)
    return truth, planned or truth, len(found)


def cell(name: str, factor: float, path: Path | None, executor: Executor) -> dict[str, Any]:
    """Measure one cell."""
    trace = trace_of(*CELLS[name], path)
    cluster = Cluster(
        profile=named_profile(PAPER_MACHINES),
        nodes={"prefill": 1, "decode": 1},
        block_tokens=trace.block_tokens,
    )
    alone = replay(with_nodes(cluster, MANY), trace)
    limits = tuple(Limit(factor * float(np.quantile(each, 0.9)), 0.9) for each in (alone.ttft_s, alone.tbt_s))
    first, search = First(cluster, jobs_of(trace), *limits), Search(cluster, trace, *limits)
    guess = first.guess()
    replayed = search.smallest(guess).nodes
    truth, planned, simulations = truth_of(search, replayed, executor)
    load = first.load()
    rule = tuple(ceil(one) + 1 for one in load)
    print(
        name,
        factor,
        "truth",
        truth,
        "plan",
        planned,
        "replays",
        replayed,
        "forms",
        guess,
        "rule",
        rule,
        flush=True,
    )
    return {
        "name": name, "factor": factor, "ttft_s": limits[0].seconds, "tbt_s": limits[1].seconds, "load": load,
        "truth": truth, "plan": planned, "replays": replayed, "forms": guess, "rule": rule,
        "simulations": simulations,
    }  # fmt: skip


COMPARED: dict[str, tuple[str, int, float, list[Nodes]]] = {
    "conversation": ("", 1500, 2.94, [(8, 8), (6, 6), (5, 3)]),
    "code": ("code", 1500, 10.0, [(3, 1), (4, 2)]),
    "rag": ("rag", 1500, 4.0, [(3, 2), (4, 1)]), "viral": ("viral", 1500, 4.0, [(3, 2)]),
    "unique": ("unique", 1500, 3.0, [(4, 2)]), "reasoning": ("reasoning", 400, 1.0, [(1, 8)]),
    "flood": ("flood", 1500, 3.0, [(60, 20)]), "agents": ("agents", 1200, 1.0, [(10, 8), (8, 6)]),
}  # fmt: skip
"""name -> as in CELLS, and the clusters on which a replay is compared with a simulation."""


def compare(path: Path | None) -> None:
    """Print replays beside simulations, and closed forms of decode beside them, as rows of a page's table."""
    machines = named_profile(PAPER_MACHINES)
    for name, (kind, requests, rate, clusters) in COMPARED.items():
        trace = trace_of(kind, requests, rate, path)
        for nodes in clusters:
            sizes = {"prefill": nodes[0], "decode": nodes[1]}
            cluster = Cluster(profile=machines, nodes=sizes, block_tokens=trace.block_tokens)
            outcome, played = play(cluster, TraceSource(trace), 0), replay(cluster, trace)
            limit = Limit(1.0, 0.9)
            forms = First(cluster, jobs_of(trace), limit, limit).gaps_s(jobs_of(trace).rate / nodes[1])
            span_s = trace.requests[-1].timestamp / 1e3
            records = outcome.records
            ttft_s = np.array([one.ttft_s for one in records])
            tpot_s, tbt_s = (
                np.array([getattr(one, what) for one in records]) for what in ("tpot_s", "tbt_s")
            )
            off = [
                _off(played.ttft_s.mean(), ttft_s.mean()), _off(_p90(played.ttft_s), _p90(ttft_s)),
                _off(played.tpot_s.mean(), tpot_s.mean()), _off(_p90(played.tbt_s), _p90(tbt_s)),
                _off(forms[0].mean(), tpot_s.mean()), _off(_p90(forms[1]), _p90(tbt_s)),
            ]  # fmt: skip
            far = outcome.bytes_moved["far"] / span_s / min(nodes) / cluster.costs.transfer.far_bytes_per_s
            busy = outcome.prefill_s / span_s / nodes[0]
            mean, tail, *others = off
            cells = [
                name, f"{nodes[0]}P{nodes[1]}D", f"{busy:.2f}", f"{far:.2f}", f"{ttft_s.mean():.3f} s", mean,
                f"{_p90(ttft_s):.3f} s", tail, *others,
            ]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)


def _p90(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.9))


def _off(found: float, wanted: float) -> str:
    return f"{100 * (found / wanted - 1):.1f} %"


@click.command()
@click.option("--replays", is_flag=True, help="Compare replays with simulations instead.")
@click.option("--trace", type=click.Path(path_type=Path, exists=True))
@click.option("--only", multiple=True)
@click.option("--jobs", default=2)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(replays: bool, trace: Path | None, only: tuple[str, ...], jobs: int, json_file: Path | None) -> None:
    """Measure all cells, and print how often each way is right."""
    if replays:
        compare(trace)
        return
    wanted_cells = [(name, factor) for name in CELLS if not only or name in only for factor in (1.2, 3.0)]
    with processes(jobs, mpi=False) as executor, ThreadPoolExecutor(jobs) as threads:
        rows = list(threads.map(lambda one: cell(*one, trace, executor), wanted_cells))
    known = [row for row in rows if row["truth"]]
    table = plain_table("way", "exact", "within 1", left={"way"})
    for way in ("plan", "replays", "forms", "rule"):
        off = [max(abs(a - b) for a, b in zip(row[way], row["truth"])) for row in known]
        table.add_row(way, f"{np.mean(np.array(off) == 0):.0%}", f"{np.mean(np.array(off) <= 1):.0%}")
    wide_console().print(f"{len(known)} cells", table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
