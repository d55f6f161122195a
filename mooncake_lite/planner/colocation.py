"""When two kinds of nodes beat nodes that do both: the highest rate of each, by closed forms.

Pure. DistServe (OSDI 2024, section 3) argues for two kinds of nodes, Sarathi-Serve (OSDI 2024, section 4) for
chunks of prompts beside a running batch. Derived in docs/explain/planning.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mooncake_lite.planner import forms
from mooncake_lite.planner.compare import mixed_bases
from mooncake_lite.planner.first import First, highest
from mooncake_lite.planner.jobs import Jobs

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 1 << 30)
"""Tokens of a pass, which a prompt and the running batch share; the last: a prompt is computed whole."""

FACTORS = [2 ** (sign * power / 2) for power in range(1, 15) for sign in (1, -1)]
"""By which lengths and bandwidths are multiplied, the nearest to 1 first."""

MOST_JOBS = 1_000
"""Of a workload: so many, evenly drawn, are enough to compare."""

ROUNDS = 3
"""Of the fixed point of a batch, which leaves fewer tokens of a pass to prompts."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The highest rates within both limits, in requests/s.

    both    base of a mixed pass, "" where it is known -> that of nodes that do both, and the chunk; 0: whole
    turns   what changes, all else equal -> the nearest value with which the other way is better; None: none
            is. Lengths and links change by up to 128 times. By the first one of the bases
    """

    split_rps: float
    both: dict[str, tuple[float, int]]
    turns: dict[str, float | None]


def ways_of(first: First, nodes: int) -> Ways:
    """Compare both ways on so many nodes, and look for what turns the comparison."""
    step = -(-len(first.jobs) // MOST_JOBS)
    jobs, rate, both = first.jobs, first.jobs.rate, dict[str, tuple[float, int]]()
    tokens, cached, answer = (each[::step] for each in (jobs.tokens, jobs.cached, jobs.answer))
    some = first.like(Jobs(np.arange(len(tokens)) / rate, tokens, cached, answer))
    for base, profile in mixed_bases(first.cluster.profile).items():
        other = some.like(some.jobs, replace(first.cluster, profile=profile))
        speed, chunk = max((highest(partial(both_keep, other, nodes, one)), one) for one in CHUNKS)
        both[base] = rate * speed, chunk % CHUNKS[-1]
    now = _splits(some, nodes)
    turns = {
        name: next((value for value, other in tries if _splits(other, nodes) != now), None)
        for name, tries in _changes(some)
    }
    return Ways(rate * split_speed(some, nodes), both, turns)


def _changes(first: First) -> Iterator[tuple[str, Iterator[tuple[float, First]]]]:
    """Yield what may change, with its values, the nearest first, and the closed forms with each of them."""
    jobs, cluster, reused = first.jobs, first.cluster, first.jobs.reused

    def longer(factor: float) -> First:
        return first.like(replace(jobs, answer=np.maximum(1, factor * jobs.answer).astype(int)))

    def reusing(share: float) -> First:
        more = jobs.tokens - (jobs.tokens - jobs.cached) * (1 - share) / (1 - reused)
        cached = jobs.cached * share / reused if share < reused else more
        return first.like(replace(jobs, cached=np.minimum(cached, jobs.tokens - 1).astype(int)))

    def linked(gbps: float) -> First:
        return first.like(jobs, replace(cluster, link_bytes_per_s=gbps * 1e9 / 8))

    mean, gbps = float(jobs.answer.mean()), 8 * cluster.costs.transfer.far_bytes_per_s / 1e9
    yield "output_tokens", ((one * mean, longer(one)) for one in FACTORS)
    shares = sorted((percent / 100 for percent in range(0, 100, 5)), key=lambda one: abs(one - reused))
    yield "reused", ((one, reusing(one)) for one in shares)
    if not cluster.together:
        yield "link_gbps", ((one * gbps, linked(one * gbps)) for one in FACTORS)


def _splits(first: First, nodes: int) -> bool:
    """Tell whether two kinds of nodes keep the limits at a rate at which nodes that do both do not."""
    speed = split_speed(first, nodes)
    return not any(both_keep(first, nodes, chunk, speed) for chunk in CHUNKS)


def split_speed(first: First, nodes: int) -> float:
    """Return the speed of the arrivals up to which the best ratio of so many nodes keeps both limits."""

    def keeps(speed: float) -> bool:
        prefills = 1 + bisect_left(range(1, nodes), True, key=lambda one: first.prefills_keep(one, speed))
        return prefills < nodes and first.decodes_keep(nodes - prefills, speed)

    return highest(keeps)


def both_keep(first: First, nodes: int, chunk: int, speed: float) -> bool:
    """Tell whether so many nodes that do both keep both limits, and have memory for their KV.

    Of the time of a node, sequences take a share s for themselves, however long passes are. A prompt of n
    chunks takes n times the base of a mixed pass, and w for itself; all prompts together take a share p. The
    rest goes to passes without a prompt, in which it pays their base:

        passes per second = rate x E[n] + (1 - s - p) / base      so that each has s / (passes per second)
    """
    jobs, cost, profile = first.jobs, first.costs.decode, first.cluster.profile.compute
    fit, rate = profile.fit, speed * jobs.rate / nodes
    base, token_s = fit.prefill.linear(chunk)
    mixed = max(base, fit.decode.base_s) if fit.mixed_base_s is None else fit.mixed_base_s
    mixed_s, base_s = profile.time_scale * mixed + first.over.step_s, cost.base_s + first.over.step_s
    new = jobs.tokens - jobs.cached
    pairs = new * jobs.cached + new * (new + 1) / 2
    own_s = profile.time_scale * (token_s * new + fit.prefill.per_key_s * pairs)
    busy, batch = rate * float(forms.sequence_s(jobs.tokens, jobs.answer, cost).mean()), 0.0
    for _ in range(ROUNDS):
        most = max(1.0, chunk - batch)
        chunks = np.ceil(new / most)
        left = 1 - busy - rate * float((chunks * mixed_s + own_s).mean())
        if left <= 0:
            return False
        passes = rate * float(chunks.mean()) + left / base_s
        batch = rate * float(jobs.answer.mean() - 1) / passes
    service_s = chunks * (mixed_s + busy / passes) + own_s
    wait = forms.wait_of(speed * jobs.rate, service_s, nodes, first.variation)
    last = np.minimum(new, most)  # tokens of the chunk that attends to most
    last_s = profile.time_scale * last * (token_s + fit.prefill.per_key_s * (jobs.tokens - last / 2))
    begun_s, plain_s = mixed_s + busy / passes, base_s + busy / passes
    within = _gaps_within(first, chunks, begun_s + last_s, plain_s, rate / passes)
    soon = forms.share_within(first.ttft.seconds - 0.5 / passes, wait, service_s)  # half a pass ends before
    fits = first.has_space(rate, 1 / passes, (1 - busy) / passes)
    return fits and soon >= first.ttft.share and within >= first.tbt.share


def _gaps_within(
    first: First, chunks: np.ndarray, chunk_s: np.ndarray, plain_s: float, prompts: float
) -> float:
    """Return the share of requests whose slowest tenth of gaps keeps the limit in the mean.

    A gap is late if a chunk in it is. So many late ones are allowed that the others make up for: prompts of
    late chunks come at random (Poisson, whose distribution function is that of Wilson and Hilferty).

    chunks, chunk_s   of each prompt, and the seconds of a gap with one of them; plain_s: without one
    prompts           that begin in a gap, in the mean
    """
    limit_s, slow = first.tbt.seconds, np.ceil(np.maximum(first.jobs.answer - 1, 1) / 10)
    late = chunk_s > limit_s
    fine = float(chunks[~late].sum())
    others_s = float((chunks * chunk_s)[~late].sum()) / max(1.0, fine)
    mixed = min(1.0, 10 * prompts * fine / len(chunks))  # of the slowest tenth, had no prompt late chunks
    others_s = plain_s + mixed * (others_s - plain_s)
    if others_s > limit_s:
        return 0.0
    if not late.any():
        return 1.0
    each, late_s = float(chunks[late].mean()), float(np.average(chunk_s[late], weights=chunks[late]))
    most = 1 + np.floor(slow * (limit_s - others_s) / (late_s - others_s) / each)
    come = prompts * float(late.mean()) * (first.jobs.answer - 1 + each)
    normal = 3 * np.sqrt(most) * (1 - 1 / (9 * most) - np.cbrt(come / most))
    within = 1 / (1 + np.exp(-np.clip(1.5976 * normal + 0.07056 * normal**3, -50, 50)))
    return float(np.where(first.jobs.answer > 1, within, 1.0).mean())
