"""`mooncake-lite simulate policies` and `simulate admission`: tables, JSON and figures of experiments.

Mounted by `simulator/command.py`. Checks options and shows results; the experiments are in
`compare_policies.py` and `compare_admission.py`. Explained in docs/explain/experiments.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from math import isfinite
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.machine import now
from mooncake_lite.config.options import OUT_FILE, Command, with_options, write_out
from mooncake_lite.config.progress import counted, plain_table, wide_console
from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator import compare_admission, compare_policies
from mooncake_lite.simulator.compare import Columns, Comparison
from mooncake_lite.simulator.experiment_figures import draw_admission, draw_policies
from mooncake_lite.simulator.figure import check_plot
from scheduler.admission import ADMISSIONS
from scheduler.placement import POLICIES

PROFILE = "LLaMA3-70B-8xA800"
"""The machines of the paper."""

MOST = 1_000
"""Most nodes of a kind, and most seeds."""


def _options(prefills: int, decodes: int) -> Callable[[Command], Command]:
    """Add the options that both commands have."""
    count = click.IntRange(1, MOST)
    return with_options(
        click.option(
            "--seeds", default=10, show_default=True, type=count, help="Runs of each, with other requests."
        ),
        click.option(
            "--requests", default=1_000, show_default=True, type=click.IntRange(20, 1_000_000),
            help="Requests of a run. The first quarter warms up, and does not count.",
        ),
        click.option(
            "--prefills", default=prefills, show_default=True, type=count,
            help="Nodes that prefill and hold a part of the pool.",
        ),
        click.option("--decodes", default=decodes, show_default=True, type=count, help="Nodes that decode."),
        click.option("--json", "json_file", type=OUT_FILE, help="Write the result to this file."),
        click.option("--plot", "plot_file", type=OUT_FILE, help="Draw the result, .svg or .png."),
    )  # fmt: skip


@click.command()
@click.option(
    "--policy",
    "words",
    default=",".join(compare_policies.SLOWEST_FIRST),
    show_default=True,
    help="Placement policies, the slowest first as you expect it.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, 1e6, min_open=True),
    help="Requests per second.  [default: 0.8 of the best capacity, which is searched]",
)
@_options(prefills=4, decodes=4)
def policies(
    words: str,
    rate: float | None,
    seeds: int,
    requests: int,
    prefills: int,
    decodes: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Compare placement policies on modelled machines: mean time to first token by policy and seed.

    The control plane is the live one. Requests are conversations that share documents; see
    docs/explain/experiments.md.
    """
    names = parse_names("--policy", words, POLICIES)
    check_plot(plot_file)
    experiment = compare_policies.experiment_of(named_profile(PROFILE), prefills, decodes, requests)
    numbers = range(1, seeds + 1)
    with counted("runs", compare_policies.runs_at_most(len(names), seeds, rate)) as told:
        result = compare_policies.compare(experiment, names, numbers, rate, told)
    show(f"at {result.rate:.2f} requests/s, {seeds} seeds", result, compare_policies.columns(result))
    pairs = compare_policies.pairs(result)
    for pair in pairs:
        click.echo(f"{pair['slower']} is slower than {pair['faster']} for {pair['seeds']} of {seeds} seeds")
    save(json_file, {**result.to_dict(), "pairs": pairs}, requests, prefills, decodes)
    if plot_file is not None:
        write_out("--plot", plot_file, draw_policies(result, plot_file.suffix))


@click.command()
@click.option(
    "--admission",
    "words",
    default=",".join(compare_admission.FORMS),
    show_default=True,
    help="Forms of admission.",
)
@click.option(
    "--rate",
    default=compare_admission.RATE,
    show_default=True,
    type=click.FloatRange(0, 1e6, min_open=True),
    help="Requests per second.",
)
@_options(prefills=16, decodes=1)
def admission(
    words: str,
    rate: float,
    seeds: int,
    requests: int,
    prefills: int,
    decodes: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Compare forms of admission under overload on modelled machines: goodput, and swings of the load.

    The control plane is the live one. Requests have long prompts and short answers; see
    docs/explain/experiments.md.
    """
    names = parse_names("--admission", words, ADMISSIONS)
    check_plot(plot_file)
    experiment = compare_admission.experiment_of(named_profile(PROFILE), prefills, decodes, requests, rate)
    with counted("runs", len(names) * seeds) as told:
        result = compare_admission.compare(experiment, names, range(1, seeds + 1), told)
    show(f"at {rate:.2f} requests/s, medians of {seeds} seeds", result, compare_admission.COLUMNS)
    calmer = result.less("decode_swing", "predictive", "early-rejection")
    if calmer is not None:
        click.echo(f"predictive swings less than early-rejection for {calmer} of {seeds} seeds")
    save(json_file, result.to_dict(), requests, prefills, decodes)
    if plot_file is not None:
        write_out("--plot", plot_file, draw_admission(result, plot_file.suffix))


def parse_names(option: str, words: str, known: Collection[str]) -> list[str]:
    """Return names between commas, each once. Raises ConfigError for one that is not known."""
    names = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {words}: there is no {name!r}; choose from {', '.join(known)}")
    if not names:
        raise ConfigError(f"{option} {words!r} names none; choose from {', '.join(known)}")
    return names


def show(title: str, result: Comparison, columns: Columns) -> None:
    """Print a table: the first column is left-aligned, numbers are right-aligned."""
    console = wide_console()
    console.print(title, highlight=False)
    table = plain_table(result.varied, *columns, left={result.varied})
    for row in result.table(columns):
        table.add_row(*row)
    console.print(table)


def save(file: Path | None, result: dict[str, Any], requests: int, prefills: int, decodes: int) -> None:
    """Write a result as JSON, with the date, the profile and the cluster; without a file, write nothing."""
    if file is not None:
        about = {
            "date": now(),
            "profile": PROFILE,
            "requests": requests,
            "prefills": prefills,
            "decodes": decodes,
        }
        whole = finite({**about, **result})
        write_out("--json", file, (json.dumps(whole, indent=2, allow_nan=False) + "\n").encode())


def finite(value: Any) -> Any:
    """Return a value with None in place of numbers that JSON does not have: a mean of nothing, for one."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
