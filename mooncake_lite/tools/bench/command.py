"""`mooncake-lite bench WHAT`: measures, prints a table, writes JSON.

Mounted by `mooncake_lite.cli`. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import OUT_FILE, write_out

PLAIN_WIDTH = 170
"""Columns when the output is not a terminal: a row stays a line."""

SUBJECTS = (
    *("kernels", "transport", "store", "scheduler", "engine"),
    *("ideas", "predictions", "simulator", "goodput", "faults"),
)


@click.command()
@click.argument("what", type=click.Choice(SUBJECTS))
@click.option("--quick", is_flag=True, help="Fewer runs: within a minute; ideas, with clusters: in a few.")
@click.option("--json", "file", type=OUT_FILE, help="Write the result to FILE.")
def bench(what: str, quick: bool, file: Path | None) -> None:
    """Measure WHAT beside a peer and a limit of this machine, in the same run.

    ideas: measure each idea of the engine beside the same engine without it.

    predictions: compare predicted with measured times to first token.

    simulator: compare simulated with measured latencies of a cluster of sleeping ranks.

    goodput: measure a cluster of sleeping ranks below and above its capacity, by form of admission.

    faults: kill ranks and gateways under eight streams, and measure how long the streams pause.
    """
    from mooncake_lite.config.machine import machine
    from mooncake_lite.tools.bench import result

    measured_on = machine()
    rows = importlib.import_module(f"mooncake_lite.tools.bench.{what}").run(quick)
    found = result.report(rows, measured_on)
    show(found)
    if warning := result.busy(found):
        click.echo(f"mooncake-lite: note: {warning}", err=True)
    if file is not None:
        write_out("--json", file, json.dumps(found, indent=2).encode() + b"\n")


def show(found: dict[str, Any]) -> None:
    """A table on stdout."""
    from mooncake_lite.config.progress import plain_table, wide_console

    published = [row for row in found["rows"] if row.get("published")]
    names = ("", "unit", "ours", "beside", "its figure", "ratio", "limit", "share of it", "published")
    table = plain_table(*(names if published else names[:-1]), left=("", "unit", "beside"))
    for row in found["rows"]:
        ours, peer, ratio, limit, share = map(_figure, _cells(row))
        beside = row["peer"]["name"] if row["peer"] else ""
        first, *others = [_figure(other["value"]) for other in row.get("published", [])] or [""]
        cells = [row["name"], row["unit"], ours, beside, peer, ratio, limit, share]
        table.add_row(*cells, *([first] if published else []))
        for other in others:
            table.add_row(*[""] * len(cells), other)
    console = wide_console(PLAIN_WIDTH)
    console.print(table)
    for name in dict.fromkeys(row["limit"]["name"] for row in found["rows"] if row["limit"]):
        console.print(f"limit: {name}", highlight=False, markup=False)
    for line in dict.fromkeys(line for row in published for line in _published(row)):
        console.print(line, highlight=False, markup=False)
    for note in dict.fromkeys(row["note"] for row in found["rows"] if row.get("note")):
        console.print(f"no peer: {note}", highlight=False, markup=False)


def _cells(row: dict[str, Any]) -> list[float | None]:
    peer, limit = row["peer"] or {}, row["limit"] or {}
    compared = [peer.get("value"), row["ratio_to_peer"], limit.get("value"), row["ratio_to_limit"]]
    return [row["ours"], *compared]


def _published(row: dict[str, Any]) -> list[str]:
    return [
        f"published, not measured here: {_figure(other['value'])} {row['unit']}, {other['name']}"
        for other in row["published"]
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
