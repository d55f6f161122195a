"""Question 13: several sites: what to copy between them, and which prompts a far site prefills."""

from __future__ import annotations

from typing import Any

from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.kinds import Singles, made
from mooncake_lite.workloads.traces import Trace
from questions.frame import SEEDS, Found, Point, Rows, Seeds, simulated, table

DOCUMENTS = Singles(
    about="questions about documents: 80 % about 100 hot ones, 20 % about documents of their own",
    documents=100, document_tokens=16_000, hot_share=0.8, skew=0.8, own_tokens=12_000, question_tokens=300,
    answer_tokens=200,
)  # fmt: skip
LONG = Singles(about="prompts of very different lengths", own_tokens=12_000, spread=1.0, answer_tokens=200)

BLIND = "blind"
COPIES: dict[str, dict[str, Any]] = {
    BLIND: {},
    "none": {},
    "pull at once": {"site_copies": "pull", "copy_reads": 1},
    "pull at the 2nd": {"site_copies": "pull", "copy_reads": 2},
    "push at the 2nd": {"site_copies": "push", "copy_reads": 2},
    "push at the 4th": {"site_copies": "push", "copy_reads": 4},
}
"""Which blocks a site gets a copy of, of those that it reads elsewhere, or that are read anywhere."""

EVICTIONS = ("lru", "lfu", "gdsf", "wtinylfu")
NODES, RACKS = "8P8D", "0,0,0,0,1,1,1,1,0,0,0,0,1,1,1,1"
DRAM, SMALL, RATE, LATENCY_MS = "100GB", "25GB", 5.0, 20
GB_PRICE, NODE_HOUR_PRICE = 0.02, 16.0
"""Of a GB between regions of a public cloud, and of an hour of a node with eight GPUs."""
LINKS = (25, 100, 400)

FAR_NODES, FAR_RACKS, NEAR, FAR = "6P4D", "0,0,1,1,1,1,0,0,0,0", 2, 4
"""The near site has two nodes that prefill, and all that decode."""
FAR_RATE, FAR_LINKS = 1.8, (25, 50, 100)
THRESHOLDS = (0, 8192, 16_384, 24_576, 32_768, 65_536)
ANY = -1


def points(quick: bool) -> list[Point]:
    """Return what is copied by link; what is evicted where memory is short; thresholds by link."""
    requests, seeds = (40, SEEDS[:1]) if quick else (300, SEEDS)
    links, far_links, copies = (
        (LINKS[:1], FAR_LINKS[:1], list(COPIES)[:2]) if quick else (LINKS, FAR_LINKS, COPIES)
    )
    found = [
        {"copies": one, "gbps": gbps, "seed": seed} for gbps in links for one in copies for seed in seeds
    ]
    found += [{"evicts": one, "seed": seed} for one in EVICTIONS for seed in seeds]
    found += [
        {"far_tokens": tokens, "gbps": gbps, "seed": seed}
        for gbps in far_links for tokens in (ANY, *THRESHOLDS) for seed in seeds
    ]  # fmt: skip
    return [{**point, "requests": requests} for point in found]


def run(point: Point) -> Found:
    """Play documents on two sites that both serve, or prompts that a far site may prefill."""
    seed = point["seed"]
    if "far_tokens" in point:
        trace, gbps = made(LONG, point["requests"], FAR_RATE, seed), point["gbps"]
        found = simulated(
            trace, seed, nodes=FAR_NODES, racks=FAR_RACKS, policy="topology", site_gbps=gbps,
            site_ms=LATENCY_MS, control={"far_tokens": point["far_tokens"]},
        )  # fmt: skip
        return {**found, "closed": closed(trace, point["far_tokens"], gbps)}
    copies = COPIES[point.get("copies", "pull at once")]
    policy = "global-cache" if point.get("copies") == BLIND else "topology"
    return simulated(
        made(DOCUMENTS, point["requests"], RATE, seed), seed, nodes=NODES, racks=RACKS, policy=policy,
        site_gbps=point.get("gbps", LINKS[1]), site_ms=LATENCY_MS, control=copies,
        node_dram=SMALL if "evicts" in point else DRAM, eviction=point.get("evicts", "lru"),
    )  # fmt: skip


def closed(trace: Trace, far_tokens: int, gbps: float) -> dict[str, float]:
    """Return the load that a threshold gives to near nodes, far nodes and the uplink; 1: all of the time."""
    profile = named_profile(PAPER_MACHINES)
    seconds, layers = (
        pass_seconds(profile),
        Cluster(profile=profile, nodes={"prefill": 1, "decode": 1}).layout,
    )
    last_s = trace.requests[-1].timestamp / 1000
    busy = {"near": 0.0, "far": 0.0, "link": 0.0}
    for one in trace.requests:
        tokens, is_far = one.input_length, one.input_length >= far_tokens
        busy["far" if is_far else "near"] += seconds(PassLoad(tokens, tokens * (tokens + 1) // 2))
        busy["link"] += is_far * tokens * layers.nbytes / layers.block_tokens / (gbps * 1e9 / 8)
    return {
        "near": busy["near"] / NEAR / last_s,
        "far": busy["far"] / FAR / last_s,
        "link": busy["link"] / last_s,
    }


def numbers(rows: Rows) -> dict[str, Any]:
    """Return what copies and evictions change, what a threshold changes, and what bytes cost."""
    return {
        **_copied(rows), **_far(rows), **_prices(), "requests": rows[0][0]["requests"], "seeds": len(SEEDS),
        "nodes": NODES, "dram": DRAM, "small": SMALL, "rate": RATE, "latency_ms": LATENCY_MS, "near": NEAR,
        "far": FAR, "far_rate": FAR_RATE, "price": GB_PRICE, "node_price": NODE_HOUR_PRICE,
    }  # fmt: skip


def _copied(rows: Rows) -> dict[str, Any]:
    found, lines = dict[str, Any](), []
    links = rows.values("gbps")
    links = [gbps for gbps in links if rows.of(copies="none", gbps=gbps)]
    for copies in COPIES:
        cells = [copies]
        for gbps in links:
            of = {"copies": copies, "gbps": gbps}
            second_s, sent = rows.seeds("second_token_s.mean", **of), rows.seeds("bytes_moved.sites", **of)
            none_s = rows.seeds("second_token_s.mean", copies="none", gbps=gbps)
            found[f"second_{copies}_{gbps}"] = second_s.over(none_s)
            found[f"sent_{copies}_{gbps}"] = Seeds(one / 1e9 for one in sent)
            cells += [f"{second_s.middle:.2f} s", f"{sent.middle / 1e9:,.0f} GB"]
        lines.append(cells)
    heads = [word for gbps in links for word in (f"at {gbps} Gbit/s", "sent")]
    kept = [found[f"second_{copies}_{gbps}"] for copies in list(COPIES)[2:] for gbps in links]
    hits = {name: rows.seeds("hit_rate.all", evicts=name) for name in rows.values("evicts")}
    ttft = {name: rows.seeds("ttft_s.mean", evicts=name) for name in hits}
    ratios = [(name, hits[name].over(hits["lru"]), ttft[name].over(ttft["lru"])) for name in hits]
    evictions = [[name, *(f"{one:.2f} ({one.spread:.2f})" for one in both)] for name, *both in ratios]
    evictions[0] = [
        "lru",
        f"{hits['lru']:.0%} ({hits['lru'].spread:.0%})",
        f"{ttft['lru']:.2f} s ({ttft['lru'].spread:.2f})",
    ]
    return found | {
        "copies_table": table(["copies", *heads], lines),
        "copying": Seeds(one for each in kept for one in each),
        "eviction_table": table(["eviction", "reused", "TTFT"], evictions),
        "narrow": links[0], "middle": links[1], "wide": links[-1],
        "blind": found[f"second_blind_{links[1]}"], "blind_sent": found[f"sent_blind_{links[1]}"],
        "none_sent": found[f"sent_none_{links[1]}"],
    }  # fmt: skip


def _far(rows: Rows) -> dict[str, Any]:
    found, lines = dict[str, Any](), []
    thresholds = [one for one in rows.values("far_tokens") if one != ANY]
    links = sorted(gbps for gbps in rows.values("gbps") if rows.of(far_tokens=ANY, gbps=gbps))
    for gbps in links:
        times = {
            one: rows.seeds("second_token_s.mean", far_tokens=one, gbps=gbps) for one in (*thresholds, ANY)
        }
        loads = {
            one: rows.seeds(lambda found: max(found["closed"].values()), far_tokens=one, gbps=gbps).middle
            for one in thresholds
        }
        best = min(thresholds, key=lambda one: times[one].middle)
        found |= {
            f"best_{gbps}": best, f"closed_{gbps}": min(loads, key=lambda one: loads[one]),
            f"best_s_{gbps}": times[best], f"all_s_{gbps}": times[thresholds[0]].over(times[best]),
            f"few_s_{gbps}": times[thresholds[-1]].over(times[best]),
            f"own_{gbps}": times[ANY].over(times[best]),
        }  # fmt: skip
        lines.append([
            f"{gbps} Gbit/s", *(f"{times[one].middle:.1f} s" for one in (*thresholds, ANY)),
            f"{found[f'closed_{gbps}']:,}",
        ])  # fmt: skip
    heads = ["uplink", *(f"{one:,}" for one in thresholds), "no threshold", "closed form"]
    free = min((gbps for gbps in links if found[f"own_{gbps}"].middle <= 1), default=0)
    return found | {
        "free": free,
        "far_table": table(heads, lines),
    }


def _prices() -> dict[str, Any]:
    """Return what it costs to compute the KV of a token of a prompt of 8,192 tokens, and to move it."""
    profile = named_profile(PAPER_MACHINES)
    tokens = 8192
    layout = Cluster(profile=profile, nodes={"prefill": 1, "decode": 1}).layout
    token_gb = layout.nbytes / layout.block_tokens / 1e9
    seconds = pass_seconds(profile)(PassLoad(tokens, tokens * (tokens + 1) // 2))
    computed = seconds / tokens * NODE_HOUR_PRICE / 3600
    return {
        "price_tokens": tokens, "dearer": token_gb * GB_PRICE / computed, "even_price": computed / token_gb,
        "even_gbps": 8 * token_gb * tokens / seconds,
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    links = FAR_LINKS
    near_by = [
        abs(THRESHOLDS.index(of[f"best_{gbps}"]) - THRESHOLDS.index(of[f"closed_{gbps}"])) for gbps in links
    ]
    return {
        "no way to copy gains as much as a twentieth": min(of["copying"]) > 0.95,
        "a blind policy is slower and moves more": min(of["blind"]) > 1.02 and min(of["blind_sent"]) > 100,
        "requests that go where the KV is move nearly nothing": max(of["none_sent"]) < 30,
        "to move KV costs more than to compute it": of["dearer"] > 5,
        "the best is within the sweep": all(of[f"best_{gbps}"] in THRESHOLDS[1:-1] for gbps in links),
        "it does not grow with the uplink": of[f"best_{links[0]}"] >= of[f"best_{links[-1]}"],
        "the closed form names it, or the next one": max(near_by) <= 1,
        "both ends are slower": min(*of[f"all_s_{links[0]}"], *of[f"few_s_{links[0]}"]) > 1.5,
        "the policy's own choice is as good from the middle on": of["free"] == links[1],
        "and better on the widest": max(of[f"own_{links[-1]}"]) < 1,
        "on the narrowest it is worse": min(of[f"own_{links[0]}"]) > 1,
    }  # fmt: skip


def draw(axes: Any, rows: Rows) -> None:
    """Draw the time to the second token by threshold, for each uplink."""
    thresholds = [one for one in rows.values("far_tokens") if one != ANY]
    links = sorted(gbps for gbps in rows.values("gbps") if rows.of(far_tokens=ANY, gbps=gbps))
    for number, gbps in enumerate(links):
        times = [rows.seeds("second_token_s.mean", far_tokens=one, gbps=gbps).middle for one in thresholds]
        axes.plot([one / 1000 for one in thresholds], times, f"C{number}o-", label=f"{gbps} Gbit/s")
        own = rows.seeds("second_token_s.mean", far_tokens=ANY, gbps=gbps).middle
        axes.axhline(own, color=f"C{number}", linestyle=":", linewidth=0.8)
    axes.set(xlabel="tokens from which the far site prefills, thousands", yscale="log")
    axes.set_ylabel("mean time to the second token, s")
    axes.legend(title="dotted: no threshold", fontsize="small")
