"""What no scheduler can beat: lower bounds on the TTFT of a trace on so many prefill nodes.

Pure. Used by `workload bounds`. The arguments, with their proofs: docs/explain/bounds.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

import numpy as np

from mooncake_lite.planner.jobs import Jobs, compute_s
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.workloads.metrics import PERCENTILES, spread_of

PRECISION = 1e-4
"""Of percentiles: the bound is at most so much below what the argument gives."""

Spread = dict[str, float | None]
"""{mean, p50, p90, p99} of seconds, see `workloads.metrics.spread_of`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on the TTFT of one trace on one number of nodes.

    load     compute of all prompts, over the time of all nodes from the first to the last arrival; inf where
             all come at once
    own      each prompt alone on a node: lower bounds
    least    lower bounds that also count how prompts wait for each other; those of `own` where that is more
    central  no bound: one queue for all nodes, first come, first served, with all possible reuse
    shortest the same, but the shortest of those that wait goes first. The best schedule lies between `least`
             and these two, for each figure
    """

    load: float
    own: Spread
    least: Spread
    central: Spread
    shortest: Spread


def bounds_of(jobs: Jobs, nodes: int, pass_s: Callable[[PassLoad], float], overhead_s: float = 0.0) -> Bounds:
    """Return the bounds on the TTFT of these requests.

    jobs        their cached tokens are those of a pool without a limit
    nodes       that prefill, at least 1
    pass_s      of a node, see `profiles.costs.pass_seconds`, with all that keeps a node from its next pass
    overhead_s  of each request, in which no node computes for it, whatever the scheduler does
    """
    arrived_s, service_s = jobs.arrived_s.tolist(), compute_s(jobs, pass_s).tolist()
    span_s, waits_s = arrived_s[-1] - arrived_s[0], {}
    waits_s["mean"] = shortest_remaining_s(arrived_s, [one / nodes for one in service_s])
    for percent in PERCENTILES:
        waits_s[f"p{percent}"] = interval_load_s(arrived_s, service_s, nodes, percent)
    own = spread_of(one + overhead_s for one in service_s)
    central, shortest = (
        spread_of(one + overhead_s for one in central_queue_s(arrived_s, service_s, nodes, order))
        for order in (arrived_s, service_s)
    )
    least: Spread = {name: max(own[name] or 0.0, one + overhead_s) for name, one in waits_s.items()}
    return Bounds(sum(service_s) / (nodes * span_s) if span_s else inf, own, least, central, shortest)


def shortest_remaining_s(arrived_s: Sequence[float], work_s: Sequence[float]) -> float:
    """Return the mean time from arrival to end on one machine that always does what has the least left.

    No schedule of one machine has a lower mean, with preemption or without (Schrage 1968, "A proof of the
    optimality of the shortest remaining processing time discipline", Operations Research 16). One machine
    that is m times as fast can do all that m machines do. So this bounds their mean too.

    arrived_s   ascending; work_s: what each takes on this machine
    """
    now_s = total_s = 0.0
    waiting: list[tuple[float, float]] = []  # what is left, and the arrival
    for at_s, each_s in chain(zip(arrived_s, work_s), [(inf, 0.0)]):
        while waiting and now_s < at_s:
            left_s, came_s = heapq.heappop(waiting)
            if now_s + left_s > at_s:
                heapq.heappush(waiting, (left_s - (at_s - now_s), came_s))
                break
            now_s += left_s
            total_s += now_s - came_s
        now_s = max(now_s, at_s)
        heapq.heappush(waiting, (each_s, at_s))
    return total_s / len(work_s)


def interval_load_s(
    arrived_s: Sequence[float], service_s: Sequence[float], nodes: int, percent: int
) -> float:
    """Return a lower bound on a percentile of the time from arrival to end.

    Were the percentile X, a known number of requests at most would end later than X after their arrival. All
    others that arrive in an interval [a, b] have ended by b + X, so their work is at most m (b - a + X).
    Where loads of intervals make more requests late, the percentile is above X. `fewest_late` counts them.
    """
    may_be_late = len(service_s) - 1 - (len(service_s) - 1) * percent // 100
    low_s = sorted(service_s)[len(service_s) - 1 - may_be_late]
    if fewest_late(arrived_s, service_s, nodes, low_s) <= may_be_late:
        return low_s  # loads say nothing here
    high_s = 2 * low_s
    while fewest_late(arrived_s, service_s, nodes, high_s) > may_be_late:
        low_s, high_s = high_s, 2 * high_s
    while high_s - low_s > PRECISION * low_s:
        middle_s = (low_s + high_s) / 2
        if fewest_late(arrived_s, service_s, nodes, middle_s) > may_be_late:
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def fewest_late(arrived_s: Sequence[float], service_s: Sequence[float], nodes: int, within_s: float) -> int:
    """Return how many requests at least end later than so long after their arrival.

    The machines work together as one that is `nodes` times as fast; but a request takes as long as on one of
    them. All requests have the same limit, so the order of arrival is that of deadlines. When one would be
    late, the request leaves without which the rest ends earliest. That leaves the fewest (Kise, Ibaraki and
    Mine 1978, "A solvable case of the one-machine scheduling problem with ready and due times", Operations
    Research 26). Where all arrive at once it is Moore's rule: the largest leaves.

    arrived_s   ascending; service_s: on one machine
    """
    late, end_s = 0, -inf
    came, work = list[float](), list[float]()  # of those in time since the machine last idled
    for at_s, each_s in zip(arrived_s, service_s):
        if each_s > within_s:
            late += 1
            continue
        if at_s > end_s:
            came, work, end_s = [], [], at_s
        came.append(at_s)
        work.append(each_s / nodes)
        end_s += work[-1]
        if end_s > at_s + within_s:
            late += 1
            begins, lasts = np.array(came), np.array(work)
            done = np.cumsum(lasts)
            waits = np.maximum.accumulate(begins - (done - lasts)) + done - lasts - begins
            after = np.minimum.accumulate(waits[:0:-1])[::-1]  # those behind come no earlier than they arrive
            saved = np.minimum(lasts, np.append(after, inf))
            worst = int(np.argmax(saved))
            end_s -= float(saved[worst])
            del came[worst], work[worst]
    return late


def central_queue_s(
    arrived_s: Sequence[float], service_s: Sequence[float], nodes: int, order: Sequence[float]
) -> list[float]:
    """Return the time from arrival to end of each request, with one queue for all nodes.

    order   of each request: of those that wait, the one with the smallest goes first
    """
    free_s, took_s, waiting = [0.0] * nodes, [0.0] * len(service_s), list[tuple[float, int]]()
    came, begin_s = 0, 0.0
    for _ in service_s:
        begin_s = max(begin_s, free_s[0], arrived_s[came] if not waiting else 0.0)
        while came < len(service_s) and arrived_s[came] <= begin_s:
            heapq.heappush(waiting, (order[came], came))
            came += 1
        _, number = heapq.heappop(waiting)
        heapq.heapreplace(free_s, begin_s + service_s[number])
        took_s[number] = begin_s + service_s[number] - arrived_s[number]
    return took_s
