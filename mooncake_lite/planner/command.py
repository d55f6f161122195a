"""`mooncake-lite plan`: how many nodes of each kind a workload needs, what they cost, and what that rests on.

Mounted by `mooncake_lite.cli`. It reads words into a `Cluster` and limits; `answer.py` looks for the answer,
`report.py` shows it. Explained in docs/explain/planning.md.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.modes import MODES
from mooncake_lite.config.options import OUT_FILE, Bytes, write_out
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner import compare_report, report
from mooncake_lite.planner.answer import answer_of
from mooncake_lite.planner.compare import SYSTEMS
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Limit
from mooncake_lite.planner.prices import Prices, read_prices
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.options import POSITIVE, chosen_trace, played_options
from mooncake_lite.workloads.rescale import sped
from mooncake_lite.workloads.traces import Trace
from scheduler.placement import POLICIES

REPLAYED = [name for name in POLICIES if name not in ("dynamo", "topology")]
"""Policies that ask only for what a replay knows."""


class LimitType(click.ParamType):
    """An SLO: MS@SHARE, as 2000@0.9; without a share, that of 0.9."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        """Return the limit. Fails for other words."""
        if isinstance(value, Limit):
            return value
        words, _, share = str(value).partition("@")
        try:
            limit = Limit(float(words) / 1e3, float(share or 0.9))
        except ValueError:
            limit = Limit(0.0, 0.0)
        if not (0 < limit.seconds < 1e6 and 0 < limit.share < 1):
            self.fail(f"{value!r}: write milliseconds and a share of requests, as 2000@0.9", param, ctx)
        return limit


@click.command()
@click.argument("workload", type=click.Path(path_type=Path))
@click.option("--slo-ttft-ms", "ttft", type=LimitType(), required=True, help="MS@SHARE, as 2000@0.9.")
@click.option("--slo-tbt-ms", "tbt", type=LimitType(), required=True,
              help="MS@SHARE, of the mean of a request's slowest tenth of gaps.")  # fmt: skip
@click.option(
    "--profile", default=PAPER_MACHINES, show_default=True, help="Of the machines: a file or a name."
)
@click.option("--mode", default="pooled", show_default=True, type=click.Choice(list(MODES)),
              help="How KV comes to nodes that decode: by a pool, or straight (split).")  # fmt: skip
@click.option("--rate", type=POSITIVE, help="Requests per second.  [default: the workload's own]")
@played_options
@click.option("--policy", default="kvcache-centric", show_default=True, type=click.Choice(REPLAYED))
@click.option("--node-dram", default="1TB", show_default=True, type=Bytes(),
              help="Lent to the pool by a node that prefills; split: by one that decodes.")  # fmt: skip
@click.option("--kv-cache-bytes", default="320GiB", show_default=True, type=Bytes(),
              help="Memory for the KV pages of a node.")  # fmt: skip
@click.option("--link-gbps", type=POSITIVE, help="Of a node's link, each way.  [default: the profile's]")
@click.option("--one-node", is_flag=True, help="All ranks are on one node, as on a laptop.")
@click.option("--prices", "prices_file", type=click.Path(path_type=Path),
              help="TOML: prefill_node_hour, decode_node_hour, dram_gb_hour, currency.")  # fmt: skip
@compare_report.compare_options
@click.option("--quick", is_flag=True, help="Closed forms and replays alone: no simulations.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes.  [default: one per core]")
@click.option("--json", "json_file", type=OUT_FILE, help="Write the answer to this file.")
@click.option("--plot", "plot_folder", type=click.Path(file_okay=False, path_type=Path),
              help="Draw what more and fewer nodes do, an SVG file, into this folder.")  # fmt: skip
def plan(workload: Path, json_file: Path | None, plot_folder: Path | None, **words: Any) -> None:
    """Find the smallest cluster that keeps two limits for WORKLOAD, a trace.

    Closed forms say where to begin. Replays of the queues look for the smallest numbers of nodes that prefill
    and that decode. At most four simulations check the answer, and that one node fewer does not keep the
    limits. With --compare, other ways to serve follow, each at its best on as many nodes. Equal options
    give equal answers.
    """
    report.check(plot_folder)
    trace = asked_trace(workload, words)
    compare_report.check(trace, words)
    cluster, prices_file = asked_cluster(trace, words), words["prices_file"]
    prices = Prices() if prices_file is None else read_prices(prices_file)
    ttft, tbt, nodes, result = words["ttft"], words["tbt"], words["nodes"], dict[str, Any]()
    if nodes is None:
        answer = answer_of(cluster, trace, ttft, tbt, words["quick"], words["jobs"])
        report.show(answer, prices)
        result, nodes = report.to_dict(answer, prices), sum(answer.nodes)
        if plot_folder is not None:
            report.draw(answer, plot_folder)
    if words["compare"]:
        pooled = replace(cluster, mode="pooled", sharing="hash")
        found = compare_report.compared(
            pooled, trace, ttft, tbt, nodes, words["seeds"], words["jobs"], words["systems"] or SYSTEMS
        )
        compare_report.show(found, nodes, ttft, tbt)
        result["comparison"] = compare_report.to_dict(found, nodes)
        if plot_folder is not None:
            compare_report.draw(found, plot_folder)
    if json_file is not None:
        write_out("--json", json_file, (json.dumps(result, indent=1) + "\n").encode())


def asked_trace(path: Path, words: dict[str, Any]) -> Trace:
    """Read the workload that the options describe. Raises TraceError and ConfigError."""
    trace = chosen_trace(path, words)
    rate = jobs_of(trace).rate
    if len(trace.requests) < 2 or rate == float("inf"):
        raise ConfigError(
            f"{path}: all requests come at once; a plan needs arrivals that are spread over time"
        )
    return trace if words["rate"] is None else sped(trace, words["rate"] / rate)


def asked_cluster(trace: Trace, words: dict[str, Any]) -> Cluster:
    """Return the cluster that the options describe, with one node of each kind. Raises ConfigError."""
    mode, link = words["mode"], words["link_gbps"]
    if mode == "colocated":
        raise ConfigError("--mode colocated has one kind of nodes, no ratio to find; use --compare --nodes N")
    return Cluster(
        profile=named_profile(words["profile"]), nodes={"prefill": 1, "decode": 1}, mode=mode,
        sharing="hash" if mode == "split" else "off", together=words["one_node"],
        block_tokens=trace.block_tokens, node_bytes=words["node_dram"], kv_bytes=words["kv_cache_bytes"],
        link_bytes_per_s=link and link * 1e9 / 8, policy=words["policy"], ttft_s=words["ttft"].seconds,
        tbt_s=words["tbt"].seconds,
    )  # fmt: skip
