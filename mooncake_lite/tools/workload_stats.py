"""What is in a trace: arrivals, lengths, how prompts reuse each other, what memory buys; and a figure of it.

Used by `workload stats`. Pure. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from mooncake_lite.simulator.figure import canvas
from mooncake_lite.workloads.lru import lru_curve
from mooncake_lite.workloads.metrics import spread_of
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import Trace

GIB = 2**30
MOST_HIT = 5
BUCKETS = 60
"""Stretches of time of the rate, and points of it in the figure."""
SIZES, CURVE = 8, 8
"""Pools in the table, each twice as large as the one before; the figure has CURVE times as many."""
DISPERSION_S = (6, 60)
"""Windows in which requests are counted. The published traces have ticks of 3 s."""
WORKING_SET_S = (60, 600)


def stats_of(trace: Trace, block_bytes: int, pools: Mapping[str, int]) -> dict[str, Any]:
    """Describe a trace, for JSON.

    block_bytes   of the KV of a block; pools: name -> blocks, of those whose reuse is described

    requests_per_s       mean, and over_time: in each of BUCKETS equal stretches of the trace
    burstiness           1 for a Poisson process. gaps: coefficient of variation of the times between
                         arrivals; counts: variance over mean of those in windows, of which there must be ten
    blocks               seen_once: share of the unique ones; most_hit: the ids with the most references
    reuse                of each pool, with LRU. tokens: share of all prompt tokens that it has; requests: of
                         which it has nothing; percentiles: of the share of a prompt that it has, 0 to 100
    curve                see _curve; None where nothing is reused
    working_set          unique blocks of all prompts in windows of so many seconds
    reuse_gap_s          between two references to a block
    """
    arrivals_s = np.array([request.timestamp / 1e3 for request in trace.requests])
    span_s = float(arrivals_s[-1] - arrivals_s[0])
    counts, edges = np.histogram(arrivals_s, BUCKETS)
    references = Counter(item for request in trace.requests for item in request.hash_ids)
    tokens = [request.input_length for request in trace.requests]
    return {
        "requests": len(trace.requests),
        "duration_s": span_s,
        "requests_per_s": {
            "mean": len(trace.requests) / span_s if span_s else None,
            "over_time": (counts / np.diff(edges)).tolist(),
        },
        "burstiness": {
            "gaps": float(np.std(np.diff(arrivals_s))) / (span_s / (len(tokens) - 1)) if span_s else None,
            **{f"counts_in_{window_s}_s": _dispersion(arrivals_s, window_s) for window_s in DISPERSION_S},
        },
        "input_length": _lengths(tokens),
        "output_length": _lengths([request.output_length for request in trace.requests]),
        "block_tokens": trace.block_tokens,
        "block_bytes": block_bytes,
        "blocks": {
            "references": references.total(),
            "unique": len(references),
            "seen_once": sum(count == 1 for count in references.values()) / len(references),
            "most_hit": [{"id": item, "references": n} for item, n in references.most_common(MOST_HIT)],
        },
        "reuse": {
            name: {"blocks": blocks, **_reuse(trace, np.array(tokens), blocks)}
            for name, blocks in {"without a limit": None, **pools}.items()
        },
        "curve": _curve(trace, block_bytes),
        "working_set": {window_s: _lengths(_working_set(trace, window_s)) for window_s in WORKING_SET_S},
        "reuse_gap_s": _lengths(_gaps_s(trace)),
    }


def _lengths(values: Sequence[float]) -> dict[str, float | None]:
    return {**spread_of(values), "max": max(values, default=None)}


def _dispersion(arrivals_s: np.ndarray, window_s: float) -> float | None:
    """Return the variance over the mean of the arrivals in whole windows; None for fewer than ten."""
    windows = int((arrivals_s[-1] - arrivals_s[0]) // window_s)
    if windows < 10:
        return None
    counts, _ = np.histogram(arrivals_s - arrivals_s[0], np.arange(windows + 1) * window_s)
    return float(counts.var() / counts.mean())


def _reuse(trace: Trace, tokens: np.ndarray, blocks: int | None) -> dict[str, Any]:
    cached = np.array(cached_tokens(trace, blocks))
    return {
        "tokens": float(cached.sum() / tokens.sum()),
        "requests": float(np.mean(cached == 0)),
        "percentiles": np.percentile(cached / tokens, range(101)).tolist(),
    }


def _curve(trace: Trace, block_bytes: int) -> dict[str, Any] | None:
    """Return what an LRU pool has by its size.

    sizes   blocks, share of all prompt tokens, and tokens_per_gib: what one more GiB adds to them all, as the
            mean of the next tenth of the size
    knee    the size beyond which a block adds less than the mean block does; nine_tenths: the size with this
            part of all hits
    """
    curve, tokens = lru_curve(trace), sum(request.input_length for request in trace.requests)
    if not len(curve.blocks):
        return None

    def at(blocks: int) -> dict[str, float]:
        more = max(blocks // 10, round(GIB / block_bytes), 1)
        gained = curve.tokens_at(blocks + more) - curve.tokens_at(blocks)
        return {
            "blocks": blocks,
            "share": curve.tokens_at(blocks) / tokens,
            "tokens_per_gib": gained * GIB / (more * block_bytes),
        }

    smaller = range((SIZES - 1) * CURVE, -1, -1)
    return {
        "sizes": [at(max(1, round(int(curve.blocks[-1]) / 2 ** (one / CURVE)))) for one in smaller],
        "knee": at(curve.knee),
        "nine_tenths": at(curve.blocks_for(0.9)),
    }


def _working_set(trace: Trace, window_s: float) -> list[int]:
    """Return the unique blocks of each window that has requests."""
    windows = groupby(trace.requests, lambda request: request.timestamp // (1e3 * window_s))
    return [len({item for request in group for item in request.hash_ids}) for _, group in windows]


def _gaps_s(trace: Trace) -> list[float]:
    """Return the seconds between any two references to a block."""
    last_s, gaps_s = dict[int, float](), list[float]()
    for request in trace.requests:
        now, ids = request.timestamp / 1e3, request.hash_ids
        gaps_s += [now - last_s[item] for item in ids if item in last_s]
        last_s.update(dict.fromkeys(ids, now))
    return gaps_s


def draw(trace: Trace, stats: dict[str, Any], suffix: str) -> bytes:
    """Draw lengths, arrivals, reuse, and hits by the size of a pool. suffix: .svg or .png."""
    file, shares = io.BytesIO(), np.linspace(0, 1, 201)
    rates, curve, gib = stats["requests_per_s"]["over_time"], stats["curve"], stats["block_bytes"] / GIB
    with canvas(file, suffix, "workload", (5, 10), 4, shared=False) as panels:
        for name in ("input_length", "output_length"):
            lengths = [getattr(request, name) for request in trace.requests]
            panels[0].plot(np.quantile(lengths, shares), shares, label=name.replace("_", " "))
        panels[0].legend()
        panels[0].set(xscale="log", xlabel="tokens", ylabel="share of requests")
        panels[1].stairs(rates, np.linspace(0, stats["duration_s"] or 1, BUCKETS + 1))
        panels[1].set(xlabel="seconds", ylabel="requests/s")
        for name, reuse in stats["reuse"].items():
            panels[2].plot(reuse["percentiles"], np.linspace(0, 1, 101), label=name)
        panels[2].legend()
        panels[2].set(xlabel="share of a prompt that the pool has", ylabel="share of requests")
        panels[3].set(xscale="log", xlabel="GiB of the pool, LRU", ylabel="share of prompt tokens")
        if curve is not None:
            panels[3].plot(
                [gib * one["blocks"] for one in curve["sizes"]], [one["share"] for one in curve["sizes"]]
            )
            panels[3].plot(gib * curve["knee"]["blocks"], curve["knee"]["share"], "o", label="knee")
            panels[3].legend()
    return file.getvalue()
