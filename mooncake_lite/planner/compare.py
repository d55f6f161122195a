"""Compares ways to serve one workload on the same machines: the highest rate at which each keeps both limits.

Used by `compare_report.py`. Each way is tuned before it is measured. Explained in docs/explain/comparison.md.

    configurations, outward from a likely one -> the best one -> the same with other seeds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from random import Random
from statistics import fmean

import msgspec

from mooncake_lite.planner.limits import Limit
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.rescale import at_times, sped
from mooncake_lite.workloads.traces import Trace

STEP = 1.05
"""Between two rates that are tried. A rate is named by its level: the workload's own, times STEP**level."""

LEAST, MOST = -90, 90
"""Levels that are tried: from about an 80th of the workload's rate to 80 times as fast."""

MOST_STRIDE = 4
"""Levels by which a rate rises at once: an overloaded cluster takes long to play."""

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 0)
"""Tokens of a prompt that a pass computes beside the running batch; 0: all of them."""

WINDOW = 32
"""Requests within which gaps between arrivals change places: longer bursts stay where they are."""

PATIENCE = 2
"""Ratios of nodes in a row that are no better, after which those beyond them are not tried. Of chunks and
policies all are tried: goodput may fall and rise again with the budget."""

BALANCED = "least-loaded"
"""A policy that colocated nodes try, too. One that follows prefixes has few nodes decode most answers."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to serve, with or without reuse.

    mixed      what a pass of both kinds is taken to cost; "" where that is measured or makes no difference
    clusters   its configurations by name, those that differ least beside each other
    begin      the one that is tried first; patience: see PATIENCE
    """

    system: str
    reuse: bool
    mixed: str
    clusters: dict[str, Cluster]
    begin: str
    patience: int = PATIENCE

    @property
    def key(self) -> tuple[str, bool, str]:
        """Return what tells it from others."""
        return self.system, self.reuse, self.mixed


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


TUNED = "colocated, tuned chunks"

PLAIN = {TUNED: "colocated"}
"""What is tuned -> the same as it is by default: one of the configurations."""


def contenders(cluster: Cluster, nodes: int, begin: int) -> list[Contender]:
    """Return all ways to serve on so many nodes.

    cluster   pooled: its machines, memory and links; begin: nodes that prefill where splitting is tried first
    """
    alike = replace(cluster, sharing="hash", nodes={"prefill": 1, "decode": 1}, mode="split")
    alone = replace(alike, mode="colocated", nodes={"compute": nodes}, node_bytes=0)
    default = cluster.profile.prefill.chunk_tokens if cluster.profile.prefill is not None else 0
    budgets = sorted({*BUDGETS, default}, key=lambda tokens: tokens or inf)
    found = []
    for mixed, profile in mixed_bases(cluster.profile).items():
        for name, chosen in (("colocated", [default]), (TUNED, budgets)):
            ways = {
                f"{_chunks(one)}, {policy}": replace(
                    alone, profile=profile, batched_tokens=one, policy=policy
                )
                for policy in dict.fromkeys([BALANCED, cluster.policy])
                for one in chosen
            }
            first = list(ways)[len(chosen) // 2]
            found += [Contender(name, reuse, mixed, ways, first, len(ways)) for reuse in (True, False)]
    for name, base in (
        ("split", replace(alike, layerwise="off")),
        ("split by layers", replace(alike, layerwise="on")),
        ("pooled", cluster),
    ):
        ways = {
            f"{p}P{nodes - p}D": replace(base, nodes={"prefill": p, "decode": nodes - p})
            for p in range(1, nodes)
        }
        found += [Contender(name, reuse, "", ways, f"{begin}P{nodes - begin}D") for reuse in (True, False)]
    return found


def _chunks(tokens: int) -> str:
    return f"chunks of {tokens:,}" if tokens else "whole prompts"


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


def highest(keeps: Callable[[int], bool], begin: int) -> int | None:
    """Return the highest level that is kept; None: not even LEAST. `begin`: the level that is tried first.

    A level above one that is not kept is taken not to be kept.
    """
    stride = 1
    if keeps(begin):
        low, high = begin, begin + 1
        while high < MOST and keeps(high):
            stride = min(2 * stride, MOST_STRIDE)
            low, high = high, high + stride
    else:
        low, high = begin - 1, begin
        while not keeps(max(low, LEAST)):
            if low <= LEAST:
                return None
            stride *= 2
            low, high = low - stride, low
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

    def keeps(self, cluster: Cluster, reuse: bool, seed: int = 0) -> Callable[[int], bool]:
        """Return what tells whether a cluster keeps both limits at a level."""
        drawn = redrawn(self.trace, seed)
        played = drawn if reuse else without_reuse(drawn)

        @cache
        def kept(level: int) -> bool:
            found, _ = simulate(cluster, sped(played, STEP**level), self.ttft, self.tbt, seed)
            return found.keeps(self.ttft, self.tbt)

        return kept


def better(keeps: Callable[[int], bool], level: int | None) -> int | None:
    """Return the highest level that is kept if it is above `level`; None: it is not. One run tells this."""
    if level is None:
        return highest(keeps, 0)
    return highest(keeps, level + 1) if keeps(level + 1) else None


def tuned(one: Contender, question: Question) -> tuple[str, int | None]:
    """Return the best configuration of a contender, and the highest level that it keeps with seed 0.

    One that does not keep the level above the best one so far costs a single run.
    """
    names = list(one.clusters)
    begin = names.index(one.begin)
    best, level = one.begin, highest(question.keeps(one.clusters[one.begin], one.reuse), 0)
    for side in (names[begin + 1 :], names[:begin][::-1]):
        worse = 0
        for name in side:
            found = better(question.keeps(one.clusters[name], one.reuse), level)
            worse = worse + 1 if found is None and level is not None else 0
            best, level = (best, level) if found is None else (name, found)
            if worse == one.patience:
                break
    return best, level


def confirmed(one: Contender, name: str, question: Question, seed: int, begin: int | None) -> int | None:
    """Return the highest level that a configuration keeps with a seed."""
    return highest(question.keeps(one.clusters[name], one.reuse, seed), begin or 0)


def compare(
    all_of_them: Sequence[Contender], question: Question, rate: float, seeds: int, executor: Executor,
    told: Callable[[], None],
) -> list[Result]:  # fmt: skip
    """Tune and measure all contenders. rate: of the workload; told: called `seeds` times for each of them."""
    first = {executor.submit(tuned, one, question): one for one in all_of_them}
    found, rest = {}, {}
    for future in as_completed(first):
        one, (name, level) = first[future], future.result()
        told()
        found[one.key] = name, level
        rest[one.key] = [
            executor.submit(confirmed, one, name, question, seed, level) for seed in range(1, seeds)
        ]
        for each in rest[one.key]:
            each.add_done_callback(lambda _: told())
    results = {}
    for one in all_of_them:
        name, level = found[one.key]
        levels = [level, *(each.result() for each in rest[one.key])]
        kept = [0.0 if each is None else rate * STEP**each for each in levels]
        failed = [rate * STEP ** (LEAST if each is None else each + 1) for each in levels]
        results[one.key] = Result(*one.key, name, kept, failed)
    for (system, reuse, mixed), result in results.items():
        plain = results.get((PLAIN.get(system, system), reuse, mixed), result)
        if plain.goodput_rps > result.goodput_rps:
            results[system, reuse, mixed] = replace(plain, system=system)
    return list(results.values())
