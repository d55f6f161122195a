"""Shows a plan: tables, JSON and a figure. Explained in docs/explain/planning.md."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lite.config.options import write_out
from mooncake_lite.config.progress import plain_table, wide_console
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner import roofline
from mooncake_lite.planner.answer import OFF, Planned
from mooncake_lite.planner.limits import Nodes
from mooncake_lite.planner.prices import Prices, cost_of
from mooncake_lite.planner.roofline import Roofline
from mooncake_lite.simulator.figure import canvas, check_plot

FIGURE, ROOFLINE = "plan.svg", "roofline.svg"

TURNS = {
    "output_tokens": "answers of about {:,.0f} tokens", "reused": "{:.0%} of reuse",
    "link_gbps": "links of {:,.0f} Gbit/s",
}  # fmt: skip


def name_of(nodes: Nodes) -> str:
    """Return nodes as `simulate cluster --nodes` takes them."""
    return f"{nodes[0]}P{nodes[1]}D"


def check(folder: Path | None) -> None:
    """Raise ConfigError, with the fix, where a figure cannot be drawn."""
    if folder is not None:
        check_plot(folder / FIGURE)


def show(answer: Planned, prices: Prices) -> None:
    """Print a plan."""
    console, jobs, load, faster = wide_console(), answer.first.jobs, answer.first.load(), answer.to_spare
    failed = "; no simulation kept the limits" if answer.simulated else ", not simulated"
    how = "simulated" if answer.is_confirmed else f"by replays of queues{failed}"
    (prefills, decodes), cost = answer.nodes, cost_of(prices, answer.nodes, answer.dram, jobs)
    guess = f"closed forms keep a limit with no number of nodes; the load and one is {name_of(answer.guess)}"
    if answer.balance is not None:
        guess = (
            f"closed forms alone say {name_of(answer.guess)}; by them requests could come {faster[0]:.2f} "
            f"times as fast for the nodes that prefill, {faster[1]:.2f} times for those that decode: "
            f"{answer.balance:.2g} to 1 would balance them"
        )
    memory = (
        f"memory of the pool: {answer.dram / 1e9:,.3g} of {answer.search.cluster.node_bytes / 1e9:,.4g} GB "
        "on each node that prefills keep the limits"
    )
    for line in (
        f"{len(jobs):,} requests, {jobs.rate:.3g} per second: {jobs.tokens.mean():,.0f} tokens in, of which "
        f"{jobs.reused:.0%} are reused, {jobs.answer.mean():,.0f} out",
        f"[bold]smallest cluster: {name_of(answer.nodes)}[/bold], {prefills} nodes that prefill "
        f"and {decodes} that decode ({how})",
        _candidates(answer),
        f"load: prompts keep {load[0]:.2f} of {prefills} nodes busy, sequences {load[1]:.2f} of {decodes}",
        guess,
        memory if answer.simulated and answer.dram else None,
        f"cost: {cost.per_hour:,.4g} {prices.currency} an hour; {cost.per_million_input:.3g} per "
        f"million tokens in, {cost.per_million_output:.3g} per million out",
        _roofline(answer.roofline),
        _assumed(answer),
        _off(answer) if answer.off else None,
    ):
        if line is not None:
            console.print(line, highlight=False)
    for warning in answer.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)


def _candidates(answer: Planned) -> Any:
    ttft, tbt = answer.search.limits
    table = plain_table(
        "cluster", "how", "TTFT mean, s", "p90", f"within {ttft}", "gaps p90, s", f"within {tbt}",
        "what is in the way", left={"cluster", "how", "what is in the way"},
    )  # fmt: skip
    for one in answer.frontier():
        mean, high, gaps = (f"{each:.3f}" for each in (*one.ttft_s, one.tbt_s[1]))
        if one.how == "stopped":  # these are of its first requests alone
            mean = high = gaps = "–"
        table.add_row(
            name_of(one.nodes), one.how, mean, high, f"{one.ttft:.1%}", gaps, f"{one.tbt:.1%}",
            one.lacks(ttft, tbt) or "nothing",
        )  # fmt: skip
    return table


def _roofline(line: Roofline) -> str:
    both = [
        f"{rate:.3g} with {f'chunks of {chunk:,}' if chunk else 'whole prompts'}"
        f"{base and f' (base of a mixed pass: {base})'}"
        for base, (rate, chunk) in line.ways.both.items()
    ]
    turns = [TURNS[what].format(value) for what, value in line.ways.turns.items() if value is not None]
    return (
        f"roofline: KV of the median prompt, {line.tokens:,} tokens, is loaded faster than computed above "
        f"{line.least_bytes_per_s / 1e9:.2g} GB/s; moving prefixes is {line.transfer_share:.0%} of prompts' "
        f"time; by closed forms as many nodes carry {line.ways.split_rps:.3g} requests/s, and nodes that do "
        f"both {', or '.join(both)}; {' or '.join(turns) or 'no answers, reuse or links'} would turn that"
    )


def _assumed(answer: Planned) -> str:
    cluster = answer.search.cluster
    words = [f"{name} {rate * 8 / 1e9:g} Gbit/s (guessed)" for name, rate in cluster.guesses.items()]
    if answer.outside:
        words.append(f"{answer.outside:.0%} of decode passes (extrapolated)")
    if cluster.profile.overheads is None:
        words.append("overheads of the program (guessed)")
    return f"not measured by the profile: {', '.join(words) or 'nothing'}"


def _off(answer: Planned) -> Any:
    heads = "if these take", f"{OFF:.0%} less", "as assumed", f"{OFF:.0%} more"
    table = plain_table(*heads, left={"if these take"})
    for name in dict.fromkeys(name for name, _ in answer.off):
        less, more = (answer.off[name, factor] for factor in (1 - OFF, 1 + OFF))
        table.add_row(name, *("none" if one is None else name_of(one) for one in (less, answer.nodes, more)))
    return table


def to_dict(answer: Planned, prices: Prices) -> dict[str, Any]:
    """Return a plan for JSON."""
    jobs = answer.first.jobs
    cost = cost_of(prices, answer.nodes, answer.dram, jobs)
    return {
        "nodes": {"prefill": answer.nodes[0], "decode": answer.nodes[1]},
        "confirmed": answer.is_confirmed,
        "slo": {name: asdict(limit) for name, limit in zip(("ttft", "tbt"), answer.search.limits)},
        "workload": {
            "requests": len(jobs), "requests_per_s": jobs.rate, "reused": jobs.reused,
            "input_tokens": float(jobs.tokens.mean()), "output_tokens": float(jobs.answer.mean()),
        },
        "closed_forms": answer.guess,
        "candidates": [asdict(one) for one in answer.frontier()],
        "load": answer.first.load(),
        "to_spare": answer.to_spare,
        "balance": answer.balance,
        "node_dram_bytes": answer.dram,
        "cost": {**msgspec.structs.asdict(cost), "currency": prices.currency},
        "roofline": asdict(answer.roofline),
        "guessed": answer.search.cluster.guesses,
        "extrapolated": {"decode": answer.outside},
        "off": [{"what": one[0], "factor": one[1], "nodes": nodes} for one, nodes in answer.off.items()],
        "warnings": answer.warnings,
    }  # fmt: skip


def draw(answer: Planned, folder: Path) -> None:
    """Draw the shares within each limit over the nodes of its kind, and the roofline."""
    file, cluster = io.BytesIO(), answer.search.cluster
    ways = ((answer.search.found, "ko-", "replayed"), (answer.simulated, "rs", "simulated"))
    with canvas(file, ".svg", "plan", (6, 5), 2, shared=False) as panels:
        for kind, (axes, limit) in enumerate(zip(panels, answer.search.limits)):
            for found, style, label in ways:
                if row := sorted((nodes[kind], one.shares[kind]) for nodes, one in found.items()):
                    axes.plot(*zip(*row), style, fillstyle="none", label=label)
            axes.axhline(limit.share, linestyle=":")
            what = f"nodes that {'decode' if kind else 'prefill'}"
            axes.set(xlabel=what, ylabel=f"within {limit.seconds * 1e3:g} ms")
            axes.legend()
    write_figures(folder, {FIGURE: file.getvalue(), ROOFLINE: roofline.draw(cluster, answer.roofline)})


def write_figures(folder: Path, figures: Mapping[str, bytes]) -> None:
    """Write files into the folder of --plot, which is made. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {folder}: {(error.strerror or str(error)).lower()}") from None
    for name, content in figures.items():
        write_out("--plot", folder / name, content)
