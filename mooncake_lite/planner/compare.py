"""Compares ways to serve one workload on the same machines: the highest rate at which each keeps both limits.

Used by `compare_report.py`. Each way is tuned before it is measured. Explained in docs/explain/comparison.md.

    replays of pools -> split -> by layers -> pooled      each begins where the one before was best,
    colocated -> tuned chunks -> with a pool              and is played again with other seeds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise, product
from math import inf
from random import Random
from statistics import fmean

import msgspec

from mooncake_lite.planner.limits import Limit
from mooncake_lite.planner.search import Search
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.rescale import at_times, sped
from mooncake_lite.workloads.traces import Trace

STEP = 1.05
"""Between two rates that are tried. A rate is named by its level: the workload's own, times STEP**level."""

LEAST, MOST = -90, 90
"""Levels that are tried: from about an 80th of the workload's rate to 80 times as fast."""

BUDGETS = (512, 1024, 256, 2048, 128, 4096, 64, 8192, 0)
"""Tokens of prompts that a pass computes beside the running batch, likely ones first; 0: all of them."""

WINDOW = 32
"""Requests within which gaps between arrivals change places: longer bursts stay where they are."""

PATIENCE = 2
"""Ratios of nodes in a row that are no better, after which those beyond are not tried. Likewise sizes of
chunks with a pool, from the best one without. Without a pool all are tried: goodput may fall and rise."""

BALANCED = "least-loaded"
"""A policy that colocated nodes try, too. One that follows prefixes has few nodes decode most answers."""


Keeps = Callable[[int], bool]
"""Tells whether a cluster keeps both limits at a level."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to serve.

    mixed      what a pass of both kinds is taken to cost; "" where that is measured or makes no difference
    clusters   its configurations by name, those that differ least beside each other
    patience   see PATIENCE
    """

    system: str
    mixed: str
    clusters: dict[str, Cluster]
    patience: int


@dataclass(frozen=True, slots=True)
class Result:
    """How a contender did. kept_rps, failed_rps: of each seed, the highest rate kept, and the next one."""

    system: str
    reuse: bool
    mixed: str
    configuration: str
    kept_rps: list[float]
    failed_rps: list[float]

    @property
    def goodput_rps(self) -> float:
        """Return the mean over the seeds."""
        return fmean(self.kept_rps)

    @property
    def spread_rps(self) -> tuple[float, float]:
        """Return the least rate kept and the highest one that no seed kept: of seeds, and of the search."""
        return min(self.kept_rps), max(self.failed_rps)

    def is_above(self, other: Result) -> bool:
        """Tell whether all seeds keep a rate that the other one keeps with none: the spreads are apart."""
        return self.spread_rps[0] >= other.spread_rps[1]


def ranks(results: Sequence[Result]) -> list[tuple[int, int]]:
    """Return the best and the worst rank that each may have: equal only where it is told from all others."""
    return [
        (
            1 + sum(one.is_above(me) for one in results),
            len(results) - sum(me.is_above(one) for one in results),
        )
        for me in results
    ]


SYSTEMS = PLAIN, TUNED, SHARED, POOLED, SPLIT, LAYERS = (
    *("colocated", "colocated, tuned chunks", "colocated with a pool"),
    *("pooled", "split", "split by layers"),
)


def contenders(cluster: Cluster, nodes: int) -> list[list[Contender]]:
    """Return all ways to serve on so many nodes, those beside each other that may be best with the same.

    cluster   pooled: its machines, memory, links, and how ranks share prefixes in their pages
    """
    alike = replace(cluster, nodes={"prefill": 1, "decode": 1}, mode="split")
    alone = replace(alike, mode="colocated", nodes={"compute": nodes}, node_bytes=0)
    default = cluster.profile.prefill.chunk_tokens if cluster.profile.prefill is not None else 0
    policies = dict.fromkeys([cluster.policy, BALANCED])
    chains = list[list[Contender]]()
    for mixed, profile in mixed_bases(cluster.profile).items():
        ways = {
            (f"chunks of {tokens:,}, " if tokens else "whole prompts, ") + policy: replace(
                alone, profile=profile, batched_tokens=tokens, policy=policy
            )
            for tokens in dict.fromkeys([default, *BUDGETS])
            for policy in policies
        }
        plain = {name: ways[name] for name in list(ways)[: len(policies)]}
        by_size = sorted(ways.items(), key=lambda one: (one[1].policy, one[1].batched_tokens or inf))
        lent = {name: replace(one, node_bytes=cluster.node_bytes) for name, one in by_size}
        each = {PLAIN: (plain, len(plain)), TUNED: (ways, len(ways)), SHARED: (lent, PATIENCE)}
        chains.append([Contender(name, mixed, *one) for name, one in each.items()])
    ratios = {f"{p}P{nodes - p}D": {"prefill": p, "decode": nodes - p} for p in range(1, nodes)}
    layers = {SPLIT: replace(alike, layerwise="off"), LAYERS: replace(alike, layerwise="on")}
    chains.append(
        [
            Contender(name, "", {at: replace(base, nodes=one) for at, one in ratios.items()}, PATIENCE)
            for name, base in {POOLED: cluster, **layers}.items()
        ]
    )
    return chains


def mixed_bases(profile: Profile) -> dict[str, Profile]:
    """Return what a pass of both kinds may cost: as measured, or else with either base, by its name."""
    compute = profile.compute
    if compute.fit.mixed_base_s is not None:
        return {"": profile}
    prompts, decode = compute.fit.prefill.base_s, compute.fit.decode.base_s
    names = [f"{1e3 * compute.time_scale * one:.3g} ms" for one in (prompts, decode)]
    fit = msgspec.structs.replace(compute.fit, mixed_base_s=decode)
    other = profile.with_section("compute", msgspec.structs.replace(compute, fit=fit))
    return {names[0]: profile, names[1]: other} if prompts > decode else {"": profile}


def without_reuse(trace: Trace) -> Trace:
    """Return the same requests with no block in common, so that no way to serve finds anything to reuse."""
    ends = list(accumulate(len(one.hash_ids) for one in trace.requests))
    requests = [
        msgspec.structs.replace(one, hash_ids=list(range(end - len(one.hash_ids), end)))
        for one, end in zip(trace.requests, ends)
    ]
    return Trace(requests, trace.block_tokens)


def redrawn(trace: Trace, seed: int) -> Trace:
    """Return the trace with other arrivals: gaps change places within WINDOW. Seed 0: as it is."""
    times = [one.timestamp for one in trace.requests]
    gaps, dice = [late - early for early, late in pairwise(times)], Random(f"gaps {seed}")
    for begin in range(0, len(gaps) if seed else 0, WINDOW):
        window = gaps[begin : begin + WINDOW]
        dice.shuffle(window)
        gaps[begin : begin + WINDOW] = window
    return replace(trace, requests=at_times(trace.requests, list(accumulate(gaps, initial=times[0]))))


def highest(keeps: Keeps, begin: int) -> int:
    """Return the highest level that is kept; LEAST - 1: not even LEAST. begin: the level that is tried first.

    A level above one that is not kept is taken not to be kept.
    """
    stride = 1
    if keeps(begin):
        low, high = begin, begin + 1
        while high < MOST and keeps(high):
            low, high, stride = high, min(high + stride, MOST), 2 * stride
    else:
        low, high = begin - 1, begin
        while not keeps(max(low, LEAST)):
            if low <= LEAST:
                return LEAST - 1
            low, high, stride = low - stride, low, 2 * stride
        low = max(low, LEAST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Question:
    """What all contenders have in common."""

    trace: Trace
    ttft: Limit
    tbt: Limit

    def keeps(self, reuse: bool, seed: int = 0, *, replays: bool = False) -> Callable[[Cluster], Keeps]:
        """Return what tells of a cluster whether it keeps both limits at a level; what is known is kept.

        replays   of the queues, for clusters of mode pooled: nearly the same, for a tenth of the time
        """
        drawn = redrawn(self.trace, seed)
        played, known = drawn if reuse else without_reuse(drawn), dict[int, Keeps]()

        def keeps(cluster: Cluster, level: int) -> bool:
            faster = sped(played, STEP**level)
            if replays:
                nodes = cluster.nodes["prefill"], cluster.nodes["decode"]
                found = Search(cluster, faster, self.ttft, self.tbt).at(nodes)
            else:
                found, _ = simulate(cluster, faster, self.ttft, self.tbt, seed, judges=True)
            return found.keeps(self.ttft, self.tbt)

        return lambda cluster: known.setdefault(id(cluster), cache(partial(keeps, cluster)))


Best = tuple[str, int]
"""(configuration, the highest level that it keeps with seed 0)"""


def tuned(one: Contender, keeps: Callable[[Cluster], Keeps], begin: Best) -> Best:
    """Return the best configuration of a contender, beginning with one of its configurations and a level.

    One that does not keep the level above the best one so far costs a single run.
    """
    names = list(one.clusters)
    place = names.index(begin[0]) if begin[0] in names else len(names) // 2
    best, level = names[place], highest(keeps(one.clusters[names[place]]), begin[1])
    for side in (names[place + 1 :], names[:place][::-1]):
        worse = 0
        for name in side:
            kept = keeps(one.clusters[name])
            if kept(level + 1):
                best, level, worse = name, highest(kept, level + 1), 0
            else:
                worse += level >= LEAST
            if worse == one.patience:
                break
    return best, level


def all_tuned(chain: Sequence[Contender], question: Question) -> list[Best]:
    """Return the best configuration of each with reuse, and then of each without.

    One begins with that of the one before; without reuse, with its own.
    """
    best: Best = "", 0
    if chain and chain[0].system == POOLED:
        best = tuned(chain[0], question.keeps(True, replays=True), best)
    found, keeps, alone = list[Best](), question.keeps(True), question.keeps(False)
    for one in chain:
        found.append(best := tuned(one, keeps, best))
    return found + [tuned(one, alone, best) for one, best in zip(chain, found)]


def confirmed(cluster: Cluster, reuse: bool, question: Question, seed: int, begin: int) -> int:
    """Return the highest level that a cluster keeps with a seed."""
    return highest(question.keeps(reuse, seed)(cluster), begin)


def compare(
    chains: Sequence[Sequence[Contender]], question: Question, rate: float, seeds: int, executor: Executor,
    told: Callable[[], None],
) -> list[Result]:  # fmt: skip
    """Tune and measure all contenders. rate: of the workload; told: called `seeds` times for each of them."""
    first = [(chain, executor.submit(all_tuned, chain, question)) for chain in chains]
    found = dict[tuple[str, bool, str], tuple[str, int, list[Future[int]]]]()
    rest = dict[tuple[int, bool], list[Future[int]]]()
    for chain, future in first:
        for (reuse, one), (name, level) in zip(product((True, False), chain), future.result()):
            cluster = one.clusters[name]
            place = id(cluster), reuse
            if place not in rest:  # else what is tuned is best as it is by default
                rest[place] = [
                    executor.submit(confirmed, cluster, reuse, question, seed, level)
                    for seed in range(1, seeds)
                ]
            found[one.system, reuse, one.mixed] = name, level, rest[place]
            told()
            for each in rest[place]:
                each.add_done_callback(lambda _: told())
    results = {}
    for key, (name, level, others) in found.items():
        levels = [level, *(each.result() for each in others)]
        kept = [rate * STEP**each if each >= LEAST else 0.0 for each in levels]
        failed = [rate * STEP ** (each + 1) for each in levels]
        results[key] = Result(*key, name, kept, failed)
    for (system, reuse, mixed), result in results.items():
        plain = results.get((PLAIN, reuse, mixed), result)
        if system == TUNED and plain.goodput_rps > result.goodput_rps:
            results[system, reuse, mixed] = replace(plain, system=system)
    return list(results.values())
