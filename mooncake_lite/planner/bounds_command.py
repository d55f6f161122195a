"""`mooncake-lite workload bounds`: what no scheduler can beat on a trace, beside what serves it.

Mounted by `mooncake_lite.tools.workload`. Explained in docs/explain/bounds.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import OUT_FILE, write_out
from mooncake_lite.config.progress import bar, plain_table, wide_console
from mooncake_lite.planner.bounds import Spread, bounds_of
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.profiles.file import PAPER_MACHINES, OverheadsSection, Profile, named_profile
from mooncake_lite.workloads.metrics import COMPLETED, spread_of
from mooncake_lite.workloads.options import chosen_trace, played_options
from mooncake_lite.workloads.traces import Trace

LOWER = {"own": "alone on a node", "least": "lower bound"}
SERVING = {
    "central": "central queue", "shortest": "the same, shortest first", "simulated": "simulated cluster",
}  # fmt: skip


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--nodes", default=8, show_default=True, type=click.IntRange(1, 4_096), help="That prefill.")
@click.option("--profile", default=PAPER_MACHINES, show_default=True, help="Of the nodes: a file or a name.")
@click.option("--simulate", is_flag=True, help="Also play TRACE on a pooled cluster, as many nodes decode.")
@played_options
@click.option("--json", "json_file", type=OUT_FILE, help="Write the result to FILE.")
def bounds(
    trace: Path, nodes: int, profile: str, simulate: bool, json_file: Path | None, **words: Any
) -> None:
    """Bound the TTFT of TRACE from below, for every scheduler of so many nodes.

    Each prompt is one pass on one node, and reuses all that prompts before it had. A central queue with as
    much reuse stands beside the bounds.
    """
    machines, requests = named_profile(profile), chosen_trace(trace, words)
    overheads, seconds = machines.overheads or OverheadsSection(), pass_seconds(machines)
    jobs = jobs_of(requests)
    found = bounds_of(jobs, nodes, lambda load: seconds(load) + overheads.step_s, overheads.request_s)
    result: dict[str, Any] = {"requests": len(requests.requests), "nodes": nodes, **asdict(found)}
    if simulate:
        result["simulated"] = _simulated(requests, nodes, machines, words["seed"])
    _show(result)
    if json_file is not None:
        about = {"trace": trace.name, "profile": profile, **words}
        write_out("--json", json_file, (json.dumps({**result, "config": about}, indent=1) + "\n").encode())


def _simulated(trace: Trace, nodes: int, machines: Profile, seed: int) -> Spread:
    from mooncake_lite.simulator.cluster import Cluster
    from mooncake_lite.simulator.play import play
    from mooncake_lite.simulator.trace_source import TraceSource

    counts, size = {"prefill": nodes, "decode": nodes}, trace.block_tokens
    cluster = Cluster(profile=machines, nodes=counts, block_tokens=size)
    with bar("requests", len(trace.requests)) as update:
        outcome = play(cluster, TraceSource(trace), seed, told=lambda done: update(completed=done))
    return spread_of(one.ttft_s for one in outcome.records if one.outcome == COMPLETED)


def _show(result: dict[str, Any]) -> None:
    """Print the rows, and how many times the bounds what serves is."""
    say, least = partial(wide_console().print, highlight=False), result["least"]
    table = plain_table("TTFT in s, and times the bound", *least, left={"TTFT in s, and times the bound"})
    for key, name in LOWER.items():
        table.add_row(name, *(f"{one:.3f}" for one in result[key].values()))
    for key in [key for key in SERVING if key in result]:
        pairs = zip(result[key].values(), least.values())
        table.add_row(SERVING[key], *(f"{one:.3f} ({one / bound:.2f})" for one, bound in pairs))
    say(f"{result['requests']:,} requests on {result['nodes']} nodes, busy {result['load']:.0%} of the time")
    say(table)
    if least == result["own"]:
        say("No bound is above the time alone: what requests wait for each other is too little to bound it.")
