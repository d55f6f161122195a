"""`mooncake-lite plan --compare`: its options, and its results as a table, JSON and a figure.

Used by `command.py`; `compare.py` compares. Explained in docs/explain/comparison.md.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.options import with_options
from mooncake_lite.config.progress import counted, plain_table, wide_console
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner.compare import STEP, SYSTEMS, Question, Result, compare, contenders, ranks
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Limit
from mooncake_lite.planner.report import write_figures
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.figure import canvas
from mooncake_lite.simulator.sweep import processes
from mooncake_lite.workloads.traces import Trace

FIGURE = "comparison.svg"
MOST_REQUESTS = 2_000

compare_options = with_options(
    click.option("--compare", is_flag=True, help="Compare ways to serve on as many nodes, each at its best."),
    click.option("--nodes", type=click.IntRange(2, 64),
                 help="With --compare: of each way to serve; no plan is made.  [default: the plan's]"),
    click.option("--system", "systems", type=click.Choice(SYSTEMS), multiple=True,
                 help="With --compare: this way to serve alone. May be given several times."),
    click.option("--seeds", type=click.IntRange(3, 100), default=3, show_default=True,
                 help="With --compare: runs with other arrivals, from which spreads follow."),
)  # fmt: skip
"""Adds the options of a comparison."""


def check(trace: Trace, words: dict[str, Any]) -> None:
    """Raise ConfigError, with the fix, for options that contradict each other, and for a long trace."""
    if (words["nodes"] or words["systems"]) and not words["compare"]:
        raise ConfigError("--nodes and --system belong to --compare: add it, or leave them out")
    if words["compare"] and len(trace.requests) > MOST_REQUESTS:
        raise ConfigError(
            f"--compare plays {MOST_REQUESTS:,} requests at most, and there are {len(trace.requests):,}; add "
            f"--limit-requests {MOST_REQUESTS}"
        )


def compared(
    cluster: Cluster, trace: Trace, ttft: Limit, tbt: Limit, nodes: int, seeds: int, jobs: int | None,
    systems: Sequence[str] = SYSTEMS,
) -> list[Result]:  # fmt: skip
    """Compare ways to serve on so many nodes."""
    all_of_them = contenders(cluster, nodes)
    asked = [[one for one in chain if one.system in systems] for chain in all_of_them]
    with (
        counted("ways to serve", 2 * seeds * sum(map(len, asked))) as told,
        processes(jobs or usable_cores(), mpi=False) as executor,
    ):
        return compare(asked, Question(trace, ttft, tbt), jobs_of(trace).rate, seeds, executor, told)


def name_of(result: Result) -> str:
    """Return what tells a result from others."""
    return f"{result.system} ({result.mixed})" if result.mixed else result.system


def show(results: Sequence[Result], nodes: int, ttft: Limit, tbt: Limit) -> None:
    """Print the comparison with reuse, that without, and what cannot be told apart."""
    say = wide_console().print
    seeds = len(results[0].kept_rps)
    say(
        f"[bold]highest rate within {ttft} and {tbt} on {nodes} nodes[/bold], {seeds} seeds, in steps of "
        f"{STEP - 1:.0%}", highlight=False,
    )  # fmt: skip
    for reuse in (True, False):
        these = sorted((one for one in results if one.reuse is reuse), key=lambda one: -one.goodput_rps)
        what = "with reuse" if reuse else "without reuse"
        table = plain_table(
            what, "best as", "requests/s", "least-most", "per node", "rank", left={what, "best as"}
        )
        for one, (best, worst) in zip(these, ranks(these)):
            least, most = one.spread_rps
            table.add_row(
                name_of(one), one.configuration, f"{one.goodput_rps:.3f}", f"{least:.3f}-{most:.3f}",
                f"{one.goodput_rps / nodes:.3f}", f"{best}" if best == worst else f"{best}-{worst}",
            )  # fmt: skip
        say(table)
        alike = [
            f"{name_of(one)} and {name_of(other)}"
            for one, other in combinations(these, 2)
            if not (one.is_above(other) or other.is_above(one))
        ]
        if alike:
            say(f"not distinguishable: {'; '.join(alike)}", highlight=False, soft_wrap=True)


def to_dict(results: Sequence[Result], nodes: int) -> dict[str, Any]:
    """Return a comparison for JSON. ranks: among those with reuse, or among those without."""
    rows: list[dict[str, Any]] = []
    for reuse in (True, False):
        these = [one for one in results if one.reuse is reuse]
        for one, found in zip(these, ranks(these)):
            more = {"goodput_rps": one.goodput_rps, "spread_rps": one.spread_rps, "ranks": found}
            rows.append({**asdict(one), **more})
    return {"nodes": nodes, "step": STEP, "results": rows}


def draw(results: Sequence[Result], folder: Path) -> None:
    """Draw a bar for each way to serve, with reuse beside that without, and their spreads."""
    file = io.BytesIO()
    names = list(dict.fromkeys(map(name_of, results)))
    with canvas(file, ".svg", "comparison", (7, 0.8 + 0.5 * len(names))) as (axes,):
        for reuse, shift, color in ((True, -0.2, "0.35"), (False, 0.2, "0.75")):
            these = [one for one in results if one.reuse is reuse]
            places = [names.index(name_of(one)) + shift for one in these]
            rates = [one.goodput_rps for one in these]
            away = [
                [rate - one.spread_rps[0] for rate, one in zip(rates, these)],
                [one.spread_rps[1] - rate for rate, one in zip(rates, these)],
            ]
            label = "with reuse" if reuse else "without"
            axes.barh(places, rates, 0.38, xerr=away, color=color, label=label, capsize=3)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("highest rate within both limits, requests/s")
        axes.legend()
    write_figures(folder, {FIGURE: file.getvalue()})
