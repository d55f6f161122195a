"""Measures how far replays and closed forms are from simulations: a table of docs/explain/planning.md.

    python docs/tools/measure_plan.py --trace conversation_trace.jsonl

How often each way finds the smallest cluster is question 11: docs/tools/questions/q11_smallest.py.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Limit, Nodes
from mooncake_lite.planner.replay import replay
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import sped, spread
from mooncake_lite.workloads.traces import Trace, read_trace


def trace_of(kind: str, requests: int, rate: float, path: Path) -> Trace:
    """Return a workload."""
    if kind:
        return made(KINDS[kind], requests, rate, 11)
    found = spread(read_trace(path).first(requests), 0)
    return sped(found, rate / jobs_of(found).rate)


COMPARED: dict[str, tuple[str, int, float, list[Nodes]]] = {
    "conversation": ("", 1500, 2.94, [(8, 8), (6, 6), (5, 3)]),
    "code": ("code", 1500, 10.0, [(3, 1), (4, 2)]),
    "rag": ("rag", 1500, 4.0, [(3, 2), (4, 1)]), "viral": ("viral", 1500, 4.0, [(3, 2)]),
    "unique": ("unique", 1500, 3.0, [(4, 2)]), "reasoning": ("reasoning", 400, 1.0, [(1, 8)]),
    "flood": ("flood", 1500, 3.0, [(60, 20)]), "agents": ("agents", 1200, 1.0, [(10, 8), (8, 6)]),
}  # fmt: skip
"""name -> kind of `workload make`, "" for the trace; requests; requests per second; and the clusters on which
a replay is compared with a simulation."""


def compare(path: Path) -> None:
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
@click.option("--trace", type=click.Path(path_type=Path, exists=True), required=True)
def main(trace: Path) -> None:
    """Print replays beside simulations."""
    compare(trace)


if __name__ == "__main__":
    main()
