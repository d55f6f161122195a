"""Question 5: what a million tokens cost at one SLO: pooled, split, and on nodes that do both."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from mooncake_lite.planner.answer import least_dram
from mooncake_lite.planner.colocation import ways_of
from mooncake_lite.planner.compare import LEAST, STEP, highest, mixed_bases
from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Limit, Nodes
from mooncake_lite.planner.search import Search
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.kinds import KINDS, Kind, made
from mooncake_lite.workloads.rescale import sped
from mooncake_lite.workloads.traces import Trace
from questions.frame import SEEDS, Found, Point, Rows, Seeds, table

NODES, RATE, SHARE, NODE_HOUR = 4, 4.0, 0.9, 32.0
LIBRARY: dict[str, Any] = {"documents": 200, "document_tokens": 8192, "hot_share": 0.8}
LARGE: dict[str, Any] = {"documents": 400, "document_tokens": 16_384, "hot_share": 0.9, "skew": 0.5}
"""Documents that have space in the pages of the nodes that prefill, and those that do not."""

ANSWERS, LIMITS, LOOSE = (64, 256, 1024), [4.0, 0.1], [8.0, 0.2]
LARGE_LIMITS, LARGE_REQUESTS = [10.0, 0.1], 800
"""Mean tokens of answers; limits on TTFT and TBT, in seconds."""

HOUR = NODES * NODE_HOUR
DRAM, DRAM_HOUR = (0, 4, 10, 20, 30, 40), 0.004
"""Prices for an hour: of 1,000 GB of DRAM, drawn; of one GB, as in `planner.prices`, like NODE_HOUR."""

WAYS = {
    "pooled": "pooled", "split": "split", "colocated": "both, cheap mixed pass",
    "costly": "both, dear mixed pass",
}  # fmt: skip

BOTH = ("short", "usual", "long", "loose")

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "short": ("64 tokens", {"answer": 64, "limits": LIMITS}),
    "usual": ("256 tokens", {"answer": 256, "limits": LIMITS}),
    "long": ("1,024 tokens", {"answer": 1024, "limits": LIMITS}),
    "loose": ("256 tokens, limits twice as long", {"answer": 256, "limits": LOOSE}),
    "large": ("256 tokens, larger library", {"answer": 256, "limits": LARGE_LIMITS}),
}

BASE, COSTLY = "26.1 ms", "97.7 ms"
"""Of a mixed pass on nodes that do both: simulated, and by the closed form."""

CHUNK = 512
"""Tokens of a prompt in a pass of nodes that do both, in simulations: the best one by closed forms."""


def points(quick: bool) -> list[Point]:
    """Return settings by replays, and nodes that do both by simulations; then one way by both."""
    settings = [{"answer": answer, "limits": LIMITS} for answer in ANSWERS]
    settings.append({"answer": 256, "limits": LOOSE})
    requests, seeds, settings = (60, SEEDS[:1], settings[:1]) if quick else (200, SEEDS, settings)
    found = [
        one | {"ways": ways, "seed": seed, "requests": requests}
        for ways in ("replayed", "colocated") for one in settings for seed in seeds
    ]  # fmt: skip
    checks = [{**found[3], "ways": "pooled", "seed": seed} for seed in SEEDS] if not quick else []
    large = {"answer": 256, "limits": LARGE_LIMITS, "ways": "large", "requests": LARGE_REQUESTS}
    return found + ([] if quick else [large | {"seed": seed} for seed in SEEDS]) + checks


def run(point: Point) -> Found:
    """Return the tokens that each way carries in an hour within both limits, and the DRAM it needs."""
    library = LARGE if point["ways"] == "large" else LIBRARY
    kind: Kind = replace(KINDS["rag"], **library, answer_tokens=point["answer"])
    trace = made(kind, point["requests"], RATE, point["seed"])
    limits = Limit(point["limits"][0], SHARE), Limit(point["limits"][1], SHARE)
    if point["ways"] in ("colocated", "pooled"):
        return {"tokens": _million(trace, _simulated(point["ways"], trace, limits)), "gb": 0.0}
    found: Found = {way: _replayed(way, trace, limits) for way in ("pooled", "split")}
    ways = ways_of(First(_cluster("split"), jobs_of(trace), *limits), NODES)
    found["costly"] = {"tokens": _million(trace, ways.both[COSTLY][0]), "gb": 0.0}
    return found | {"reused": jobs_of(trace).reused}


def _cluster(mode: str) -> Cluster:
    nodes = {"compute": NODES} if mode == "colocated" else {"prefill": 3, "decode": 1}
    both = {"batched_tokens": CHUNK, "node_bytes": 0} if mode == "colocated" else {}
    profile = named_profile(PAPER_MACHINES)
    if mode == "colocated":
        profile = mixed_bases(profile)[BASE]
    sharing = "off" if mode == "pooled" else "hash"
    return Cluster(profile=profile, nodes=nodes, mode=mode, sharing=sharing, **both)


def _million(trace: Trace, rate: float) -> float:
    """Return the tokens of an hour at a rate, of prompts and answers, in millions."""
    jobs = jobs_of(trace)
    return 3600 * rate * float(jobs.tokens.mean() + jobs.answer.mean()) / 1e6


def _replayed(mode: str, trace: Trace, limits: tuple[Limit, Limit]) -> Found:
    """Return the best ratio of a way by replays, and the DRAM that it needs."""
    cluster, best, level = _cluster(mode), (3, 1), LEAST

    def search(level: int) -> Search:
        return Search(cluster, sped(trace, STEP**level), *limits)

    for prefill in range(NODES - 1, 0, -1):
        nodes: Nodes = prefill, NODES - prefill
        keeps = cache(lambda level, nodes=nodes: search(level).at(nodes).keeps(*limits))
        if level == LEAST or keeps(level + 1):
            best, level = nodes, highest(keeps, max(level, 0))
    dram = least_dram(search(level), best) if mode == "pooled" else 0
    rate = jobs_of(trace).rate * STEP**level
    return {"nodes": best, "tokens": _million(trace, rate), "gb": best[0] * dram / 1e9}


def _simulated(mode: str, trace: Trace, limits: tuple[Limit, Limit]) -> float:
    """Return the highest rate of a way in simulations."""
    cluster = _cluster(mode)

    def keeps(level: int) -> bool:
        found, _ = simulate(cluster, sped(trace, STEP**level), *limits, judges=True)
        return found.keeps(*limits)

    return jobs_of(trace).rate * STEP ** highest(cache(keeps), 4)


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: costs of a million tokens, of prompts and answers together."""
    found, lines = dict[str, Any](), []
    for of, (name, setting) in SETTINGS.items():
        some = rows.of(ways="large" if of == "large" else "replayed", **setting)
        tokens = {way: some.seeds(f"{way}.tokens") for way in ("pooled", "split", "costly")}
        if of != "large":
            tokens["colocated"] = rows.seeds("tokens", ways="colocated", **setting)
        found |= {f"{way}_{of}": Seeds(HOUR / one for one in each) for way, each in tokens.items()}
        found[f"gb_{of}"], found[f"reused_{of}"] = some.seeds("pooled.gb"), some.seeds("reused")
        found[f"gain_{of}"] = tokens["pooled"].over(tokens["split"])
        found[f"dear_{of}"] = Seeds(1000 * HOUR * (STEP - 1) / gb for gb in found[f"gb_{of}"])
        cells = [f"{found[f'{way}_{of}']:.2f}" if way in tokens else "not played" for way in WAYS]
        gain = f"{found[f'gain_{of}']:.2f} ({found[f'gain_{of}'].spread:.2f})"
        lines.append([name, *cells, gain, f"{found[f'gb_{of}']:.0f} GB", f"{found[f'dear_{of}']:.0f}"])
        if of != "large":
            found[f"both_{of}"] = tokens["split"].over(tokens["colocated"])
    checked = rows.seeds("tokens", ways="pooled")
    replayed = rows.seeds("pooled.tokens", ways="replayed", **SETTINGS["usual"][1])
    heads = ["answers, limits", *WAYS.values(), "rate, pooled over split", "DRAM of the pool", "price"]
    return found | {
        "table": table(heads, lines), "node": NODE_HOUR, "nodes": NODES, "share": 100 * SHARE,
        "checked": replayed.over(checked), "price": 1000 * DRAM_HOUR, "requests": rows[0][0]["requests"],
        "large_requests": LARGE_REQUESTS, "large_ttft": LARGE_LIMITS[0], "seeds": len(SEEDS),
        "ttft": LIMITS[0], "tbt": 1000 * LIMITS[1], "base": BASE, "costly_base": COSTLY, "chunk": CHUNK,
        "step": 100 * (STEP - 1),
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    gains = [of[f"gain_{name}"] for name in SETTINGS]
    return {
        "pooled and split cost the same": all(1 / STEP < gain.middle <= STEP + 1e-4 for gain in gains),
        "the pool's DRAM costs little where the library is small": of["dear_usual"].middle > 10 * of["price"],
        "a larger library needs more of it": min(of["gb_large"]) > 3 * max(of["gb_usual"]),
        "nodes that do both cost more with a cheap mixed pass": min(min(of[f"both_{name}"]) for name in BOTH)
        > 1,
        "and much more with a dear mixed pass": min(of["costly_usual"].over(of["split_usual"])) > 3,
        "replays are near simulations": all(abs(one - 1) < 0.15 for one in of["checked"]),
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the cost of pooled nodes over that of split ones, by the price of DRAM."""
    found = numbers(rows)
    for of, style in (("usual", "C0o-"), ("large", "C1s-")):
        lent, ratio = found[f"gb_{of}"].middle, 1 / found[f"gain_{of}"].middle
        costs = [ratio * (1 + price * lent / 1000 / HOUR) for price in DRAM]
        axes.plot(DRAM, costs, style, label=SETTINGS[of][0])
    axes.axhline(1, color="0.8", linewidth=1)
    axes.set(xlabel="price of 1,000 GB of DRAM for an hour", ylabel="cost of pooled over split nodes")
    axes.legend()
