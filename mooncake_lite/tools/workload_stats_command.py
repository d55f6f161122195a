"""`mooncake-lite workload stats`: describes a trace, as tables, JSON and a figure.

Mounted by `mooncake_lite.tools.workload`. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import OUT_FILE, Bytes, write_out
from mooncake_lite.config.progress import plain_table, wide_console
from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.figure import check_plot
from mooncake_lite.tools.workload_stats import CURVE, GIB, draw, stats_of
from mooncake_lite.workloads.options import chosen_trace, played_options
from store.layout import BlockLayout

COLUMNS = ("mean", "p50", "p90", "p99", "max")
SHOWN = (10, 25, 50, 75, 90)
KNEES = {"nine_tenths": "90 % of all hits", "knee": "the knee: beyond it a GiB adds less than on average"}


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--profile", default=PAPER_MACHINES, show_default=True, help="It says how large KV is.")
@click.option(
    "--node-dram", default="1TB", show_default=True, type=Bytes(), help="Lent to the pool by one node."
)
@click.option("--pool-bytes", type=Bytes(), help="Also describe the reuse in a pool of this size.")
@click.option("--pool-blocks", type=click.IntRange(1), help="The same, in blocks of the trace.")
@played_options
@click.option("--json", "json_file", type=OUT_FILE, help="Write the result to FILE.")
@click.option("--plot", "plot_file", type=OUT_FILE, help="Draw lengths, arrivals and reuse, .svg or .png.")
def stats(
    trace: Path, profile: str, node_dram: int, pool_bytes: int | None, pool_blocks: int | None,
    json_file: Path | None, plot_file: Path | None, **words: Any,
) -> None:  # fmt: skip
    """Describe TRACE: arrivals, lengths, shared blocks, what pools of several sizes have of each prompt."""
    check_plot(plot_file)
    if pool_bytes and pool_blocks:
        raise ConfigError("--pool-bytes and --pool-blocks name one pool: leave out one of them")
    read, kv = chosen_trace(trace, words), named_profile(profile).model.kv
    if not kv:
        raise ConfigError(f"--profile {profile}: it does not say how large KV is; measure it anew")
    block_bytes = BlockLayout(kv[0], kv[1], read.block_tokens, kv[2], kv[3]).nbytes
    pools = {"one node": node_dram // block_bytes, "pool": pool_blocks or (pool_bytes or 0) // block_bytes}
    found = stats_of(read, block_bytes, {name: blocks for name, blocks in pools.items() if blocks})
    _show(found)
    if json_file is not None:
        write_out("--json", json_file, (json.dumps({"trace": trace.name, **found}, indent=2) + "\n").encode())
    if plot_file is not None:
        write_out("--plot", plot_file, draw(read, found, plot_file.suffix))


def _show(found: dict[str, Any]) -> None:
    say, gib = partial(wide_console().print, highlight=False), found["block_bytes"] / GIB
    rate, bursts, blocks = found["requests_per_s"], found["burstiness"], found["blocks"]
    mean = "all at once" if rate["mean"] is None else f"{rate['mean']:.2f} requests/s"
    peak = f", at most {max(rate['over_time']):.2f} in a 60th of it"
    say(f"{found['requests']:,} requests in {found['duration_s']:,.0f} s: {mean}{peak}")
    values = {name.replace("_", " "): "-" if one is None else f"{one:.2f}" for name, one in bursts.items()}
    told = ", ".join(f"{name} {value}" for name, value in values.items())
    say(f"burstiness, 1 for a Poisson process: {told}")
    table = plain_table("", *COLUMNS, left={""})
    rows = {name: found[name] for name in ("input_length", "output_length", "reuse_gap_s")}
    for window_s, one in found["working_set"].items():
        rows[f"working set of {window_s} s, GiB"] = {key: one[key] and gib * one[key] for key in COLUMNS}
    for name, row in rows.items():
        table.add_row(name, *("-" if row[key] is None else _short(row[key]) for key in COLUMNS))
    say(table)
    most = ", ".join(f"{one['id']} ({one['references']:,} times)" for one in blocks["most_hit"])
    say(
        f"blocks of {found['block_tokens']} tokens and {found['block_bytes'] / 2**20:,.4g} MiB: "
        f"{blocks['references']:,} references to {blocks['unique']:,} blocks, of which "
        f"{blocks['seen_once']:.1%} are seen once" + f"\nmost references: {most}" * (blocks["seen_once"] < 1)
    )
    _show_reuse(found, gib)


def _show_reuse(found: dict[str, Any], gib: float) -> None:
    """Print what pools have of prompts, and what one more GiB buys."""
    say, curve = partial(wide_console().print, highlight=False), found["curve"]
    head = "share of a prompt that is there"
    table = plain_table(head, "GiB", "all tokens", "no token", *(f"p{one}" for one in SHOWN), left={head})
    for name, one in found["reuse"].items():
        size = "-" if one["blocks"] is None else _short(gib * one["blocks"])
        shares = [one["tokens"], one["requests"], *(one["percentiles"][place] for place in SHOWN)]
        table.add_row(name, size, *(f"{share:.1%}" for share in shares))
    say(table)
    if curve is None:
        return
    sizes = curve["sizes"][::CURVE]
    table = plain_table("GiB of an LRU pool", *(_short(gib * one["blocks"]) for one in sizes))
    table.add_row("prompt tokens that it has", *(f"{one['share']:.1%}" for one in sizes))
    table.add_row("tokens that one more GiB adds", *(f"{one['tokens_per_gib']:,.0f}" for one in sizes))
    say(table)
    for name, words in KNEES.items():
        one = curve[name]
        say(f"{_short(gib * one['blocks'])} GiB: {one['share']:.1%} of prompt tokens, {words}")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
