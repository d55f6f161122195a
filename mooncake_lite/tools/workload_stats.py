"""What is in a trace: lengths, arrivals, and how often blocks come back; and a figure of it.

Used by `workload stats`. Pure. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_lite.simulator.figure import canvas
from mooncake_lite.simulator.replay import replay, workload_of
from mooncake_lite.workloads.metrics import spread_of
from mooncake_lite.workloads.traces import Trace
from store.policies import policy_factory

MOST_HIT = 5
BUCKETS = 60
"""Stretches of time of the rate, and points of it in the figure."""


def stats_of(trace: Trace) -> dict[str, Any]:
    """Describe a trace, for JSON.

    requests_per_s       mean, and over_time: in each of BUCKETS equal stretches of the trace
    blocks               seen_once: share of the unique ones; most_hit: the ids with the most references
    token_hit_share      share of the tokens of prompts that a pool without a limit would have
    hits                 share of all references that hit in a pool of so many blocks, with LRU
    reuse_gap_s          between two references to a block
    """
    arrivals_s = [request.timestamp / 1e3 for request in trace.requests]
    span_s = arrivals_s[-1] - arrivals_s[0]
    counts, edges = np.histogram(arrivals_s, BUCKETS)
    references = Counter(item for request in trace.requests for item in request.hash_ids)
    hit_share, gaps_s = _reuse(trace)
    workload = workload_of(trace)
    sizes = sorted({max(1, len(references) >> half) for half in range(8)})
    return {
        "requests": len(trace.requests),
        "duration_s": span_s,
        "requests_per_s": {
            "mean": len(trace.requests) / span_s if span_s else None,
            "over_time": (counts / np.diff(edges)).tolist(),
        },
        "input_length": _lengths([request.input_length for request in trace.requests]),
        "output_length": _lengths([request.output_length for request in trace.requests]),
        "block_tokens": trace.block_tokens,
        "blocks": {
            "references": references.total(),
            "unique": len(references),
            "seen_once": sum(count == 1 for count in references.values()) / len(references),
            "most_hit": [{"id": item, "references": n} for item, n in references.most_common(MOST_HIT)],
        },
        "token_hit_share": hit_share,
        "hits": [
            {"blocks": size, "hit_rate": replay(workload, policy_factory("lru")(size), size).hit_rate}
            for size in sizes
        ],
        "reuse_gap_s": _lengths(gaps_s),
    }


def _lengths(values: Sequence[float]) -> dict[str, float | None]:
    return {**spread_of(values), "max": max(values, default=None)}


def _reuse(trace: Trace) -> tuple[float, list[float]]:
    """Return the share of tokens that a pool without a limit has, and the seconds between references."""
    last_s: dict[int, float] = {}
    gaps_s, hit = list[float](), 0
    for request in trace.requests:
        now, ids = request.timestamp / 1e3, request.hash_ids
        leading = next((n for n, item in enumerate(ids) if item not in last_s), len(ids))
        hit += min(leading * trace.block_tokens, request.input_length)
        gaps_s += [now - last_s[item] for item in ids if item in last_s]
        last_s.update(dict.fromkeys(ids, now))
    return hit / sum(request.input_length for request in trace.requests), gaps_s


def draw(trace: Trace, stats: dict[str, Any], suffix: str) -> bytes:
    """Draw the distributions of lengths, the arrivals and the hits. suffix: .svg or .png."""
    file, shares = io.BytesIO(), np.linspace(0, 1, 201)
    rates, hits = stats["requests_per_s"]["over_time"], stats["hits"]
    with canvas(file, suffix, "workload", (5, 7.5), 3, shared=False) as panels:
        for name in ("input_length", "output_length"):
            lengths = [getattr(request, name) for request in trace.requests]
            panels[0].plot(np.quantile(lengths, shares), shares, label=name.replace("_", " "))
        panels[0].legend()
        panels[0].set(xscale="log", xlabel="tokens", ylabel="share of requests")
        panels[1].stairs(rates, np.linspace(0, stats["duration_s"] or 1, BUCKETS + 1))
        panels[1].set(xlabel="seconds", ylabel="requests/s")
        panels[2].plot([one["blocks"] for one in hits], [one["hit_rate"] for one in hits], "ko-")
        panels[2].set(xscale="log", xlabel="blocks of the pool, LRU", ylabel="share of references that hit")
    return file.getvalue()
