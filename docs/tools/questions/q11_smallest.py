"""Question 11: how often closed forms, replays and a few simulations find the smallest cluster."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from time import process_time
from typing import Any

import numpy as np

from mooncake_lite.planner.answer import MOST_SIMULATIONS, best_of, wanted
from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Found as Candidate
from mooncake_lite.planner.limits import Limit, Nodes
from mooncake_lite.planner.replay import replay
from mooncake_lite.planner.search import Search, with_nodes
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.traces import Trace
from questions.frame import SEEDS, Found, Point, Rows, Seeds, emulated, table

WORKLOADS = {"rag": 8.0, "unique": 4.0, "viral": 8.0}
"""Kind of `workload make` -> requests per second."""

FACTORS, SHARE = (1.2, 1.6, 3.0), 0.9
"""Limits as multiples of the 90th percentiles of an empty cluster, and the share of requests within them."""

WAYS = {
    "rule": "load rounded up, plus one", "forms": "closed forms", "replays": "replays of the queues",
    "plan": "four simulations at most",
}  # fmt: skip
MANY, MOST = (60, 60), 16
"""Nodes of an empty cluster, and simulations of a cell at most."""

LIVE_FACTOR, LIVE_RATE, DIVIDE = 1.5, 8.0, 8


def points(quick: bool) -> list[Point]:
    """Return each workload with each limit; then the live check."""
    requests, seeds, factors = (60, SEEDS[:1], FACTORS[-1:]) if quick else (300, SEEDS, FACTORS)
    found = [
        {"kind": kind, "factor": factor, "seed": seed, "requests": requests}
        for factor in factors for kind in WORKLOADS for seed in seeds
    ]  # fmt: skip
    return found + ([] if quick else [{"live": 1, "requests": 200, "alone": True}])


def run(point: Point) -> Found:
    """Look for the smallest cluster by each way."""
    if "live" in point:
        return _live(point)
    trace = made(KINDS[point["kind"]], point["requests"], WORKLOADS[point["kind"]], point["seed"])
    machines = named_profile(PAPER_MACHINES)
    return _cell(Cluster(profile=machines, nodes={"prefill": 1, "decode": 1}), trace, point["factor"])


def _cell(cluster: Cluster, trace: Trace, factor: float) -> Found:
    alone = replay(with_nodes(cluster, MANY), trace)
    ttft, tbt = (Limit(factor * float(np.quantile(one, SHARE)), SHARE) for one in (alone.ttft_s, alone.tbt_s))
    began_s = process_time()
    first, search = First(cluster, jobs_of(trace), ttft, tbt), Search(cluster, trace, ttft, tbt)
    forms, formed_s = first.guess(), process_time()
    replays, replayed_s = search.smallest(forms).nodes, process_time()
    smallest, plan, count = _truth(search, replays)
    took_s = formed_s - began_s, replayed_s - formed_s, process_time() - replayed_s
    rule = tuple(ceil(load) + 1 for load in first.load())
    return {
        "smallest": smallest, "plan": plan, "replays": replays, "forms": forms, "rule": rule,
        "simulations": count, "took_s": took_s, "ttft_s": ttft.seconds, "tbt_s": tbt.seconds,
    }  # fmt: skip


def _truth(search: Search, begin: Nodes) -> tuple[Nodes | None, Nodes | None, int]:
    """Return where simulations lead however many it takes, where the first few lead, and their number."""
    found: dict[Nodes, Candidate] = {}
    plan: Nodes | None = None
    while len(found) < MOST and (nodes := wanted(search, found, begin)):
        found[nodes[0]], _ = simulate(with_nodes(search.cluster, nodes[0]), search.trace, *search.limits)
        if len(found) == MOST_SIMULATIONS:
            plan = best_of(search, found) or begin
    truth = best_of(search, found)
    return truth, plan or truth, len(found)


def _live(point: Point) -> Found:
    """Plan for emulated ranks, and serve on the answer and on one node less that prefills."""
    trace = divided(made(KINDS["rag"], point["requests"], LIVE_RATE, 1), DIVIDE)
    with emulated(DIVIDE, prefill=1, decode=1, store=1) as ranks:
        cluster = replace(ranks.simulated(), nodes={"prefill": 1, "decode": 1}, sharing="off")
        found = _cell(cluster, trace, LIVE_FACTOR)
        prefill, decode = found["smallest"]
        for name, count in (("kept", prefill), ("fewer", prefill - 1)):
            other = replace(ranks, nodes={"prefill": count, "decode": decode, "store": 1})
            with other.serve("--prefix-sharing", "off") as served:
                found[name] = other.live(served.port, trace, 1, lambda: None)["ttft_s"]["p90"]
    return found


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: of each way and limit, the share of cells in which it is right."""
    found, lines = dict[str, Any](), []
    for way, name in WAYS.items():
        cells = []
        for factor in FACTORS:
            of = f"{way}_{10 * factor:.0f}"
            off = {
                seed: _off(rows.of(factor=factor, seed=seed), way)
                for seed in rows.of(factor=factor).values("seed")
            }
            found[f"exact_{of}"] = Seeds(
                100 * np.mean([not any(one) for one in each]) for each in off.values()
            )
            found[f"near_{of}"] = Seeds(
                100 * np.mean([max(map(abs, one)) <= 1 for one in each]) for each in off.values()
            )
            cells += [f"{np.mean(found[f'exact_{of}']):.0f} %", f"{np.mean(found[f'near_{of}']):.0f} %"]
        every = _off(Rows(row for row in rows if "seed" in row[0]), way)
        found[f"exact_{way}"] = 100 * np.mean([not any(one) for one in every])
        found[f"short_{way}"] = 100 * np.mean([min(one) < 0 for one in every])
        lines.append([name, *cells])
    heads = ["way", *(f"{factor:g} times: {what}" for factor in FACTORS for what in ("exact", "within one"))]
    cells = [cell for point, cell in rows if "seed" in point]
    found["longer"] = sum(cell["simulations"] > MOST_SIMULATIONS for cell in cells)
    for number, way in enumerate(("forms", "replays", "plan")):
        found[f"took_{way}"] = 1e3 * np.median([cell["took_s"][number] for cell in cells])
    found["least"], found["most"] = (pick(sum(cell["smallest"]) for cell in cells) for pick in (min, max))
    for live in (one for point, one in rows if "live" in point):
        found |= {f"live_{name}": live[name] for name in ("kept", "fewer", "ttft_s")}
        found |= {
            f"live_{way}": f"{live[way][0]}P{live[way][1]}D" for way in ("smallest", "replays", "forms")
        }
    return found | {
        "table": table(heads, lines), "cells": len(cells), "requests": rows[0][0]["requests"],
        "enough": min(one for one in FACTORS if np.mean(found[f"exact_replays_{10 * one:.0f}"]) > 85),
        "ended": len(cells) - found["longer"],
        "tight_replays": found[f"exact_replays_{10 * FACTORS[0]:.0f}"],
        "seeds": len(SEEDS), "tight": FACTORS[0], "loose": FACTORS[-1], "share": 100 * SHARE,
        "simulations": MOST_SIMULATIONS, "divide": DIVIDE, "live_rate": LIVE_RATE,
    }  # fmt: skip


def _off(rows: Rows, way: str) -> list[list[int]]:
    """Return by how many nodes of each kind a way is off, of each cell."""
    return [[a - b for a, b in zip(cell[way], cell["smallest"])] for _, cell in rows]


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "each way is right more often than the one before": of["exact_rule"]
        < of["exact_forms"]
        < of["exact_replays"]
        < of["exact_plan"],
        "a few simulations are right nearly always": of["exact_plan"] > 95,
        "replays are near": of["exact_replays"] > 60,
        "replays are enough for looser limits, and not for tight ones": of["tight"]
        < of["enough"]
        < of["loose"],
        "closed forms are never far off": min(min(of[f"near_forms_{n}"]) for n in (12, 16, 30)) > 90,
        "each way takes several times as long as the one before": 9 * of["took_forms"]
        < 3 * of["took_replays"]
        < of["took_plan"],
        "live, the answer keeps the limit, and one node less does not": of["live_kept"]
        <= of["live_ttft_s"]
        < of["live_fewer"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw how often each way is right, by the limits."""
    found = numbers(rows)
    for way, style in zip(WAYS, ("0.6", "C0", "C1", "k")):
        right = [found[f"exact_{way}_{10 * factor:.0f}"] for factor in FACTORS]
        axes.plot(FACTORS, [float(np.mean(one)) for one in right], color=style, marker="o", label=WAYS[way])
    axes.set(
        xlabel="limits, over the 90th percentiles of an empty cluster",
        ylabel="exactly right, %",
        ylim=(-4, 104),
    )
    axes.legend()
