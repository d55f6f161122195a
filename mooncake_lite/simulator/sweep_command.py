"""`mooncake-lite simulate sweep`: many runs of `simulate cluster` as one table.

Mounted by `simulator/command.py`; `sweep.py` plays. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import click

from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.options import OUT_FILE, write_out
from mooncake_lite.config.progress import counted, plain_table, wide_console
from mooncake_lite.simulator.sweep import Sweep, play_sweep, processes, read_sweep

COLUMNS = {
    "TTFT, s": lambda result: result["ttft_s"]["mean"],
    "p99": lambda result: result["ttft_s"]["p99"],
    "TBT, s": lambda result: result["tbt_s"]["mean"],
    "within limits": lambda result: result["slo_share"],
    "goodput, requests/s": lambda result: result["goodput_rps"],
    "reused": lambda result: result["hit_rate"]["all"],
    "prefill, s": lambda result: result["prefill_s_per_request"],
}
"""Columns of the table: heading -> the number of a result; None without any request that was completed."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--trace", type=click.Path(path_type=Path), help="Play this trace in place of FILE's.")
@click.option("--jobs", type=click.IntRange(1, 4096), help="Runs at once.  [default: one per core]")
@click.option(
    "--mpi", is_flag=True, help="Run on the other ranks: mpirun ... python -m mpi4py.futures -m ..."
)
@click.option("--json", "json_file", type=OUT_FILE, help="Write all results to this file.")
def sweep(file: Path, trace: Path | None, jobs: int | None, mpi: bool, json_file: Path | None) -> None:
    """Play every combination of the options that FILE varies, for every seed, and print a table.

    FILE is TOML: `trace`, `seeds`, [cluster] with options of `simulate cluster`, and [vary] with lists of
    them. The table is the same whatever the number of processes. Ctrl-C keeps what is done.
    """
    wanted = read_sweep(file, trace)
    with counted("runs", len(wanted.runs)) as told, processes(jobs or usable_cores(), mpi=mpi) as executor:
        results = play_sweep(wanted, executor, told)
    show(wanted, results)
    done = sum(map(len, results))
    if json_file is not None:
        rows = [
            {"values": dict(zip(wanted.names, values)), "results": found}
            for (values, _), found in zip(wanted.rows, results)
        ]
        write_out("--json", json_file, (json.dumps({"rows": rows}, indent=1) + "\n").encode())
    if done < len(wanted.runs):
        raise click.ClickException(f"stopped after {done:,} of {len(wanted.runs):,} runs")


def show(wanted: Sweep, results: list[list[dict[str, Any]]]) -> None:
    """Print a row for each combination: means over its seeds, and least and most of the mean TTFT."""
    table = plain_table(*wanted.names, *COLUMNS, "TTFT, least-most", left=set(wanted.names))
    for (values, _), found in zip(wanted.rows, results):
        cells = [_mean([number(one) for one in found]) for number in COLUMNS.values()]
        ttfts = [one["ttft_s"]["mean"] for one in found if one["ttft_s"]["mean"] is not None]
        table.add_row(*map(str, values), *cells, f"{min(ttfts):.3f}-{max(ttfts):.3f}" if ttfts else "-")
    wide_console().print(table)


def _mean(numbers: list[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    return f"{mean(known):.3f}" if known else "-"
