"""Question 6: what the pool costs where no prompt shares anything, and what admission to it saves."""

from __future__ import annotations

from typing import Any

from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import divided
from questions.frame import SEEDS, Found, Point, Rows, emulated, simulated, table

SYSTEMS = {"split": "lru", "pooled": "lru", "filtered": "lru+second-hit"}
"""Name -> eviction policy: no pool, a pool that keeps everything, and one that keeps what comes twice."""

NODES, RATE, DRAM = "6P2D", 3.0, "100GB"
LINKS = (400, 200, 100, 60, 40, 30)
LIVE_RATE, DIVIDE = 2.0, 16


def points(quick: bool) -> list[Point]:
    """Return each system on links that become slower; then two of them live."""
    requests, seeds, links = (60, SEEDS[:1], LINKS[:2]) if quick else (600, SEEDS, LINKS)
    found = [
        {"system": system, "gbps": gbps, "seed": seed, "requests": requests}
        for gbps in links for system in SYSTEMS for seed in seeds
    ]  # fmt: skip
    live = [{"live": system, "requests": 80, "alone": True} for system in ("split", "pooled")]
    return found + ([] if quick else live)


def run(point: Point) -> Found:
    """Play unique prompts."""
    if "live" in point:
        return _live(point)
    trace = made(KINDS["unique"], point["requests"], RATE, point["seed"])
    mode = "split" if point["system"] == "split" else "pooled"
    return simulated(
        trace, point["seed"], nodes=NODES, mode=mode, eviction=SYSTEMS[point["system"]],
        link_gbps=point["gbps"], node_dram=DRAM,
    )  # fmt: skip


def _live(point: Point) -> Found:
    trace = divided(made(KINDS["unique"], point["requests"], LIVE_RATE, 1), DIVIDE)
    nodes = {"prefill": 2, "decode": 2} | ({} if point["live"] == "split" else {"store": 1})
    with emulated(DIVIDE, **nodes) as ranks, ranks.serve("--mode", point["live"]) as cluster:
        return ranks.live(cluster.port, trace, 1, lambda: None)


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: times as ratios to those of mode split, by link."""
    found, lines = dict[str, Any](), []
    links = rows.values("gbps")
    for gbps in links:
        tbt = {system: rows.seeds("tbt_s.mean", system=system, gbps=gbps) for system in SYSTEMS}
        found |= {f"tbt_{system}_{gbps}": tbt[system].over(tbt["split"]) for system in SYSTEMS}
        cells = [f"{1000 * tbt[system].middle:.0f} ms" for system in SYSTEMS]
        for name in ("ttft", "e2e"):
            for system in SYSTEMS:
                took = rows.seeds(f"{name}_s.mean", system=system, gbps=gbps)
                found[f"{name}_{system}_{gbps}"] = took
                cells.append(f"{took:.1f} s")
        lines.append([f"{gbps}", *cells])
    for system in SYSTEMS:
        sent = rows.seeds("bytes_moved.far", system=system, gbps=links[0])
        found[f"far_{system}"] = sent.over(rows.seeds("bytes_moved.far", system="split", gbps=links[0]))
        found[f"ttft_{system}"] = rows.seeds("ttft_s.mean", system=system, gbps=links[0])
        found[f"evicted_{system}"] = rows.seeds("pool.evictions", system=system, gbps=links[0])
    for system in rows.values("live"):
        for name in ("ttft_s", "tbt_s"):
            found[f"live_{name}_{system}"] = 1000 * rows.seeds(f"{name}.mean", live=system).middle
    costs = [gbps for gbps in links if found[f"tbt_pooled_{gbps}"].middle > 1.05]
    saves = [
        gbps
        for gbps in links
        if found[f"tbt_filtered_{gbps}"].middle < 0.9 * found[f"tbt_pooled_{gbps}"].middle
    ]
    first = rows[0][0]
    heads = [f"{figure}, {system}" for figure in ("TBT", "TTFT", "whole answer") for system in SYSTEMS]
    return found | {
        "table": table(["link, Gbit/s", *heads], lines), "requests": first["requests"], "nodes": NODES,
        "narrow_e2e": found[f"e2e_pooled_{links[-1]}"].over(found[f"e2e_split_{links[-1]}"]),
        "rate": RATE, "dram": DRAM, "turns": max(costs, default=0), "filter_turns": max(saves, default=0),
        "widest": links[0], "narrowest": links[-1], "seeds": len(SEEDS),
        "live_rate": LIVE_RATE, "divide": DIVIDE,
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "on wide links the pool costs no time": of[f"tbt_pooled_{of['widest']}"].middle < 1.02,
        "it moves more bytes": min(of["far_pooled"]) > 1.3,
        "the filter moves almost none of them": max(of["far_filtered"]) < 1.1,
        "links turn the answer within the sweep": of["narrowest"] < of["turns"] < of["widest"],
        "the filter saves time on slower links": 0 < of["filter_turns"] <= of["turns"],
        "on the narrowest split nodes make the first token wait": min(of[f"ttft_split_{of['narrowest']}"])
        > 3 * max(of[f"ttft_pooled_{of['narrowest']}"]),
        "and pooled ones the whole answer": min(
            of[f"e2e_pooled_{of['narrowest']}"].over(of[f"e2e_split_{of['narrowest']}"])
        )
        > 1.5,
        "the filter is not as fast as no pool": of[f"tbt_filtered_{of['narrowest']}"].middle > 2,
        "live, a pool costs little": of["live_tbt_s_pooled"] < 1.15 * of["live_tbt_s_split"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw TBT by link."""
    links = rows.values("gbps")
    for system, style in zip(SYSTEMS, ("k--", "C0o-", "C1s-")):
        tbt = [1000 * rows.seeds("tbt_s.mean", system=system, gbps=gbps).middle for gbps in links]
        axes.plot(links, tbt, style, label=system)
    axes.set(xlabel="link of a node, Gbit/s", ylabel="mean TBT, ms", xscale="log", yscale="log")
    axes.legend()
