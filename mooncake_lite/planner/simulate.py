"""Simulates a candidate: a whole cluster, until all requests have ended or a limit cannot be kept any more.

Called in processes of their own. The simulator has what a replay leaves out; see replay.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake_lite.planner.limits import Found, Limit
from mooncake_lite.planner.search import spread
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import GivenUp, play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.metrics import COMPLETED, Record
from mooncake_lite.workloads.traces import Trace


def simulate(cluster: Cluster, trace: Trace, ttft: Limit, tbt: Limit, seed: int = 0) -> tuple[Found, float]:
    """Return how a cluster does, and the share of its decode steps that the profile does not cover."""
    nodes = cluster.nodes.get("prefill", 0), cluster.nodes.get("decode", 0)
    count = len(trace.requests)
    seen = late = slow = 0

    def hopeless(records: Sequence[Record]) -> bool:
        nonlocal seen, late, slow
        for one in records[seen:]:
            late += one.outcome != COMPLETED or one.ttft_s > ttft.seconds
            slow += one.outcome != COMPLETED or one.tbt_s > tbt.seconds
        seen = len(records)
        return 1 - late / count < ttft.share or 1 - slow / count < tbt.share

    try:
        outcome = play(cluster, TraceSource(trace), seed, hopeless=hopeless)
    except GivenUp as stopped:
        return _found(nodes, stopped.records, count, ttft, tbt, "stopped"), 0.0
    return _found(nodes, outcome.records, count, ttft, tbt, "simulated"), outcome.outside["decode"]


def _found(
    nodes: tuple[int, int], records: Sequence[Record], count: int, ttft: Limit, tbt: Limit, how: str
) -> Found:
    done = [one for one in records if one.outcome == COMPLETED]
    ttft_s, tbt_s = np.array([one.ttft_s for one in done]), np.array([one.tbt_s for one in done])
    lost = len(records) - len(done)
    late, slow = int(np.sum(ttft_s > ttft.seconds)) + lost, int(np.sum(tbt_s > tbt.seconds)) + lost
    shares = 1 - late / count, 1 - slow / count
    return Found(nodes, *shares, spread(ttft_s), spread(tbt_s), how=how)
