"""`mooncake-lite workload`: describes a trace. `workload_make.py` has its commands that write one.

Mounted by `mooncake_lite.cli`. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import OUT_FILE, write_out
from mooncake_lite.config.progress import plain_table, wide_console
from mooncake_lite.simulator.figure import check_plot
from mooncake_lite.tools.workload_make import convert, make, merge
from mooncake_lite.tools.workload_stats import draw, stats_of
from mooncake_lite.workloads.options import DIVIDE_LENGTHS, form_options, known_trace
from mooncake_lite.workloads.rescale import divided

COLUMNS = ("mean", "p50", "p90", "p99", "max")


@click.group()
def workload() -> None:
    """Describe, make, convert and merge traces. What is written has Mooncake's form: JSON lines."""


@workload.command()
@click.argument("trace", type=click.Path(path_type=Path))
@DIVIDE_LENGTHS
@form_options
@click.option("--json", "json_file", type=OUT_FILE, help="Write the result to FILE.")
@click.option("--plot", "plot_file", type=OUT_FILE, help="Draw lengths, arrivals and hits, .svg or .png.")
def stats(
    trace: Path, divide_lengths: int, json_file: Path | None, plot_file: Path | None, **words: Any
) -> None:
    """Describe TRACE: arrivals, lengths, shared blocks, and hits by the size of a pool."""
    check_plot(plot_file)
    read = divided(known_trace(trace, words), divide_lengths)
    found = stats_of(read)
    _show(found)
    if json_file is not None:
        write_out("--json", json_file, (json.dumps({"trace": trace.name, **found}, indent=2) + "\n").encode())
    if plot_file is not None:
        write_out("--plot", plot_file, draw(read, found, plot_file.suffix))


def _show(found: dict[str, Any]) -> None:
    console, blocks, rate = wide_console(), found["blocks"], found["requests_per_s"]
    table = plain_table("", *COLUMNS, left={""})
    for name in ("input_length", "output_length", "reuse_gap_s"):
        cells = ["-" if found[name][key] is None else f"{found[name][key]:,.0f}" for key in COLUMNS]
        table.add_row(name, *cells)
    most = ", ".join(f"{one['id']} ({one['references']:,} times)" for one in blocks["most_hit"])
    pools = plain_table("blocks of the pool", *(f"{one['blocks']:,}" for one in found["hits"]))
    pools.add_row("references that hit, LRU", *(f"{one['hit_rate']:.4f}" for one in found["hits"]))
    mean = "all at once" if rate["mean"] is None else f"{rate['mean']:.2f} requests/s"
    peak = f", at most {max(rate['over_time']):.2f} in a 60th of it"
    lines = (
        f"{found['requests']:,} requests in {found['duration_s']:,.0f} s: {mean}{peak}",
        table,
        f"blocks of {found['block_tokens']} tokens: {blocks['references']:,} references to "
        f"{blocks['unique']:,} blocks, of which {blocks['seen_once']:.1%} are seen once",
        f"most references: {most}",
        f"prompt tokens that a pool without a limit has: {found['token_hit_share']:.1%}",
        pools,
    )
    for line in lines:
        console.print(line, highlight=False)


for command in (make, convert, merge):
    workload.add_command(command)
