"""Question 1: how prefixes are reused beyond chat, as distributions, and the pool that the reuse needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from mooncake_lite.simulator.replay import KV_BYTES_PER_TOKEN
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.lru import lru_curve
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace
from questions.frame import SEEDS, Found, Point, Rows, emulated, public_trace, table

CHAT, TOKENS_PER_S, SPAN_S = "conversation_trace.jsonl", 41_000, 1179
"""A third of the public trace is one seed; prompt tokens per second and seconds are those of a third."""

MEAN_TOKENS = {"agents": 152_000, "code": 2_030, "rag": 4_550, "viral": 4_520}
"""Of the prompts of each kind, so that all have the prompt tokens per second of chat."""

PAUSES, TURNS = (10, 60, 150, 300, 600), 120
"""Seconds from turn to turn of agents; turns for each agent at work: two generations of sessions."""

POOLS_GIB = (3, 10, 30, 100, 300, 1_000, 3_000, 10_000)
GIB = BLOCK_TOKENS * KV_BYTES_PER_TOKEN / 2**30
HEADS = ("kind", "tokens reused", "share of a prompt", "gap, s", "blocks of most hits", "pool, GiB")
LIVE, LIVE_REQUESTS, LIVE_RATE, DIVIDE = ("code", "rag"), 160, 4.0, 16


def points(quick: bool) -> list[Point]:
    """Return each kind, with agents that pause for longer and longer, and two kinds live."""
    kinds = [("chat", 0), *(("agents", pause_s) for pause_s in PAUSES), ("code", 0), ("rag", 0), ("viral", 0)]
    found: list[Point] = [{"kind": a, "pause_s": b, "seed": seed} for a, b in kinds for seed in SEEDS]
    return found[3:4] if quick else [*found, *({"live": kind, "alone": True} for kind in LIVE)]


def run(point: Point) -> Found:
    """Describe the reuse of a trace, or play it live."""
    if "live" in point:
        return _live(point["live"])
    kind, pause_s, seed = point["kind"], point["pause_s"], point["seed"]
    if kind == "chat":
        requests = public_trace(CHAT).requests
        third = len(requests) // len(SEEDS)
        return described(Trace(requests[(seed - 1) * third : seed * third]))
    rate = TOKENS_PER_S / MEAN_TOKENS[kind]
    of = replace(KINDS[kind], pause_s=float(pause_s)) if pause_s else KINDS[kind]
    return described(made(of, round(rate * max(SPAN_S, TURNS * pause_s)), rate, seed))


def described(trace: Trace) -> Found:
    """Return the distributions of a trace: of prompts, gaps and blocks, and hits by the size of a pool."""
    requests, last, uses, gaps_s = trace.requests, dict[int, float](), Counter[int](), list[float]()
    for request in requests:
        now, leading = request.timestamp / 1000, True
        for one in request.hash_ids[: request.input_length // BLOCK_TOKENS]:
            if leading := leading and one in last:
                uses[one] += 1
                gaps_s.append(now - last[one])
            last[one] = now
    tokens, cached = np.array([one.input_length for one in requests]), np.array(cached_tokens(trace))
    curve, served = lru_curve(trace), np.cumsum(sorted(uses.values(), reverse=True))
    return {
        "reused": cached.sum() / tokens.sum(), "blocks": len(last),
        "share": dict(zip(("p10", "p50", "p90"), np.percentile(cached / tokens, (10, 50, 90)).tolist())),
        "gap_s": dict(zip(("p50", "p90"), np.percentile(gaps_s, (50, 90)).tolist())),
        "serving": (int(np.searchsorted(served, 0.9 * served[-1])) + 1) / len(last),
        "gib": GIB * curve.blocks_for(0.9),
        "by_pool": {str(gib): curve.tokens_at(gib / GIB) / tokens.sum() for gib in POOLS_GIB},
    }  # fmt: skip


def _live(kind: str) -> Found:
    """Play a kind on ranks that sleep: which share of its prompts was there, served and replayed?"""
    trace = divided(made(KINDS[kind], LIVE_REQUESTS, LIVE_RATE, 1), DIVIDE)
    with emulated(DIVIDE, prefill=1, decode=1, store=1) as ranks, ranks.serve() as cluster:
        served = ranks.live(cluster.port, trace, 1, lambda: None)["hit_rate"]["all"]
    return {
        "served": served,
        "replayed": sum(cached_tokens(trace)) / sum(one.input_length for one in trace.requests),
    }


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the distributions of each kind, and agents' pools by their pauses beside that of chat."""
    found, lines, pools = dict[str, Any](), list[list[str]](), [[f"{gib:,}"] for gib in POOLS_GIB]
    for kind in ("chat", *MEAN_TOKENS):
        own = Rows(row for row in rows.of(kind=kind) if row[0]["pause_s"] <= PAUSES[0])
        for path in (
            "reused",
            "share.p10",
            "share.p50",
            "share.p90",
            "gap_s.p50",
            "gap_s.p90",
            "serving",
            "gib",
        ):
            found[f"{path.replace('.', '_')}_{kind}"] = own.seeds(path)
        lines.append([
            text.format_map({name.removesuffix(f"_{kind}"): one for name, one in found.items()})
            for text in (
                kind, "{reused:.1%}", "{share_p10:.0%}, {share_p50:.0%}, {share_p90:.0%}",
                "{gap_s_p50:.1f}, {gap_s_p90:.1f}", "{serving:.2%}", "{gib:,.0f}",
            )
        ])  # fmt: skip
        for line, gib in zip(pools, POOLS_GIB):
            line.append(f"{own.seeds(f'by_pool.{gib}'):.1%}")
    waits = {pause_s: rows.seeds("gib", kind="agents", pause_s=pause_s) for pause_s in PAUSES}
    beyond = [found[f"gib_{kind}"].middle for kind in MEAN_TOKENS]
    return found | {
        "table": table(HEADS, lines),
        "pools": table(["pool, GiB", "chat", *MEAN_TOKENS], pools),
        "waits": table(["pause, s", "pool, GiB"], [[str(a), f"{b:,.0f}"] for a, b in waits.items()]),
        "wait_longest": waits[PAUSES[-1]],
        "wait_reused": rows.seeds("reused", kind="agents", pause_s=PAUSES[-1]),
        "longest": PAUSES[-1], "pause": PAUSES[0],
        "turns": next((a for a, b in waits.items() if min(b) > max(found["gib_chat"])), 0),
        "least": min(beyond), "most": max(beyond), "times": found["gib_chat"].middle / max(beyond),
        "tokens_per_s": TOKENS_PER_S, "span": SPAN_S, "seeds": len(SEEDS), "block": BLOCK_TOKENS,
        "divide": DIVIDE, "live_rate": LIVE_RATE, "live_requests": LIVE_REQUESTS,
        **{f"{name}_{kind}": one for kind in LIVE for name, one in rows.of(live=kind)[0][1].items()},
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""

    def apart(name: str, times: float) -> bool:
        """Tell whether all other kinds have at most this many times of what chat has, at every seed."""
        return all(max(of[f"{name}_{kind}"]) < times * min(of[f"{name}_chat"]) for kind in MEAN_TOKENS)

    least = {kind: min(of[f"reused_{kind}"]) for kind in MEAN_TOKENS}
    spots, chains = (of["serving_rag"], of["serving_viral"]), (of["serving_agents"], of["serving_code"])
    return {
        "all other kinds reuse more than chat": min(least.values()) > 1.4 * max(of["reused_chat"]),
        "their gaps are a tenth of those of chat": apart("gap_s_p50", 0.1),
        "they need less than a quarter of its pool": apart("gib", 0.25),
        "documents and templates are hot spots": 5 * max(map(max, spots)) < min(map(min, chains)),
        "half of the prompts before and after a template share nothing": max(of["share_p50_viral"]) == 0,
        "agents that pause reuse as much": abs(of["wait_reused"].middle - of["reused_agents"].middle) < 0.01,
        "pauses turn it within the sweep, at the end": of["turns"] == of["longest"],
        "live ranks reuse what a replay says": all(
            abs(of[f"served_{kind}"] - of[f"replayed_{kind}"]) < 0.01 for kind in LIVE
        ),
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the tokens reused by the size of the pool."""
    for kind, style in zip(("chat", *MEAN_TOKENS), ("ko-", "C0s-", "C1^-", "C2v-", "C3d-")):
        own = Rows(row for row in rows.of(kind=kind) if row[0]["pause_s"] <= PAUSES[0])
        reused = [100 * own.seeds(f"by_pool.{gib}").middle for gib in POOLS_GIB]
        axes.plot(POOLS_GIB, reused, style, label=kind)
    axes.set(xlabel="LRU pool, GiB", ylabel="prompt tokens reused, %", xscale="log", ylim=(0, 100))
    axes.legend()
