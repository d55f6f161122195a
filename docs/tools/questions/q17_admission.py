"""Question 17: admission to the pool by frequency, size or cost: what is written for which hits."""

from __future__ import annotations

from typing import Any

from mooncake_lite.simulator.replay import replay, workload_of
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.traces import Trace
from questions.frame import SEEDS, Found, Point, Rows, pooled_reuse, public_trace, simulated, table
from store.policies import policy_factory

SHORT = {"lru": "lru", "second": "lru+second-hit", "size": "lru+size", "wtinylfu": "wtinylfu", "gdsf": "gdsf"}
POLICIES = tuple(SHORT.values())
KINDS_PLAYED = {"chat": 2_000, "rag": 2_000, "agents": 300}
"""Kind -> requests. Chat is the begin of each third of the public trace."""

SHARES = (0.01, 0.03, 0.1, 0.2, 0.5)
"""Of the different blocks of a trace, which the pool holds."""

KEPT = 0.98
"""Of the hits of LRU: with fewer, a filter has turned."""

NODES, RATE, REQUESTS, SSD, NODE_GB = "4P2D", 7.0, 500, "2TB", (10, 100)
SERVED = ("DRAM, GB", "policy", "tokens reused", "TTFT, s", "of seeds", "links, GB", "blocks saved")
LIVE_BLOCKS, LIVE_REQUESTS, LIVE_RATE, DIVIDE = 264, 160, 4.0, 16


def points(quick: bool) -> list[Point]:
    """Return pools of each size in a replay, clusters with SSDs, and two live runs."""
    kinds, shares, seeds = (("rag",), SHARES[:2], SEEDS[:1]) if quick else (KINDS_PLAYED, SHARES, SEEDS)
    found: list[Point] = [{"kind": a, "share": b, "seed": c} for a in kinds for b in shares for c in seeds]
    if quick:
        return found
    found += [
        {"node_gb": gb, "eviction": policy, "seed": seed}
        for gb in NODE_GB for policy in POLICIES for seed in seeds
    ]  # fmt: skip
    return found + [{"live": policy, "alone": True} for policy in POLICIES[:2]]


def run(point: Point) -> Found:
    """Replay a trace with each policy, or play documents on a cluster with SSDs."""
    if "live" in point:
        trace = divided(made(KINDS["rag"], LIVE_REQUESTS, LIVE_RATE, 1), DIVIDE)
        return pooled_reuse(trace, point["live"], LIVE_BLOCKS)
    if "kind" in point:
        return _replayed(point["kind"], point["share"], point["seed"])
    trace = made(KINDS["rag"], REQUESTS, RATE, point["seed"])
    found = simulated(
        trace, point["seed"], nodes=NODES, eviction=point["eviction"],
        node_dram=f"{point['node_gb']}GB", ssd=SSD,
    )  # fmt: skip
    return {
        "reused": found["hit_rate"]["all"], "ttft_s": found["ttft_s"]["mean"],
        "saves": found["pool"]["saves"],
        "far_gb": found["bytes_moved"]["far"] / 1e9, "disk_gb": found["bytes_moved"]["disk"] / 1e9,
        "ssd": found["hit_rate"]["ssd"],
    }  # fmt: skip


def _replayed(kind: str, share: float, seed: int) -> Found:
    """Return, of each policy, hits and blocks written, as shares of all references."""
    requests = KINDS_PLAYED[kind]
    if kind == "chat":
        whole = public_trace("conversation_trace.jsonl").requests
        begin = (seed - 1) * (len(whole) // len(SEEDS))
        trace = Trace(whole[begin : begin + requests])
    else:
        trace = made(KINDS[kind], requests, {"rag": 9.0, "agents": 0.27}[kind], seed)
    workload, found = workload_of(trace, complete_only=True), dict[str, Any]()
    blocks = max(1, round(share * len(workload.facts)))
    for name in POLICIES:
        policy = policy_factory(name)(blocks)
        counted = replay(workload, policy, blocks)
        written = (counted.evictions + len(policy)) / counted.references
        found[name] = {"hits": counted.hit_rate, "written": written}
    return found


def numbers(rows: Rows) -> dict[str, Any]:
    """Return hits and blocks written of each policy, by workload and size of the pool, and what SSDs take."""
    found, hits, writes = dict[str, Any](), list[list[str]](), list[list[str]]()
    for kind in KINDS_PLAYED:
        of = {
            (name, short, share): rows.seeds(f"{policy}.{name}", kind=kind, share=share)
            for name in ("hits", "written") for short, policy in SHORT.items() for share in SHARES
        }  # fmt: skip
        for name, lines in (("hits", hits), ("written", writes)):
            lines += [
                [kind, f"{share:.0%}", *(f"{of[name, short, share]:.1%}" for short in SHORT)]
                for share in SHARES
            ]
        found |= {
            f"{name}_{short}_{kind}_{share:.0%}"[:-1]: one.over(of[name, "lru", share])
            for (name, short, share), one in of.items() if of[name, "lru", share].middle > 0.01
        }  # fmt: skip
        won = [
            one for one in SHARES if of["hits", "second", one].middle >= KEPT * of["hits", "lru", one].middle
        ]
        found[f"turns_{kind}"] = 100 * max(won, default=0)
    served = list[list[str]]()
    for gb in NODE_GB:
        for short, policy in SHORT.items():
            reused, ttft_s, far_gb, saves = (
                rows.seeds(name, node_gb=gb, eviction=policy)
                for name in ("reused", "ttft_s", "far_gb", "saves")
            )
            served.append([
                f"{gb}", policy, f"{reused:.1%}", f"{ttft_s:.2f}", f"{ttft_s.spread:.2f}", f"{far_gb:,.0f}",
                f"{saves:,.0f}",
            ])  # fmt: skip
            if short == "second":
                for name in ("reused", "ttft_s", "far_gb", "saves"):
                    lru = rows.seeds(name, node_gb=gb, eviction="lru")
                    found[f"{name}_at_{gb}"] = rows.seeds(name, node_gb=gb, eviction=policy).over(lru)
    live = [(short, rows.of(live=SHORT[short])[0][1]) for short in ("lru", "second")]
    heads = ("workload", "pool", *POLICIES)
    return found | {
        "hits": table(heads, hits), "writes": table(heads, [line for line in writes if line[1] == "10%"]),
        "served": table(SERVED, served),
        **{f"live_{name}_{short}": one for short, of_live in live for name, one in of_live.items()},
        "seeds": len(SEEDS), "kept": KEPT, "nodes": NODES, "rate": RATE, "requests": REQUESTS, "ssd": SSD,
        "small": NODE_GB[0], "large": NODE_GB[-1], "divide": DIVIDE,
        "live_blocks": LIVE_BLOCKS, "live_rate": LIVE_RATE,
        "live_requests": LIVE_REQUESTS, **{f"{kind}_requests": each for kind, each in KINDS_PLAYED.items()},
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    small = [
        (kind, share) for kind in KINDS_PLAYED for share in (1, 3, 10) if f"hits_lru_{kind}_{share}" in of
    ]
    return {
        "in small pools, second use writes less than a quarter": all(
            max(of[f"written_second_{kind}_{share}"]) < 1 / 4 for kind, share in small
        ),
        "it has a sixth more hits of documents there": min(of["hits_second_rag_3"]) > 1.15,
        "it gives hits away in large ones": all(
            max(of[f"hits_second_{kind}_50"]) < 1 for kind in KINDS_PLAYED
        ),
        "its answer turns within the sweep": all(1 <= of[f"turns_{kind}"] < 50 for kind in KINDS_PLAYED),
        "a choice of victims by frequency or cost saves few writes": all(
            min(of[f"written_{one}_{kind}_10"]) > 0.5 for one in ("wtinylfu", "gdsf") for kind in KINDS_PLAYED
        ),
        "W-TinyLFU has the most hits at a tenth": all(
            of[f"hits_wtinylfu_{kind}_10"].middle >= max(of[f"hits_{one}_{kind}_10"].middle for one in SHORT)
            for kind in KINDS_PLAYED
        ),
        "a limit of size costs agents most of their hits": max(of["hits_size_agents_50"]) < 0.6,
        "in a pool for a fifth, too": max(of["hits_size_agents_20"]) < 0.5,
        "and changes nothing for chat from a tenth on": abs(of["written_size_chat_10"].middle - 1) < 0.01,
        "SSDs take less than a fifth of the blocks": all(max(of[f"saves_at_{gb}"]) < 0.2 for gb in NODE_GB),
        "and links less in small pools": max(of[f"far_gb_at_{NODE_GB[0]}"]) < 0.85,
        "in large pools second use costs time": min(of[f"ttft_s_at_{NODE_GB[-1]}"]) > 1.05,
        "live and replayed hits order alike": of["live_served_second"] < of["live_served_lru"]
        and of["live_replayed_second"] < of["live_replayed_lru"],
    }  # fmt: skip


def draw(axes: Any, rows: Rows) -> None:
    """Draw hits of two policies over those of LRU, by the size of the pool."""
    for kind, colour in zip(("rag", "chat"), ("C0", "k")):
        for policy, style in (("lru+second-hit", "o-"), ("wtinylfu", "s--"), ("gdsf", "^:")):
            ratios = [
                rows.seeds(f"{policy}.hits", kind=kind, share=share)
                .over(rows.seeds("lru.hits", kind=kind, share=share)).middle for share in SHARES
            ]  # fmt: skip
            axes.plot(
                [100 * share for share in SHARES], ratios, style, color=colour, label=f"{kind}: {policy}"
            )
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(xlabel="pool, % of the different blocks", ylabel="hits over those of LRU", xscale="log")
    axes.legend(fontsize="small")
