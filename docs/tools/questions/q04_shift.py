"""Question 4: hot documents change all at once: how far reuse dips, and when it has recovered."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from msgspec import structs

from mooncake_lite.simulator.replay import replay, workload_of
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.traces import Trace
from questions.frame import SEEDS, Found, Point, Rows, Seeds, pooled_reuse, simulated, table
from store.policies import policy_factory

POLICIES = ("lru", "lfu", "s3fifo", "arc", "wtinylfu", "learned")
RATE, AFTER, WINDOW = 9.0, 3_000, 250
"""Requests per second, requests after the shift, and those of one point of the curve."""

BASE = {"share": 1.0, "gib": 100, "history": 3_000}
"""Share of the questions that move, size of the pool, and requests before the shift."""

SWEPT = ("moved, pool, requests before", *POLICIES)
SWEEP = {"share": (0.5, 0.25), "gib": (300, 1_000), "history": (1_000,)}
GIB_BLOCKS, STEADY = 6.4, 0.95

PLACEMENTS = ("kvcache-centric", "global-cache", "local-cache", "least-loaded")
PLACED = ("placement", "steady, s", "after, s", "ratio", "ratio at the end")
NODES, DRAM, CLUSTER_RATE, CLUSTER_REQUESTS, CLUSTER_WINDOW = "4P2D", "30GB", 5.0, 500, 50
LIVE_BLOCKS, LIVE_REQUESTS, LIVE_RATE, DIVIDE = 264, 240, 6.0, 16


def points(quick: bool) -> list[Point]:
    """Return replays with all evictions, clusters with and without a shift by placement, and live runs."""
    settings = [BASE, *({**BASE, name: value} for name, values in SWEEP.items() for value in values)]
    found: list[Point] = [{**setting, "seed": seed} for setting in settings for seed in SEEDS]
    if quick:
        return found[-1:]
    found += [{"placement": one, "seed": seed} for one in PLACEMENTS for seed in SEEDS]
    return found + [{"live": policy, "alone": True} for policy in POLICIES[:2]]


def run(point: Point) -> Found:
    """Play a shift, and the same questions where all had been so from the begin."""
    if "live" in point:
        trace = shifted(LIVE_REQUESTS, LIVE_REQUESTS // 2, LIVE_RATE, 1.0, 1)
        return pooled_reuse(divided(trace, DIVIDE), point["live"], LIVE_BLOCKS)
    if "placement" in point:
        return _placed(point["placement"], point["seed"])
    begin, found = point["history"], dict[str, Any]()
    workloads = [
        workload_of(shifted(begin + AFTER, at, RATE, point["share"], point["seed"]), complete_only=True)
        for at in (begin, 0)
    ]
    blocks = round(point["gib"] * GIB_BLOCKS)
    for name in POLICIES:
        hits = [replay(one, policy_factory(name)(blocks), blocks).by_request[begin:] for one in workloads]
        after, steady = ([sum(one[at : at + WINDOW]) for at in range(0, AFTER, WINDOW)] for one in hits)
        curve = [a / b for a, b in zip(after, steady)]
        found[name] = {
            "curve": curve, "dip": 1 - curve[0], "end": sum(after[-4:]) / sum(steady[-4:]),
            "recovered_s": recovered(curve) * WINDOW / RATE,
            "hits": sum(after) / sum(len(ids) for _, ids in workloads[0].requests[begin:]),
        }  # fmt: skip
    return found


def recovered(curve: list[float]) -> int:
    """Return the windows until two in a row are within 5 % of the steady level; all of them if none are."""
    good = [one >= STEADY for one in curve]
    return next((at for at, both in enumerate(pairwise(good)) if all(both)), len(curve))


def shifted(requests: int, begin: int, rate: float, share: float, seed: int) -> Trace:
    """Make questions about documents. From request `begin` on, this share of them is about new documents.

    The requests after the later of two begins are the same, so that only what came before differs. No two
    requests come at one time.
    """
    old, new = (made(KINDS["rag"], requests, rate, one).requests for one in (seed, seed + 100))
    dice, found = Random(f"shift {seed}"), []
    for number, (before, after) in enumerate(zip(old, new)):
        moved = (dice.random() < share) & (number >= begin)
        one = after if moved else before
        ids = [2 * each + moved for each in one.hash_ids]
        found.append(structs.replace(one, timestamp=before.timestamp + number / 1000, hash_ids=ids))
    return Trace(found)


def _placed(placement: str, seed: int) -> Found:
    """Return the mean TTFT of each window after a shift, and of the same questions without it."""
    half, found = CLUSTER_REQUESTS // 2, dict[str, Any]()
    windows = [f"{(number - half) // CLUSTER_WINDOW}" for number in range(CLUSTER_REQUESTS)]
    for name, begin in (("shifted", half), ("steady", 0)):
        trace = shifted(CLUSTER_REQUESTS, begin, CLUSTER_RATE, 1.0, seed)
        of = simulated(trace, seed, nodes=NODES, node_dram=DRAM, policy=placement, groups=windows)["groups"]
        found[name] = [of[f"{at}"]["ttft_s"]["mean"] for at in range(half // CLUSTER_WINDOW)]
    return found


def numbers(rows: Rows) -> dict[str, Any]:
    """Return dips and recoveries: by policy, by what moves, by pool and history, and of TTFT by placement."""
    found, lines, pools = dict[str, Any](), list[list[str]](), list[list[str]]()
    sweep, placed = list[list[str]](), list[list[str]]()
    for name in POLICIES:
        of = {one: rows.seeds(f"{name}.{one}", **BASE) for one in ("dip", "recovered_s", "end", "hits")}
        found |= {f"{one}_{name}": each for one, each in of.items()}
        cells = [f"{of['dip']:.0%}", _recovered(of["recovered_s"]), f"{of['end']:.1%}", f"{of['hits']:.1%}"]
        lines.append([name, *cells])
    for setting in [BASE, *({**BASE, name: value} for name, values in SWEEP.items() for value in values)]:
        ends = {name: rows.seeds(f"{name}.end", **setting) for name in POLICIES}
        share, gib, history = setting.values()
        found[f"end_lfu_{share:.0%}_{gib}_{history}".replace("%", "")] = ends["lfu"]
        sweep.append([f"{share:.0%}, {gib:,} GiB, {history:,}", *(f"{one:.1%}" for one in ends.values())])
    for gib in (BASE["gib"], *SWEEP["gib"]):
        cells = []
        for name in POLICIES:
            dip, back = (
                rows.seeds(f"{name}.{one}", **{**BASE, "gib": gib}) for one in ("dip", "recovered_s")
            )
            found |= {f"dip_{name}_{gib}": dip, f"recovered_s_{name}_{gib}": back}
            cells.append(f"{dip:.0%}, {_recovered(back)}")
        pools.append([f"{gib:,} GiB", *cells])
    for one in PLACEMENTS:
        first, steady, last, end = (
            rows.seeds(_ttft_s(name, at), placement=one) for at in (0, -1) for name in ("shifted", "steady")
        )
        ratios = first.over(steady), last.over(end)
        short = one.replace("-", "_")
        found |= {f"first_{short}": first, f"steady_{short}": steady}
        found |= {f"ratio_{short}": ratios[0], f"last_{short}": ratios[1]}
        second = (rows.seeds(_ttft_s(name, 1), placement=one) for name in ("shifted", "steady"))
        found[f"second_{short}"] = next(second).over(next(second))
        placed.append([one, f"{steady:.2f}", f"{first:.2f}", *(f"{each:.2f}" for each in ratios)])
    live = [(policy, rows.of(live=policy)[0][1]) for policy in POLICIES[:2]]
    return found | {
        "placed": table(PLACED, placed),
        "table": table(("policy", "dip", "recovered after", "level at the end", "hits"), lines),
        "sweep": table(SWEPT, sweep), "most_gib": SWEEP["gib"][-1],
        "pools": table(("pool", *POLICIES), pools),
        **{f"live_{name}_{policy}": each for policy, one in live for name, each in one.items()},
        "window_s": WINDOW / RATE, "after_s": AFTER / RATE, "steady": STEADY,
        "gib": BASE["gib"], "rate": RATE,
        "history": BASE["history"], "after": AFTER, "seeds": len(SEEDS), "nodes": NODES, "dram": DRAM,
        "cluster_rate": CLUSTER_RATE, "cluster_requests": CLUSTER_REQUESTS,
        "cluster_window_s": CLUSTER_WINDOW / CLUSTER_RATE, "live_blocks": LIVE_BLOCKS,
        "live_requests": LIVE_REQUESTS, "live_rate": LIVE_RATE, "divide": DIVIDE,
    }  # fmt: skip


def _recovered(seconds: Seeds) -> str:
    whole = AFTER / RATE
    return f"{seconds:.0f} s" if seconds.middle < 0.99 * whole else f"not in {whole:.0f} s"


def _ttft_s(name: str, window: int) -> Callable[[Found], float]:
    """Return what finds the mean TTFT of a window."""
    return lambda found: found[name][window]


def draw(axes: Any, rows: Rows) -> None:
    """Draw hits after the shift over those of the steady level, by policy."""
    for name, style in zip(POLICIES, ("k-", "C3o-", "C0-", "C1-", "C2-", "C4--")):
        curves = zip(*(found[name]["curve"] for _, found in rows.of(**BASE)))
        middle = [100 * sorted(one)[len(one) // 2] for one in curves]
        axes.plot([WINDOW / RATE * (at + 0.5) for at in range(len(middle))], middle, style, label=name)
    axes.set(xlabel="seconds after the shift", ylabel="hits, % of the steady level", ylim=(50, 105))
    axes.legend(fontsize="small", ncols=2)


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    patient = ("s3fifo", "arc", "wtinylfu", "learned")
    return {
        "LFU never recovers": min(of["recovered_s_lfu"]) > 0.99 * of["after_s"]
        and max(of["end_lfu"]) < of["steady"],
        "LRU is the first to recover": max(of["recovered_s_lru"])
        < min(min(of[f"recovered_s_{name}"]) for name in patient),
        "the others dip more": min(min(of[f"dip_{name}"]) for name in patient) > 2 * max(of["dip_lru"]),
        "and have more hits after the shift all the same": all(
            min(of[f"hits_{name}"].over(of["hits_lru"])) > 1.04 for name in patient
        ),
        "in the largest pool LRU dips as far as others": of[f"dip_lru_{SWEEP['gib'][-1]}"].middle
        > 0.9 * max(of[f"dip_{name}_{SWEEP['gib'][-1]}"].middle for name in ("s3fifo", "arc", "learned")),
        "those that distrust need longest in the middle pool": all(
            of[f"recovered_s_{name}_{SWEEP['gib'][0]}"].middle
            > max(of[f"recovered_s_{name}_{gib}"].middle for gib in (BASE["gib"], SWEEP["gib"][-1]))
            for name in ("s3fifo", "arc", "learned")
        ),
        "TTFT dips for one window where placement follows the cache": all(
            min(of[f"ratio_{one}"]) > 1.1
            and sum(each > 1.1 for each in of[f"second_{one}"]) <= 1
            and max(of[f"last_{one}"]) < 1.05
            for one in ("kvcache_centric", "global_cache")
        ),
        "and is below that of the others before and after": all(
            max(of[f"{when}_kvcache_centric"]) < of[f"{when}_{other}"].middle
            for when in ("steady", "first")
            for other in ("local_cache", "least_loaded")
        ),
        "live reuse is near that of the replay": all(
            abs(of[f"live_served_{name}"] - of[f"live_replayed_{name}"]) < 0.02 for name in POLICIES[:2]
        ),
        "LFU recovers where half of the questions move": of["end_lfu_50_100_3000"].middle > of["steady"],
        "or where the pool holds the documents of both times": min(of["end_lfu_100_1000_3000"])
        > of["steady"],
        "a longer past holds it back": of["end_lfu_100_100_1000"].middle > of["end_lfu"].middle + 0.05,
        "and where a quarter does": min(of["end_lfu_25_100_3000"]) > of["steady"],
    }
