"""`mooncake-lite simulate cluster`: a trace on a simulated cluster, as tables, JSON and figures.

Mounted by `simulator/command.py`. It reads words into a `Cluster` and shows an `Outcome`; `play.py` plays.
Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from mooncake_lite.config.modes import MODES, ROLES
from mooncake_lite.config.options import OUT_FILE, Bytes, NumberRange, write_out
from mooncake_lite.config.progress import bar, wide_console
from mooncake_lite.config.scheduling_options import parse_racks
from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.file import PAPER_MACHINES, Profile, named_profile
from mooncake_lite.simulator.cluster import LETTERS, NO_SIZES, Cluster, parse_nodes
from mooncake_lite.simulator.hints import KINDS, Hints
from mooncake_lite.simulator.intervals import drawn, intervals
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.recorded import Recorded, read_recording
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.workload import mixed
from mooncake_lite.workloads import report
from mooncake_lite.workloads.forms import Assumed
from mooncake_lite.workloads.metrics import spread_of
from mooncake_lite.workloads.options import POSITIVE, adapted, assumed_of, chosen_trace, trace_options
from mooncake_lite.workloads.traces import Trace
from scheduler.admission import ADMISSIONS
from scheduler.placement import POLICIES
from scheduler.queues import QUEUES

NO_SITES = {"racks": "", "site_gbps": None, "site_ms": 0.0, "site_price": 0.0}
"""Options about sites, and what they are when nobody gives them."""
NO_HINTS = {"hints": "none", "hint_error": 0.0}


class Runs(click.IntRange):
    """A number of runs: an interval needs two drawn ones beside the first."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Fails for two, and for what is no number within the range."""
        count: int = super().convert(value, param, ctx)
        if count == 2:
            self.fail("2 runs give no interval: take 3 or more, or 1", param, ctx)
        return count


class Kill(click.ParamType):
    """What dies, and when: ROLE@SECONDS."""

    name = "kill"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        """Return role and seconds. Fails for other words."""
        role, _, seconds = str(value).partition("@")
        try:
            at_s = float(seconds)
        except ValueError:
            at_s = -1.0
        if role not in ROLES or not 0 <= at_s < 1e9:
            self.fail(f"{value!r}: write {', '.join(ROLES)} and a time, as decode@30", param, ctx)
        return role, at_s


def _sizes(command: Any) -> Any:
    """Add the options of serve about instances of several nodes."""
    for name, what in (
        ("--decode-context-parallel-size", "Nodes that share the contexts of a decode instance"),
        ("--decode-tensor-parallel-size", "The same of decode instances; 0: as of all"),
        ("--prefill-tensor-parallel-size", "The same of prefill instances; 0: as of all"),
        ("--tensor-parallel-size", "Nodes that share the heads of each layer, as one instance"),
    ):
        usual = NO_SIZES[name.strip("-").replace("-", "_")]
        least = click.IntRange(usual)
        command = click.option(name, default=usual, show_default=True, type=least, help=f"{what}.")(command)
    return command


def _sites(command: Any) -> Any:
    """Add the options about sites."""
    for name, kind, what in (
        ("--site-price", NumberRange(0, 1e6), "Price of a GB that goes between sites, in any currency"),
        ("--site-ms", NumberRange(0, 1e4), "Latency between sites, one way, of transfers and messages"),
        ("--site-gbps", POSITIVE, "Of the link between a site and all others, each way; left out: no limit"),
        ("--racks", str, "Site of each computing node, as 0,1,0,1 for 2P2D. Only --policy topology knows it"),
    ):
        usual = NO_SITES[name.strip("-").replace("-", "_")]
        command = click.option(name, default=usual, show_default=bool(usual), type=kind, help=f"{what}.")(
            command
        )
    return command


@click.command("cluster")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--nodes",
    help="How many nodes prefill and decode, or do both (nC). nS names the number of stores; without it each "
    "node that prefills has one.  [default: 8P8D]",
)
@click.option("--one-node", is_flag=True, help="All ranks are on one node, as on a laptop.")
@click.option("--mode", type=click.Choice(list(MODES)), help="[default: pooled, or colocated for nC]")
@click.option(
    "--profile", default=PAPER_MACHINES, show_default=True, help="Of the machines: a file or a name."
)
@click.option(
    "--decode-ms-per-sequence",
    type=NumberRange(0, 1e4),
    help="Time that each sequence adds to a decode step, in place of the profile's. One alone takes as long.",
)
@click.option("--policy", default="kvcache-centric", show_default=True, type=click.Choice(list(POLICIES)))
@click.option("--admission", default="none", show_default=True, type=click.Choice(list(ADMISSIONS)))
@click.option("--queue", default="fcfs", show_default=True, type=click.Choice(list(QUEUES)))
@click.option(
    "--eviction", default="lru", show_default=True, metavar="POLICY",
    help="Evicts blocks from the pool's DRAM: lru, lfu, arc, s3fifo, ... [+second-hit].",
)  # fmt: skip
@click.option("--link-gbps", type=POSITIVE, help="Of a node's link, each way.  [default: the profile's]")
@click.option("--node-dram", type=Bytes(), help="Lent to the pool by a node.  [default: 1TB; colocated: 0]")
@click.option("--ssd", default="0", show_default=True, type=Bytes(), help="SSD tier of such a node.")
@click.option("--ssd-gbps", type=POSITIVE, help="Of its disk, reads and writes.  [default: the profile's]")
@click.option(
    "--kv-cache-bytes",
    default="320GiB",
    show_default=True,
    type=Bytes(),
    help="Memory for the KV pages of a node.",
)
@click.option(
    "--max-num-batched-tokens",
    default=0,
    show_default=True,
    type=click.IntRange(0, 1 << 30),
    help="Prompt tokens of a forward pass; 0: each prompt is one pass.",
)
@click.option(
    "--prefix-sharing",
    type=click.Choice(["hash", "radix", "off"]),
    help="How nodes reuse their own pages.  [default: hash; pooled: off, all reuse goes through the pool]",
)
@click.option(
    "--max-num-seqs", type=click.IntRange(1), help="Sequences that a node decodes at once.  [default: all]"
)
@click.option("--overlap-transfers/--no-overlap-transfers", default=True, show_default=True)
@click.option(
    "--layerwise", default="auto", show_default=True, type=click.Choice(["auto", "on", "off"]),
    help="Move KV by layers beside a pass. auto: where the costs say that it is faster.",
)  # fmt: skip
@click.option(
    "--speculate", default=0.0, show_default=True, type=NumberRange(0, 1),
    help="Part of drafts that are accepted, for sequences that decode; 0: there are no drafts.",
)  # fmt: skip
@click.option(
    "--hints", default="none", show_default=True, type=click.Choice(KINDS),
    help="What clients say after each answer of the use of their prompts: nothing, what agents know, what is "
    "wrong, or what is drawn.",
)  # fmt: skip
@click.option(
    "--hint-error", default=0.0, show_default=True, type=NumberRange(0, 10),
    help="Of the pauses that clients expect: standard deviation of the logarithm of expected / real.",
)  # fmt: skip
@_sizes
@_sites
@click.option("--from-recording", is_flag=True, help="TRACE is a recording of `serve --record`.")
@trace_options
@click.option("--json", "json_file", type=OUT_FILE, help="Write the result to this file.")
@click.option(
    "--plot", "plot_folder", type=click.Path(file_okay=False, path_type=Path),
    help="Draw latencies and load, SVG files, into this folder.",
)  # fmt: skip
@click.option(
    "--kill", "kills", multiple=True, type=Kill(), metavar="ROLE@SECONDS",
    help="Have a rank of this role die at this time. May be given several times; one rank must be left.",
)  # fmt: skip
@click.option(
    "--runs", type=Runs(1, 1000), default=1, show_default=True,
    help="Number of runs: those after the first are on machines that differ from the profile as far as its "
    "errors allow, and give 90 % intervals.",
)  # fmt: skip
def cluster(trace: Path, json_file: Path | None, plot_folder: Path | None, **words: Any) -> None:
    """Play TRACE on a simulated cluster: latencies, goodput, hits, refusals, bytes moved.

    TRACE is a file as Mooncake, Bailian, Azure, BurstGPT or ShareGPT publish them. The control plane and the
    ranks are the live ones; forward passes, links and disks take as long as the profile says. Equal seeds
    give equal results.
    """
    requests = requests_of(trace, words)
    chosen = cluster_of(requests, words)
    began = time.perf_counter()
    check_kills(chosen, words["kills"])
    outcome, results = _play(chosen, requests, words)
    result = results[0]
    result["guesses"] = chosen.guesses
    if chosen.racks:
        result["site_price"] = result["bytes_moved"]["sites"] / 1e9 * words["site_price"]
    show(result, time.perf_counter() - began)
    if len(results) > 1:
        result["intervals"] = intervals(results[1:])
        _show_intervals(result["intervals"])
    if json_file is not None:
        usual = NO_SIZES | NO_SITES | NO_HINTS
        given = {name: word for name, word in words.items() if word != usual.get(name, ...)}
        about = {"trace": trace.name, **given, "mode": chosen.mode}
        write_out("--json", json_file, (json.dumps({**result, "config": about}, indent=1) + "\n").encode())
    if plot_folder is not None:
        _draw(outcome, chosen, plot_folder)


def requests_of(trace: Path, words: dict[str, Any]) -> Trace:
    """Read what is played. The nodes of a recording are those of its cluster, unless others are named."""
    if not words["from_recording"]:
        words["nodes"] = words["nodes"] or "8P8D"
        return chosen_trace(trace, words)
    if words["spread"]:
        raise ConfigError("--spread: the arrivals of a recording are not in ticks; leave it out")
    if assumed_of(words) != Assumed():
        raise ConfigError("--assume-rate, --assume-prefix: a recording lacks nothing; leave them out")
    recorded, profile = read_recording(trace), named_profile(words["profile"])
    layers, kv_heads, _, head_dim, itemsize, *_ = recorded.config.layout
    if profile.model.kv and profile.model.kv != [layers, kv_heads, head_dim, itemsize]:
        raise ConfigError(
            f"{trace} is a recording of another model than {profile.model.name}; name the profile of its "
            "machines with --profile"
        )
    if not words["nodes"]:
        words["mode"] = words["mode"] or recorded.config.mode
        words["nodes"] = _nodes_of(recorded)
    if recorded.assumed:
        click.echo(f"note: {recorded.assumed:,} answers had not ended; their lengths are assumed", err=True)
    return adapted(recorded.trace, words)


def _nodes_of(recorded: Recorded) -> str:
    """Return the nodes of the recorded cluster, as --nodes has them. Raises ConfigError for a pipeline."""
    letters = {role: letter for letter, role in LETTERS.items()}
    if unknown := recorded.roles.keys() - letters.keys():
        raise ConfigError(f"ranks of the role {min(unknown)} are not simulated; name a cluster with --nodes")
    return "".join(f"{count}{letters[role]}" for role, count in recorded.roles.items())


def _play(cluster: Cluster, trace: Trace, words: Mapping[str, Any]) -> tuple[Outcome, list[dict[str, Any]]]:
    """Play a trace, with a bar. Returns the outcome on machines as profiled, and the results of all runs."""
    count, seed, runs, kills = len(trace.requests), words["seed"], words["runs"], words["kills"]
    source = partial(source_of, trace, words)
    with bar("requests", runs * count) as update:
        first = play(cluster, source(), seed, kills=kills, told=partial(_advance, update, 0))
        results = [result_of(first, cluster)]
        for number in range(1, runs):
            other, chosen = drawn(cluster, first.outside, mixed(seed, number)), mixed(seed, number)
            told = partial(_advance, update, number * count)
            outcome = play(other, source(), chosen, kills=kills, told=told)
            results.append(result_of(outcome, cluster))
    for role, at_s in [kill for kill in kills if kill not in first.killed]:
        click.echo(f"note: the run had ended at {at_s:g} s, so no {role} rank died then", err=True)
    return first, results


def source_of(trace: Trace, words: Mapping[str, Any]) -> TraceSource:
    """Return the requests of a trace, and with --hints what their clients say of them."""
    kind = words["hints"]
    if kind == "none" and words["hint_error"]:
        raise ConfigError("--hint-error is about the hints of clients: name them with --hints")
    hints = None if kind == "none" else Hints(trace, kind, words["hint_error"], words["seed"])
    return TraceSource(trace, hints)


def result_of(outcome: Outcome, cluster: Cluster) -> dict[str, Any]:
    """Return a result as JSON has it: that of the outcome, and of each kill how long answers paused then."""
    pauses = [
        {"role": role, "at_s": at_s, "longest_gap_s": spread_of(outcome.gaps_s(at_s))}
        for role, at_s in outcome.killed
    ]
    return {**outcome.to_dict(cluster.ttft_s, cluster.tbt_s), **({"kills": pauses} if pauses else {})}


def check_kills(cluster: Cluster, kills: Sequence[tuple[str, float]]) -> None:
    """Raise ConfigError when no rank of a role would be left."""
    counts = cluster.counts
    for role in {role for role, _ in kills}:
        dead = sum(one == role for one, _ in kills)
        if dead >= counts.get(role, 0):
            raise ConfigError(f"--kill {role}: there are {counts.get(role, 0)}, and one must be left")


def _advance(update: Any, before: int, done: int) -> None:
    update(completed=before + done)


def _show_intervals(found: dict[str, list[float]]) -> None:
    """Print in which intervals a live run is expected to lie."""
    words = ", ".join(f"{name} {low:.3f} to {high:.3f}" for name, (low, high) in found.items())
    wide_console().print(f"90 % of live runs are expected within: {words}", highlight=False)


def cluster_of(trace: Trace, words: dict[str, Any]) -> Cluster:
    """Return the cluster that the options of a command describe. Raises ConfigError, with the fix."""
    for name in (name for name in NO_SITES if not words["racks"] and words[name] != NO_SITES[name]):
        raise ConfigError(
            f"--{name.replace('_', '-')} is about sites: name the site of each node with --racks"
        )
    nodes = parse_nodes(words["nodes"])
    mode = words["mode"] or ("colocated" if "compute" in nodes else "pooled")
    dram, computing = words["node_dram"], sum(nodes.values()) - nodes.get("store", 0)
    link, disk = (gbps and gbps * 1e9 / 8 for gbps in (words["link_gbps"], words["ssd_gbps"]))
    profile = profile_with(named_profile(words["profile"]), words["decode_ms_per_sequence"])
    return Cluster(
        profile=profile, nodes=nodes, together=words["one_node"], mode=mode, block_tokens=trace.block_tokens,
        node_bytes=(0 if mode == "colocated" and "store" not in nodes else 10**12) if dram is None else dram,
        ssd_bytes=words["ssd"], kv_bytes=words["kv_cache_bytes"],
        link_bytes_per_s=link, ssd_bytes_per_s=disk,
        batched_tokens=words["max_num_batched_tokens"], sequences=words["max_num_seqs"] or 1_000_000,
        sharing=words["prefix_sharing"] or ("off" if mode == "pooled" else "hash"),
        overlaps=words["overlap_transfers"], layerwise=words["layerwise"],
        acceptance=words["speculate"], policy=words["policy"],
        admission=words["admission"], queue=words["queue"], eviction=words["eviction"],
        ttft_s=words["slo_ttft_ms"] / 1000, tbt_s=words["slo_tbt_ms"] / 1000,
        sizes={name: words[name] for name in NO_SIZES},
        racks=parse_racks(words["racks"], 1 if words["one_node"] else computing),
        site_bytes_per_s=inf if words["site_gbps"] is None else words["site_gbps"] * 1e9 / 8,
        site_s=words["site_ms"] / 1000,
    )  # fmt: skip


def show(result: dict[str, Any], wall_s: float) -> None:
    """Print a result: what became of the requests, a table of latencies, and what the cluster did."""
    report.show(result, f", simulated in {wall_s:.1f} s")
    tiers = ", ".join(f"{tier} {rate:.1%}" for tier, rate in result["hit_rate"].items() if rate)
    bytes_moved = result["bytes_moved"].items()
    moved = ", ".join(f"{link} {nbytes / 1e9:,.0f} GB" for link, nbytes in bytes_moved if nbytes)
    wide_console().print(
        f"reused prompt tokens: {tiers or 'none'}\ncomputed for {result['prefill_s_per_request']:.3f} s per "
        f"request; moved: {moved or 'nothing'}",
        highlight=False,
    )
    mechanisms = [
        f"{name.replace('_', ' ')} {one['tried']:,}" + f" ({one['failed']:,} failed)" * (one["failed"] > 0)
        for name, one in result["mechanisms"].items()
    ]
    wide_console().print(f"tried: {', '.join(mechanisms) or 'nothing'}", highlight=False)
    if bound := result.get("queue_bound"):
        wide_console().print(
            "waits for decode slots: {waited_s:,.0f} s, at most {most_s:,.0f} s by the bound of the queue; "
            "{late} of {requests:,} begin later than it says".format(**bound), highlight=False,
        )  # fmt: skip
    if result["guesses"]:
        words = ", ".join(f"{name} {rate * 8 / 1e9:g} Gbit/s" for name, rate in result["guesses"].items())
        wide_console().print(f"guessed, because the profile lacks them: {words}", highlight=False)
    for one in result.get("kills", ()):
        gaps = one["longest_gap_s"]
        if gaps["mean"] is not None:
            wide_console().print(
                f"{one['role']} dies at {one['at_s']:g} s: answers pause for {gaps['p50']:.3f} s (p50), "
                f"{gaps['p99']:.3f} s (p99)", highlight=False,
            )  # fmt: skip
    if outside := [f"{share:.1%} of {kind}" for kind, share in result["outside_profile"].items() if share]:
        wide_console().print(
            f"larger than any pass that the profile was measured with: {', '.join(outside)} passes\n"
            "their times are extrapolated: trust differences between runs more than the figures; "
            "--runs 5 gives intervals",
            highlight=False,
        )


def profile_with(profile: Profile, ms_per_sequence: float | None) -> Profile:
    """Return a profile whose decode steps cost so much for each sequence; None: as it is.

    A step of one sequence takes as long as before. Raises ConfigError when one sequence would cost more.
    """
    if ms_per_sequence is None:
        return profile
    compute, each_s = profile.compute, ms_per_sequence / 1000 / profile.compute.time_scale
    decode = compute.fit.decode
    base_s = decode.base_s + decode.per_token_s - each_s
    if base_s < 0:
        most = 1000 * compute.time_scale * (decode.base_s + decode.per_token_s)
        raise ConfigError(f"--decode-ms-per-sequence {ms_per_sequence:g}: a step of one takes {most:.4g} ms")
    fit = replace(compute.fit, decode=replace(decode, base_s=base_s, per_token_s=each_s))
    return profile.with_section("compute", replace(compute, fit=fit))


def _draw(outcome: Outcome, cluster: Cluster, folder: Path) -> None:
    from mooncake_lite.simulator.cluster_figures import draw_latencies, draw_loads

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("latencies.svg", draw_latencies(outcome, cluster.ttft_s, cluster.tbt_s)),
        ("load.svg", draw_loads(outcome)),
    ):
        write_out("--plot", folder / name, content)
