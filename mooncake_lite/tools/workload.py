"""`mooncake-lite workload`: describes a trace, and makes traces from the simulator's conversations.

Mounted by `mooncake_lite.cli`. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import OUT_FILE, NumberRange, write_out
from mooncake_lite.config.progress import plain_table, wide_console
from mooncake_lite.simulator.figure import check_plot
from mooncake_lite.simulator.sessions import SessionMix, Sessions
from mooncake_lite.tools.workload_stats import draw, stats_of
from mooncake_lite.workloads.options import DIVIDE_LENGTHS
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace, TraceRequest, read_trace, write_trace

COLUMNS = ("mean", "p50", "p90", "p99", "max")


@click.group()
def workload() -> None:
    """Describe and make traces: files of JSON lines as Mooncake publishes them."""


@workload.command()
@click.argument("trace", type=click.Path(path_type=Path))
@DIVIDE_LENGTHS
@click.option("--json", "json_file", type=OUT_FILE, help="Write the result to FILE.")
@click.option("--plot", "plot_file", type=OUT_FILE, help="Draw lengths, arrivals and hits, .svg or .png.")
def stats(trace: Path, divide_lengths: int, json_file: Path | None, plot_file: Path | None) -> None:
    """Describe TRACE: arrivals, lengths, shared blocks, and hits by the size of a pool."""
    check_plot(plot_file)
    read = divided(read_trace(trace), divide_lengths)
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


@workload.group()
def make() -> None:
    """Make a trace."""


@make.command()
@click.option("--requests", default=1_000, show_default=True, type=click.IntRange(1, 10_000_000))
@click.option(
    "--rate",
    default=1.0,
    show_default=True,
    type=NumberRange(1e-6, 1e6),
    help="Requests per second, after a few minutes.",
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**63 - 1))
@click.option("--out", required=True, type=OUT_FILE, help="Write the trace to FILE.")
def sessions(requests: int, rate: float, seed: int, out: Path) -> None:
    """Make conversations about documents that they share. Equal options give equal files."""
    write_out("--out", out, write_trace(sessions_of(requests, rate, seed)))


def sessions_of(num_requests: int, rate: float, seed: int) -> Trace:
    """Make a trace. Ids are numbers in the order in which blocks come; a partial block is never shared."""
    source, ids = Sessions(seed, num_requests, rate, SessionMix(), BLOCK_TOKENS), dict[int, int]()
    fresh, now_s, made = 0, 0.0, list[TraceRequest]()
    for _ in range(num_requests):
        request = source.next()
        now_s += request.after_s
        length, named = len(request.token_ids), list[int]()
        for key in [*request.keys, *([None] if length % BLOCK_TOKENS else [])]:
            number = fresh if key is None else ids.setdefault(key, fresh)
            fresh += number == fresh
            named.append(number)
        made.append(TraceRequest(round(now_s * 1e3), length, request.most_tokens, named))
    return Trace(made)
