"""Simulates a candidate: a whole cluster, until all requests have ended or the outcome is decided.

Called in processes of their own. The simulator has what a replay leaves out; see replay.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from mooncake_lite.planner.limits import Found, Limit
from mooncake_lite.planner.search import spread
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import GivenUp, play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.metrics import COMPLETED, Record
from mooncake_lite.workloads.traces import Trace


def simulate(
    cluster: Cluster, trace: Trace, ttft: Limit, tbt: Limit, seed: int = 0, *, judges: bool = False
) -> tuple[Found, float]:
    """Return how a cluster does, and the share of its decode steps that the profile does not cover.

    judges   only whether it keeps both limits matters, so that it is stopped, too, once it does
    """
    nodes = cluster.nodes.get("prefill", 0), cluster.nodes.get("decode", 0)
    count = len(trace.requests)
    seen = late = slow = waiting = 0

    def decided(records: Sequence[Record], waits_s: Iterable[float]) -> bool:
        nonlocal seen, late, slow, waiting
        for one in records[seen:]:
            late += one.outcome != COMPLETED or one.ttft_s > ttft.seconds
            slow += one.outcome != COMPLETED or one.tbt_s > tbt.seconds
        seen, waiting = len(records), sum(wait_s > ttft.seconds for wait_s in waits_s)
        left = count - seen
        most, least = share(late + waiting, slow), share(late + left, slow + left)
        return not keeps(most) or (judges and keeps(least))

    def share(late: int, slow: int) -> tuple[float, float]:
        return 1 - late / count, 1 - slow / count

    def keeps(shares: tuple[float, float]) -> bool:
        return shares[0] >= ttft.share and shares[1] >= tbt.share

    records: Sequence[Record]
    try:
        outcome = play(cluster, TraceSource(trace), seed, decided=decided)
        how, records, outside = "simulated", outcome.records, outcome.outside["decode"]
        decided(records, ())
    except GivenUp as stopped:
        how, records, outside = "stopped", stopped.records, 0.0
    done = [one for one in records if one.outcome == COMPLETED]
    ttft_s, tbt_s = (
        spread(np.array([getattr(one, name) for one in done])) if done else (inf, inf)
        for name in ("ttft_s", "tbt_s")
    )
    return Found(nodes, *share(late + waiting, slow), ttft_s, tbt_s, how=how), outside
