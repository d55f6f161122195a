"""Question 2: tuned chunks, split nodes and Mooncake: what splitting gives, and what the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mooncake_lite.planner.compare import (
    LAYERS,
    LEAST,
    POOLED,
    SHARED,
    STEP,
    TUNED,
    Contender,
    Question,
    contenders,
    tuned,
)  # fmt: skip
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Limit
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.tools.bench.simulator_ranks import SLO_S
from mooncake_lite.workloads.kinds import KINDS, Kind, made
from mooncake_lite.workloads.rescale import divided
from questions.frame import SEEDS, Found, Point, emulated

BASE, COSTLY = "26.1 ms", "97.7 ms"
"""Of a mixed pass: what a decode step has, and what a prompt has."""

WAYS = {
    "chunks": (TUNED, BASE), "lent": (SHARED, BASE), "split": (LAYERS, ""), "pooled": (POOLED, ""),
    "alone": (POOLED, ""), "dear": (TUNED, COSTLY),
}  # fmt: skip
"""Names of the page; alone: ranks reuse no pages of their own, so that all reuse goes through the pool."""

NAMES = {
    "chunks": "chunks", "lent": "chunks, pool", "split": "split", "pooled": "split, pool",
    "dear": "chunks, dear mixed pass",
}  # fmt: skip

SIZES = {100: (256, 512, 1024), 200: (512, 1024, 2048), 400: (1024, 2048, 4096), 800: (4096, 8192)}
"""TBT limit in ms -> tokens of chunks that are tried: those beside the best of a search among all sizes."""
DEAR = {100: (4096, 8192), 400: (1024, 2048, 4096), 800: (4096, 8192)}
BEGIN = {100: -2, 200: 2, 400: 5, 800: 8}
"""Level that is tried first; of the dear base it is DEAR_BEGIN."""
DEAR_BEGIN = {100: -32, 400: -2, 800: 4}

SHARE, TTFT_S, AGENTS_TTFT_S, TURNS, FAST = 0.9, 2.0, 5.0, (1, 2, 4, 16), 1600
FOUR, MORE, MORE_TBT, LEAST_TBT, MOST_TBT = 4, 8, 200, min(SIZES), max(SIZES)

AGENTS: dict[str, Any] = {
    "instructions_tokens": 4000, "task_tokens": 16_000, "result_tokens": 1000, "answer_tokens": 200,
    "turns_spread": 0.5, "spread": 0.6, "fork_share": 0.0, "pause_s": 30.0,
}  # fmt: skip
"""Shorter contexts than those of `agents`, so that runs are short and live ranks can hold them."""

DIVIDE, LIVE_RATE, LIVE_CHUNK, LIVE_TURNS = 8, 4.0, 64, 4
LIVE = {"split": "split", "pooled": "pooled", "chunks": "colocated"}


def points(quick: bool) -> list[Point]:
    """Return questions about documents by the limit on TBT, agents by their turns, and three ways live."""
    requests, seeds = (40, SEEDS[:1]) if quick else (200, SEEDS)
    documents: list[Point] = [{"tbt": tbt, "nodes": FOUR, "requests": requests} for tbt in SIZES]
    documents.append({"tbt": MORE_TBT, "nodes": MORE, "requests": 2 * requests})
    links = [*((turns, 0) for turns in TURNS), (TURNS[-1], FAST)]
    agents: list[Point] = [{"turns": a, "gbps": b, "nodes": FOUR, "requests": requests} for a, b in links]
    played = documents[:1] if quick else documents + agents
    live = [{"live": way, "requests": 100, "alone": True} for way in LIVE]
    return [one | {"seed": seed} for one in played for seed in seeds] + ([] if quick else live)


def run(point: Point) -> Found:
    """Find the highest rate of each way at its best. Each begins with what was best for the one before."""
    if "live" in point:
        return _live(point)
    turns, tbt, nodes = point.get("turns", 0), point.get("tbt", LEAST_TBT), point["nodes"]
    rate = nodes * (0.4 if turns else 1.6)
    kind: Kind = replace(KINDS["agents"], **AGENTS, median_turns=turns) if turns else KINDS["rag"]
    trace = made(kind, point["requests"], rate, point["seed"])
    limits = Limit(AGENTS_TTFT_S if turns else TTFT_S, SHARE), Limit(tbt / 1000, SHARE)
    keeps = Question(trace, *limits).keeps(True, point["seed"])
    cluster = Cluster(
        profile=named_profile(PAPER_MACHINES), nodes={"prefill": 1, "decode": 1}, sharing="hash",
        link_bytes_per_s=point.get("gbps", 0) * 1e9 / 8 or None,
    )  # fmt: skip
    found: Found = {"reused": jobs_of(trace).reused, "rps": {}, "best": {}}
    best = f"{nodes - nodes // 4}P{nodes // 4}D", 0 if turns or tbt == LEAST_TBT else BEGIN[tbt]
    for way in _ways(point):
        sizes = {"dear": DEAR, "alone": {}}.get(way, SIZES).get(tbt, ())
        one = _contender(way, replace(cluster, sharing="off") if way == "alone" else cluster, nodes, sizes)
        level = DEAR_BEGIN[tbt] if way == "dear" else best[1]
        names = list(one.clusters)
        best = tuned(one, keeps, (best[0] if best[0] in names else names[len(sizes) // 2], level))
        found["best"][way] = best[0]
        found["rps"][way] = rate * STEP ** best[1] if best[1] >= LEAST else 0.0
    return found


def _ways(point: Point) -> list[str]:
    if "turns" in point:
        last = point["turns"] == TURNS[-1] and not point["gbps"]
        return ["split", "pooled", *(["alone"] if last else [])]
    both = ["split", "pooled"] if point["nodes"] == MORE or point["tbt"] in (LEAST_TBT, MOST_TBT) else []
    dear = ["dear"] if point["nodes"] == FOUR and point["tbt"] in DEAR else []
    return [*both, "chunks", "lent", *dear]


def _contender(way: str, cluster: Cluster, nodes: int, sizes: tuple[int, ...]) -> Contender:
    """Return a way with its ratios, or with some sizes of chunks, and with both policies if it is dear."""
    found = [one for chain in contenders(cluster, nodes) for one in chain]
    one = next(one for one in found if (one.system, one.mixed) == WAYS[way])
    if not WAYS[way][1]:
        return one
    policies = ("kvcache-centric", "least-loaded")[: 1 + (way == "dear")]
    some = [
        name for policy in policies for size in sizes for name, each in one.clusters.items()
        if (each.policy, each.batched_tokens) == (policy, size)
    ]  # fmt: skip
    return replace(one, clusters={name: one.clusters[name] for name in some}, patience=len(some))


def _live(point: Point) -> Found:
    """Play a way on emulated ranks with agents, and simulate the same ranks."""
    mode = LIVE[point["live"]]
    both = mode == "colocated"
    nodes = {"compute": 4} if both else {"prefill": 3, "decode": 1}
    kind: Kind = replace(KINDS["agents"], **AGENTS, median_turns=LIVE_TURNS)
    trace = divided(made(kind, point["requests"], LIVE_RATE, 1), DIVIDE)
    chunk = LIVE_CHUNK if both else 512
    with emulated(DIVIDE, **nodes, **({"store": 1} if mode == "pooled" else {})) as ranks:
        with ranks.serve("--mode", mode, "--max-num-batched-tokens", str(chunk)) as cluster:
            live = ranks.live(cluster.port, trace, 1, lambda: None)
        usual = replace(ranks, nodes={"prefill": 1, "decode": 1}).simulated()
        alike = replace(
            usual, mode=mode, nodes=ranks.nodes, batched_tokens=chunk,
            node_bytes=0 if both else ranks.pool_bytes,
        )  # fmt: skip
        outcome = play(alike, TraceSource(trace), 1)
    return {"live": live, "simulated": outcome.to_dict(*SLO_S)}
