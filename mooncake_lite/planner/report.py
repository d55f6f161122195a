"""Shows a plan: tables, JSON and a figure. Explained in docs/explain/planning.md."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lite.config.options import write_out
from mooncake_lite.config.progress import plain_table, wide_console
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner import roofline
from mooncake_lite.planner.answer import OFF, Simulated
from mooncake_lite.planner.jobs import Jobs
from mooncake_lite.planner.limits import Found, Limit, Nodes
from mooncake_lite.planner.prices import Cost, Prices
from mooncake_lite.planner.roofline import Roofline
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.figure import canvas, check_plot
from mooncake_lite.workloads.traces import Trace

FIGURE, ROOFLINE = "plan.svg", "roofline.svg"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan.

    guess      by closed forms; replayed: the smallest by replays; nodes: the answer
    replays    all candidates that were replayed
    load       nodes of each kind that are busy in the mean
    to_spare   how much faster requests could come, by closed forms, for the nodes of each kind
    dram       bytes of each node that prefills, with which the limits are still kept in replays
    off        (assumption, factor) -> the answer of replays if it is off by that; None: no cluster would do
    """

    cluster: Cluster
    trace: Trace
    jobs: Jobs
    ttft: Limit
    tbt: Limit
    guess: Nodes
    replayed: Found
    simulated: Simulated | None
    nodes: Nodes
    replays: Mapping[Nodes, Found]
    load: tuple[float, float]
    to_spare: tuple[float, float]
    dram: int
    off: Mapping[tuple[str, float], Nodes | None]
    prices: Prices
    cost: Cost
    roofline: Roofline
    warnings: list[str]

    @property
    def is_confirmed(self) -> bool:
        """Tell whether a simulation kept the limits."""
        return self.simulated is not None and self.simulated.best is not None

    @property
    def balance(self) -> float:
        """Return the nodes that prefill for each that decodes where both have as much to spare."""
        return self.nodes[0] / self.nodes[1] * self.to_spare[1] / max(self.to_spare[0], 1e-9)

    def frontier(self) -> list[Found]:
        """Return the answer and its neighbours, simulated ones in place of replayed ones, by nodes."""
        found = {**self.replays, **(self.simulated.found if self.simulated else {})}
        prefills, decodes = self.nodes
        near = [
            one for one in found.values() if abs(one.nodes[0] - prefills) + abs(one.nodes[1] - decodes) <= 2
        ]
        return sorted(near, key=lambda one: (sum(one.nodes), one.nodes))


def name_of(nodes: Nodes) -> str:
    """Return nodes as `simulate cluster --nodes` takes them."""
    return f"{nodes[0]}P{nodes[1]}D"


def check(folder: Path | None) -> None:
    """Raise ConfigError, with the fix, where a figure cannot be drawn."""
    if folder is not None:
        check_plot(folder / FIGURE)


def show(answer: Planned) -> None:
    """Print a plan."""
    console, jobs = wide_console(), answer.jobs
    reused = float(jobs.cached.sum() / jobs.tokens.sum())
    how = "simulated" if answer.is_confirmed else "by replays of queues, not simulated"
    if answer.simulated is not None and not answer.is_confirmed:
        how = "by replays of queues; no simulation kept the limits"
    (prefills, decodes), faster = answer.nodes, answer.to_spare
    cost = answer.cost
    lines: list[Any] = [
        f"{len(jobs):,} requests, {jobs.rate:.3g} per second: {jobs.tokens.mean():,.0f} tokens in, of which "
        f"{reused:.0%} are reused, {jobs.answer.mean():,.0f} out",
        f"[bold]smallest cluster: {name_of(answer.nodes)}[/bold], {prefills} nodes that prefill "
        f"and {decodes} that decode ({how})",
        _candidates(answer),
        f"load: prompts keep {answer.load[0]:.2f} of {prefills} nodes busy, sequences "
        f"{answer.load[1]:.2f} of {decodes}",
        f"closed forms alone say {name_of(answer.guess)}; by them requests could come {faster[0]:.2f} times "
        f"as fast for the nodes that prefill, {faster[1]:.2f} times for those that decode: "
        f"{answer.balance:.2g} to 1 would balance them",
        *_more(answer),
        f"cost: {cost.per_hour:,.4g} {answer.prices.currency} an hour; {cost.per_million_input:.3g} per "
        f"million tokens in, {cost.per_million_output:.3g} per million out",
        _roofline(answer.roofline, answer.tbt),
        _assumed(answer),
    ]
    for line in [*lines, *([_off(answer)] if answer.off else [])]:
        console.print(line, highlight=False)
    for warning in answer.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)


def _more(answer: Planned) -> list[str]:
    """Say how much memory is enough, where that was looked for."""
    if answer.simulated is None:
        return []
    return [
        f"memory of the pool: {answer.dram / 1e9:,.3g} of {answer.cluster.node_bytes / 1e9:,.4g} GB on each "
        "node that prefills keep the limits"
    ]


def _candidates(answer: Planned) -> Any:
    table = plain_table(
        "cluster", "how", "TTFT mean, s", "p90", f"within {answer.ttft}", "gaps p90, s",
        f"within {answer.tbt}", "what is in the way", left={"cluster", "how", "what is in the way"},
    )  # fmt: skip
    for one in answer.frontier():
        table.add_row(
            name_of(one.nodes), one.how, f"{one.ttft_s[0]:.3f}", f"{one.ttft_s[1]:.3f}", f"{one.ttft:.1%}",
            f"{one.tbt_s[1]:.3f}", f"{one.tbt:.1%}", one.lacks(answer.ttft, answer.tbt) or "nothing",
        )  # fmt: skip
    return table


def _roofline(line: Roofline, limit: Limit) -> str:
    chunks = "no chunk of a prompt"
    if line.chunk_tokens:
        longer = f"{1 + line.slowdown:.2f} times as long"
        chunks = f"chunks of {line.chunk_tokens} tokens, in which a prompt takes {longer}"
    return (
        f"roofline: KV of the median prompt, {line.tokens:,} tokens, is loaded faster than computed above "
        f"{line.least_bytes_per_s / 1e9:.2g} GB/s; moving prefixes is {line.transfer_share:.0%} of prompts' "
        f"time; nodes that do both would keep gaps within {limit.seconds * 1e3:g} ms with {chunks}"
    )


def _assumed(answer: Planned) -> str:
    words = [f"{name} {rate * 8 / 1e9:g} Gbit/s (guessed)" for name, rate in answer.cluster.guesses.items()]
    if answer.simulated is not None and answer.simulated.outside:
        words.append(f"{answer.simulated.outside:.0%} of decode passes (extrapolated)")
    if answer.cluster.profile.overheads is None:
        words.append("overheads of the program (guessed)")
    return f"not measured by the profile: {', '.join(words) or 'nothing'}"


def _off(answer: Planned) -> Any:
    names = list(dict.fromkeys(name for name, _ in answer.off))
    table = plain_table(
        "if these take", f"{OFF:.0%} less", "as assumed", f"{OFF:.0%} more", left={"if these take"}
    )
    for name in names:
        cells = [answer.off[name, factor] for factor in (1 - OFF, 1 + OFF)]
        less, more = ("none" if one is None else name_of(one) for one in cells)
        table.add_row(name, less, name_of(answer.nodes), more)
    return table


def to_dict(answer: Planned) -> dict[str, Any]:
    """Return a plan for JSON."""
    jobs = answer.jobs
    return {
        "nodes": {"prefill": answer.nodes[0], "decode": answer.nodes[1]},
        "confirmed": answer.is_confirmed,
        "slo": {"ttft": asdict(answer.ttft), "tbt": asdict(answer.tbt)},
        "workload": {
            "requests": len(jobs), "requests_per_s": jobs.rate,
            "input_tokens": float(jobs.tokens.mean()), "output_tokens": float(jobs.answer.mean()),
            "reused": float(jobs.cached.sum() / jobs.tokens.sum()),
        },
        "closed_forms": answer.guess,
        "candidates": [asdict(one) for one in answer.frontier()],
        "load": answer.load,
        "to_spare": answer.to_spare,
        "balance": answer.balance,
        "node_dram_bytes": answer.dram,
        "cost": {**msgspec.structs.asdict(answer.cost), "currency": answer.prices.currency},
        "roofline": asdict(answer.roofline),
        "guessed": answer.cluster.guesses,
        "extrapolated": {"decode": answer.simulated.outside if answer.simulated else None},
        "off": [{"what": one[0], "factor": one[1], "nodes": nodes} for one, nodes in answer.off.items()],
        "warnings": answer.warnings,
    }  # fmt: skip


def draw(answer: Planned, folder: Path) -> None:
    """Draw the shares within each limit over the nodes of its kind, and the roofline."""
    file = io.BytesIO()
    with canvas(file, ".svg", "plan", (6, 5), 2, shared=False) as panels:
        for kind, (axes, limit) in enumerate(zip(panels, (answer.ttft, answer.tbt))):
            for found, style in (
                (list(answer.replays.values()), "ko-"),
                (list(answer.simulated.found.values()) if answer.simulated else [], "rs"),
            ):
                row = sorted((one.nodes[kind], one.tbt if kind else one.ttft) for one in found)
                if row:
                    xs, ys = zip(*row)
                    axes.plot(
                        xs, ys, style, fillstyle="none", label=found[0].how.replace("stopped", "simulated")
                    )
            axes.axhline(limit.share, linestyle=":")
            axes.set(
                xlabel=f"nodes that {'decode' if kind else 'prefill'}",
                ylabel=f"within {limit.seconds * 1e3:g} ms",
            )
            axes.legend()
    write_figures(folder, {FIGURE: file.getvalue(), ROOFLINE: roofline.draw(answer.cluster, answer.roofline)})


def write_figures(folder: Path, figures: Mapping[str, bytes]) -> None:
    """Write files into the folder of --plot, which is made. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {folder}: {(error.strerror or str(error)).lower()}") from None
    for name, content in figures.items():
        write_out("--plot", folder / name, content)
