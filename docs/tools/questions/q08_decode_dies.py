"""Question 8: what a decode node's death costs, by where the KV of its sequences is found again."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

from mooncake_lite.workloads.traces import Trace, TraceRequest
from questions.frame import SEEDS, Found, Point, Rows, Seeds, emulated, simulated, table

SYSTEMS = {
    "restart": ("split", 512, "off"), "pages": ("split", 512, "hash"), "pool, 2048": ("pooled", 2048, "off"),
    "pool, 512": ("pooled", 512, "off"), "pool, 64": ("pooled", 64, "off"),
}  # fmt: skip
"""Mode, tokens of a block, and whether prefill nodes find prefixes in their own pages."""

SHAPES = {"chat": (8192, 1500, 40), "documents": (32_768, 1500, 40), "reasoning": (2048, 5000, 130)}
"""Tokens of a prompt and of an answer, and the second of the death."""

LINKS, NODES, REQUESTS, WITHIN_S, DECODES = (400, 100, 50, 25), "2P2D", 16, 20.0, 2
LIVE = {"restart": (4, "--mode", "split", "--prefix-sharing", "off"), "pool, 128": (4,), "pool, 16": (32,)}


def points(quick: bool) -> list[Point]:
    """Return a death for each system, shape and link, what the same costs without one, and live deaths."""
    links, seeds = (LINKS[:1], SEEDS[:1]) if quick else (LINKS, SEEDS)
    found = [
        {"system": system, "shape": shape, "gbps": gbps, "dies": True, "seed": seed}
        for system, shape, gbps, seed in product(SYSTEMS, SHAPES, links, seeds)
        if shape == "documents" or gbps in (LINKS[0], LINKS[-1])
    ]
    found += [
        {"system": system, "shape": shape, "gbps": LINKS[0], "dies": False, "seed": seed}
        for system, shape, seed in product(SYSTEMS, SHAPES, seeds)
    ]
    return found[:1] if quick else [*found, *({"live": system, "alone": True} for system in LIVE)]


def _trace(shape: str, block: int, seed: int) -> Trace:
    prompt, answer, _ = SHAPES[shape]
    dice, blocks = Random(f"{seed}"), prompt // block
    times = sorted(1000 * WITHIN_S * dice.random() for _ in range(REQUESTS))
    ids = [list(range(n * blocks, (n + 1) * blocks)) for n in range(REQUESTS)]
    return Trace([TraceRequest(at, prompt, answer, each) for at, each in zip(times, ids)], block)


def run(point: Point) -> Found:
    """Return the pause of nine in ten open answers, seconds of prefill, bytes between nodes, and TPOT."""
    if "live" in point:
        divide, *flags = LIVE[point["live"]]
        nodes = {"prefill": 2, "decode": DECODES} | ({} if "split" in flags else {"store": 1})
        with emulated(divide, **nodes) as ranks, ranks.serve(*flags) as cluster:
            return {"pause_s": ranks.pause(cluster)}
    mode, block, sharing = SYSTEMS[point["system"]]
    kill = [f"decode@{SHAPES[point['shape']][2]}"] if point["dies"] else []
    found = simulated(
        _trace(point["shape"], block, point["seed"]), point["seed"], nodes=NODES, mode=mode,
        prefix_sharing=sharing, link_gbps=point["gbps"], kill=kill,
    )  # fmt: skip
    return {
        "pause_s": found["kills"][0]["longest_gap_s"]["p90"] if kill else 0.0,
        "prefill_s": found["prefill_s_per_request"] * found["mechanisms"]["prefills"]["tried"],
        "far": found["bytes_moved"]["far"], "tpot_s": found["tpot_s"]["mean"],
        "e2e_s": found["e2e_s"]["mean"],
    }  # fmt: skip


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page. A replica's are an estimate from bytes, as there is none to play."""
    found, pauses, prices = dict[str, Any](), [], []
    played = [
        (shape, gbps) for shape, gbps in product(SHAPES, LINKS) if rows.of(shape=shape, gbps=gbps, dies=True)
    ]
    for system in SYSTEMS:
        name, costs = system.replace(", ", "_"), []
        for shape, gbps in played:
            pause = rows.seeds("pause_s", system=system, shape=shape, gbps=gbps, dies=True)
            found[f"pause_{name}_{shape}_{gbps}"] = pause
        for shape in SHAPES:
            died, calm, least = (
                {"system": one, "shape": shape, "gbps": LINKS[0], "dies": dies}
                for one, dies in ((system, True), (system, False), ("restart", False))
            )
            anew = zip(rows.seeds("prefill_s", **died), rows.seeds("prefill_s", **calm))
            found[f"anew_{name}_{shape}"] = again = Seeds(a - b for a, b in anew)
            found[f"far_{name}_{shape}"] = far = rows.seeds("far", **calm).over(rows.seeds("far", **least))
            found[f"tpot_{name}_{shape}"] = rows.seeds("tpot_s", **calm).over(rows.seeds("tpot_s", **least))
            costs += [f"{again:.1f} s", f"{far:.2f}"]
        slowest = {"system": system, "shape": "documents", "gbps": LINKS[-1], "dies": True}
        found[f"e2e_{name}"] = rows.seeds("e2e_s", **slowest)
        pauses.append([system, *(f"{found[f'pause_{name}_{shape}_{gbps}']:.1f} s" for shape, gbps in played)])
        prices.append([system, *costs])
    for shape, (prompt, answer, _) in SHAPES.items():
        found[f"far_replica_{shape}"] = 2 + answer / prompt
    prices.append(
        ["replica", *(each for shape in SHAPES for each in ("0.0 s", f"{found[f'far_replica_{shape}']:.2f}"))]
    )
    pools = {gbps: found[f"pause_pool_64_documents_{gbps}"].middle for gbps in LINKS}
    slow = [gbps for gbps in LINKS if pools[gbps] > found[f"pause_restart_documents_{gbps}"].middle]
    heads = [f"{shape}, {gbps} Gbit/s" for shape, gbps in played]
    costs = [f"{shape}: {what}" for shape in SHAPES for what in ("anew", "bytes")]
    for name in rows.values("live"):
        found[f"live_{name.replace(', ', '_')}"] = 1000 * rows.seeds("pause_s", live=name).middle
    step_s = rows.seeds("tpot_s", system="restart", shape="chat", gbps=LINKS[0], dies=False)
    return found | {
        "pauses": table(["KV from", *heads], pauses), "prices": table(["KV from", *costs], prices),
        "pages_turn": max((gbps for gbps in LINKS if _lasts(found, "pages", gbps)), default=0),
        "requests": REQUESTS, "nodes": NODES, "seeds": len(SEEDS), "turns": max(slow, default=0),
        "step_ms": 1000 * step_s.middle, "long": SHAPES["documents"][0],
    }  # fmt: skip


def _lasts(found: dict[str, Any], system: str, gbps: int) -> bool:
    """Tell whether the pool's pause is longer than that of another source, with each seed."""
    return min(found[f"pause_pool_64_documents_{gbps}"].over(found[f"pause_{system}_documents_{gbps}"])) > 1


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    chat, documents = ("pause_{}_chat_400", "pause_{}_documents_400")
    return {
        "all anew is far the slowest": min(of[documents.format("restart")])
        > 5 * max(of[documents.format("pool_64")]),
        "pages of prefill nodes are nearly a pool": max(of[documents.format("pages")]) < 2,
        "small blocks shorten the pause of chat": max(of[chat.format("pool_64")])
        < min(of[chat.format("pool_2048")]),
        "and of long answers": max(of["pause_pool_64_reasoning_400"])
        < min(of["pause_pool_2048_reasoning_400"]),
        "slow links turn it": 0 < of["turns"] < 50,
        "pages turn it on faster links": of["turns"] < of["pages_turn"] < 400,
        "on the slowest links, too": min(
            of["pause_pool_64_documents_25"].over(of["pause_pages_documents_25"])
        )
        > 1,
        "with larger blocks the pool is nearly as fast for documents": max(
            of["pause_pool_2048_documents_400"]
        )
        < 1.2 * min(of["pause_pool_64_documents_400"]),
        "all answers end later": min(of["e2e_pool_64"]) > of["e2e_restart"].middle,
        "for chat, too": min(of["pause_pool_64_chat_25"]) > max(of["pause_restart_chat_25"]),
        "storing as blocks fill costs no time": max(of["tpot_pool_64_chat"]) < 1.01,
        "and few bytes": max(of["far_pool_64_documents"]) < 1.1 < of["far_replica_documents"],
        "live, the pool is faster": of["live_pool_128"] < 0.7 * of["live_restart"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the pause of long documents by link."""
    for system, style in zip(SYSTEMS, ("k--", "C7:", "C0s-", "C1o-", "C2^-")):
        pause = [
            rows.seeds("pause_s", system=system, shape="documents", gbps=g, dies=True).middle for g in LINKS
        ]
        axes.plot(LINKS, pause, style, label=system)
    axes.set(xscale="log", yscale="log", xlabel="link of a node, Gbit/s", ylabel="pause of answers, s")
    axes.set_xticks(LINKS, [str(one) for one in LINKS])
    axes.set_yticks((1, 2, 5, 10, 20), ("1", "2", "5", "10", "20"))
    axes.minorticks_off()
    axes.legend()
