"""Closed forms: how long requests wait, how fast a batch decodes, what fits, from means and variances alone.

Pure; seconds, tokens and bytes. They take a trace to be stationary and its requests to be drawn one by one:
what a replay of queues (`replay.py`) does not need to assume. See docs/explain/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from scheduler.costs import DecodeCost

DEVIATIONS = 2.5
"""Of KV memory beyond its mean, that must fit: a normal value exceeds them in 0.6 % of the time."""

STEPS = 2
"""Of a first gap: half of one until the rank looks, half until what has come joins, and the first one."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of a queue. mean_s: over all requests; probability: that one waits at all."""

    mean_s: float
    probability: float

    def longer_than(self, seconds: np.ndarray) -> np.ndarray:
        """Return the probability to wait longer, taking waits that are not 0 to be exponential."""
        if self.mean_s == 0:
            return np.zeros(len(seconds))
        if self.mean_s == inf:
            return np.ones(len(seconds))
        tail = np.exp(-np.maximum(seconds, 0.0) * self.probability / self.mean_s)
        return np.where(seconds < 0, 1.0, self.probability * tail)


def load_of(rate: float, service_s: np.ndarray, servers: int) -> float:
    """Return the share of time that each server is busy: rate x mean service / servers (Little's law)."""
    return rate * float(service_s.mean()) / servers


def wait_of(rate: float, service_s: np.ndarray, servers: int, gap_variation: float = 1.0) -> Wait:
    """Return the wait of G/G/c: Allen and Cunneen's approximation.

        W = C(c, a) / (c / s - rate) x (variation of gaps + variation of services) / 2

    with a = rate x s and Erlang's C, the probability to wait in M/M/c. Exact for M/M/c, and for M/G/1
    (Pollaczek and Khinchine). A. O. Allen, Probability, Statistics, and Queueing Theory, 1990, section 5.4.

    service_s       of the requests; gap_variation: squared coefficient of variation of the gaps between them
    """
    mean_s = float(service_s.mean())
    if load_of(rate, service_s, servers) >= 1:
        return Wait(inf, 1.0)
    probability = erlang_c(servers, rate * mean_s)
    variation = (gap_variation + float(service_s.var()) / mean_s**2) / 2
    return Wait(probability / (servers / mean_s - rate) * variation, probability)


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request waits in M/M/c. load: rate x mean service, below `servers`.

    By the recursion of Erlang's B, which neither overflows nor loses digits (A. K. Erlang, 1917).
    """
    blocked = 1.0
    for busy in range(1, servers + 1):
        blocked = load * blocked / (busy + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def share_within(limit_s: float, wait: Wait, service_s: np.ndarray) -> float:
    """Return the share of requests whose wait and service together take at most so long."""
    return 1.0 - float(wait.longer_than(limit_s - service_s).mean())


def sequence_s(tokens: np.ndarray, answers: np.ndarray, cost: DecodeCost) -> np.ndarray:
    """Return what each request adds to all steps of its answer together."""
    return np.maximum(answers - 1, 0) * (cost.per_sequence_s + cost.per_key_s * (tokens + answers / 2))


def step_s(
    rate: float, tokens: np.ndarray, answers: np.ndarray, cost: DecodeCost, extra_s: float = 0.0
) -> float:
    """Return the fixed point of a node's step, which is linear in a batch that is linear in the step.

        batch   = rate x mean of answers x step                       (Little's law)
        context = rate x mean of answers x (tokens + answer / 2) x step
        step    = base + per sequence x batch + per key x context  =  base / (1 - load)

    rate   of the requests that come to this node; extra_s: of each step besides its pass
    """
    load = rate * float(sequence_s(tokens, answers, cost).mean())
    return (cost.base_s + extra_s) / (1 - load) if load < 1 else inf


def kv_tokens(
    rate: float, tokens: np.ndarray, answers: np.ndarray, step_s: float, base_s: float
) -> tuple[float, float]:
    """Return mean and standard deviation of the tokens whose KV a node holds while it decodes.

    If steps took equally long, sequences would come one by one and stay for their answers, whoever is there
    (M/G/inf): the sum over them has the mean rate x E[integral of tokens] and the variance rate x E[integral
    of their square]. But a full batch makes steps longer, and so itself fuller. The variance is larger by
    step / base, which is 1 / (1 - load), as of a server that all share (M/G/1-PS).

    base_s   of a step without sequences
    """
    length = np.maximum(answers - 1, 0).astype(float)
    first = length * (tokens + length / 2)
    second = length * (tokens**2 + tokens * length + length**2 / 3)
    variance = rate * step_s * float(second.mean()) * step_s / base_s
    return rate * step_s * float(first.mean()), sqrt(variance)


def first_gap_s(rate: float, step_s: float, stored_s: np.ndarray, load_s: np.ndarray) -> np.ndarray:
    """Return the seconds from the first token, which prefill gives, to the second one.

    A node loads one sequence at a time and looks between two steps, so that loads are a queue of their own,
    M/G/1.

    rate   of the requests of this node; stored_s: from the first token until all KV can be read
    """
    wait = wait_of(rate, load_s + step_s, 1)
    return stored_s + wait.mean_s + load_s + STEPS * step_s


def tpot_s(answers: np.ndarray, step_s: float, gap_s: np.ndarray) -> np.ndarray:
    """Return each request's mean gap, 0 for one token. gap_s: its first one; all others are steps."""
    gaps = np.maximum(answers - 1, 1)
    return np.where(answers > 1, (gap_s + (gaps - 1) * step_s) / gaps, 0.0)


def tbt_s(answers: np.ndarray, step_s: float | np.ndarray, gap_s: np.ndarray) -> np.ndarray:
    """Return the mean of each request's slowest tenth of gaps: its first gap, and steps like all others.

    So an answer of up to eleven tokens is as slow as its first gap, and no number of decode nodes makes that
    shorter than one load and one step.
    """
    slow = np.ceil(np.maximum(answers - 1, 1) / 10)
    return np.where(answers > 1, (gap_s + (slow - 1) * step_s) / slow, 0.0)
