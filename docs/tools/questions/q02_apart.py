"""Question 2: tuned chunks, split nodes and Mooncake: what splitting gives, and what the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mooncake_lite.planner import compare
from mooncake_lite.planner.compare import LEAST, STEP
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Limit
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.tools.bench.simulator_ranks import SLO_S
from mooncake_lite.workloads.kinds import KINDS, Kind, made
from mooncake_lite.workloads.rescale import divided
from questions.frame import SEEDS, Found, Point, Rows, Seeds, emulated, table

BASE, COSTLY = "26.1 ms", "97.7 ms"
"""Of a mixed pass: what a decode step has, and what a prompt has."""

WAYS = {
    "chunks": (compare.TUNED, BASE), "lent": (compare.SHARED, BASE), "split": (compare.LAYERS, ""),
    "pooled": (compare.POOLED, ""), "alone": (compare.POOLED, ""), "dear": (compare.TUNED, COSTLY),
}  # fmt: skip
"""Names of the page; alone: ranks reuse no pages of their own, so that all reuse goes through the pool."""

NAMES = {
    "chunks": "chunks", "lent": "chunks, pool", "split": "split", "pooled": "split, pool",
    "dear": "chunks, dear mixed pass",
}  # fmt: skip

SIZES = {100: (256, 512, 1024), 200: (512, 1024, 2048), 400: (1024, 2048, 4096), 800: (4096, 8192)}
"""TBT limit in ms -> tokens of chunks that are tried; 8,192 is nearly all of a prompt."""
DEAR = {100: (4096, 8192), 400: (1024, 2048, 4096), 800: (4096, 8192)}
BEGIN = {100: -2, 200: 2, 400: 5, 800: 8}
"""Level that is tried first; of the dear base it is DEAR_BEGIN."""
DEAR_BEGIN = {100: -32, 400: -2, 800: 4}

SHARE, TTFT_S, AGENTS_TTFT_S, TURNS, FAST = 0.9, 2.0, 5.0, (1, 2, 4, 16), 1600
LINKS = [*((turns, 0) for turns in TURNS), (TURNS[-1], FAST)]
"""Turns of agents with Gbit/s of a node's link; 0: the profile's."""
FOUR, MORE, MORE_TBT, LEAST_TBT, MOST_TBT = 4, 8, 200, min(SIZES), max(SIZES)

AGENTS: dict[str, Any] = {
    "instructions_tokens": 4000, "task_tokens": 16_000, "result_tokens": 1000, "answer_tokens": 200,
    "turns_spread": 0.5, "spread": 0.6, "fork_share": 0.0, "pause_s": 30.0,
}  # fmt: skip
"""Shorter contexts than those of `agents`, so that runs are short and live ranks can hold them."""

PAIRS = {
    "split": ("split", "chunks"), "chunks": ("chunks", "split"), "lent": ("lent", "chunks"),
    "both": ("pooled", "lent"), "pool": ("pooled", "split"), "dear": ("split", "dear"),
    "alone": ("alone", "split"),
}  # fmt: skip
"""Name of a number -> rate of one way over that of another."""

DIVIDE, LIVE_RATE, LIVE_CHUNK, LIVE_TURNS = 8, 4.0, 64, 4
LIVE = {"split": "split", "pooled": "pooled", "chunks": "colocated"}


def points(quick: bool) -> list[Point]:
    """Return questions about documents by the limit on TBT, agents by their turns, and three ways live."""
    requests, seeds = (40, SEEDS[:1]) if quick else (200, SEEDS)
    documents: list[Point] = [{"tbt": tbt, "nodes": FOUR, "requests": requests} for tbt in SIZES]
    documents.append({"tbt": MORE_TBT, "nodes": MORE, "requests": 2 * requests})
    agents: list[Point] = [{"turns": a, "gbps": b, "nodes": FOUR, "requests": requests} for a, b in LINKS]
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
    keeps = compare.Question(trace, *limits).keeps(True, point["seed"])
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
        best = compare.tuned(one, keeps, (best[0] if best[0] in names else names[len(sizes) // 2], level))
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


def _contender(way: str, cluster: Cluster, nodes: int, sizes: tuple[int, ...]) -> compare.Contender:
    """Return a way with its ratios, or with some sizes of chunks, and with both policies if it is dear."""
    found = [one for chain in compare.contenders(cluster, nodes) for one in chain]
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


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: what one way carries over another, for each setting."""
    lines = list[list[str]]()
    found: dict[str, Any] = {
        "seeds": len(SEEDS), "nodes": FOUR, "more": MORE, "more_tbt": MORE_TBT,
        "requests": rows[0][0]["requests"], "ttft": TTFT_S, "agents_ttft": AGENTS_TTFT_S,
        "share": 100 * SHARE, "base": BASE, "costly_base": COSTLY, "step": 100 * (STEP - 1), "fast": FAST,
        "divide": DIVIDE, "live_rate": LIVE_RATE, "live_turns": LIVE_TURNS, "live_chunk": LIVE_CHUNK,
        "live_requests": rows.of(live="split")[0][0]["requests"], "most_turns": TURNS[-1],
        "least_tbt": LEAST_TBT, "most_tbt": MOST_TBT,
    }  # fmt: skip

    def told(name: str, shown: str, usual: dict[str, Seeds], **values: Any) -> dict[str, Seeds]:
        some = rows.of(**values)
        got = {way: some.seeds(f"rps.{way}") for way in some[0][1]["rps"]}
        cells = [f"{got[way]:.2f}" if way in got else "same" if way in usual else "" for way in NAMES]
        lines.append([shown, *cells])
        got = usual | got
        for pair, (one, other) in PAIRS.items():
            if one in got and other in got:
                found[f"{pair}_{name}"] = got[one].over(got[other])
        return got

    usual = dict[str, Seeds]()
    for tbt in SIZES:
        got = told(f"{tbt}", f"documents, {tbt} ms", usual, tbt=tbt, nodes=FOUR)
        usual = usual or {way: got[way] for way in ("split", "pooled")}
    found["split_gain"] = max(max(got[way].over(usual[way])) for way in usual)
    told("more", f"documents, {MORE_TBT} ms, {MORE} nodes", {}, tbt=MORE_TBT, nodes=MORE)
    for turns, gbps in LINKS:
        name, link = f"agents_{turns}" + "_fast" * bool(gbps), f", {gbps:,} Gbit/s" * bool(gbps)
        told(name, f"agents, {turns} {'turns' if turns > 1 else 'turn'}{link}", {}, turns=turns, gbps=gbps)
    for live in LIVE:
        for how in ("live", "simulated"):
            found[f"{how}_ttft_{live}"] = rows.seeds(f"{how}.ttft_s.p90", live=live).middle
        found[f"live_hits_{live}"] = 100 * rows.seeds("live.hit_rate.all", live=live).middle
    won = [tbt for tbt in SIZES if min(found[f"chunks_{tbt}"]) > 1]
    worth = [turns for turns in TURNS if min(found[f"pool_agents_{turns}"]) > STEP + 0.001]
    below = max((tbt for tbt in SIZES if tbt not in won), default=0)
    found |= {"turns": min(won, default=0), "worth": min(worth, default=0), "below": below}
    return found | {"table": table(["workload, limit on TBT", *NAMES.values()], lines)}


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "split nodes gain nothing from a looser one": of["split_gain"] == 1,
        "with the tight limit split nodes are above chunks": min(of["split_100"]) > 1,
        "with a looser one chunks are above split nodes": LEAST_TBT < of["turns"] < MOST_TBT,
        "and above Mooncake, if they have a pool": max(of[f"both_{of['turns']}"]) < 1,
        "and far above with the loosest": min(of[f"chunks_{MOST_TBT}"]) > 1.3,
        "the dear base makes chunks much worse where limits are tight": min(of["dear_100"]) > 3,
        "and not where they are loose": max(of[f"dear_{MOST_TBT}"]) < 1,
        "for documents the pool gives split nodes a step": max(of["pool_100"]) < STEP**2 + 0.01,
        "for agents it gives more": min(of[f"pool_agents_{TURNS[-1]}"]) > STEP + 0.001,
        "with few turns not all seeds gain more": of["worth"] == TURNS[-1],
        "it gives chunks more than split nodes": min(of["lent_100"].over(of["pool_100"])) > 1,
        "without pages of their own pooled nodes are below split ones": max(of["alone_agents_16"]) < 1,
        "fast links take away a part of it": of["pool_agents_16_fast"].middle < of["pool_agents_16"].middle,
        "live, agents get first tokens sooner with a pool": of["live_ttft_pooled"] < of["live_ttft_split"],
        "and later from nodes that do both": of["live_ttft_chunks"] > of["live_ttft_split"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the rate of each way by the limit on TBT."""
    for (way, name), style in zip(NAMES.items(), ("C1s-", "C1s--", "C0o-", "C0o--", "C3^-")):
        some = Rows(row for row in rows.of(nodes=FOUR) if way in row[1]["rps"] and "tbt" in row[0])
        limits = some.values("tbt")
        axes.plot(limits, [some.seeds(f"rps.{way}", tbt=tbt).middle for tbt in limits], style, label=name)
    axes.set(xlabel="limit on TBT, ms", ylabel="highest rate, requests/s", xscale="log", ylim=(0, None))
    axes.set_xticks(list(SIZES), [str(tbt) for tbt in SIZES])
    axes.minorticks_off()
    axes.legend()
