"""The closed forms of one workload on one kind of machine: where the search begins, and how much is to spare.

Explained in docs/explain/planning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner import forms
from mooncake_lite.planner.jobs import Jobs, compute_s
from mooncake_lite.planner.limits import Limit, Nodes
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.simulator.cluster import Cluster

MOST_NODES = 64
"""Of a kind, to begin with: a search goes on from there."""

MOST_SPEED = 64.0

ROOM = 0.01
"""How much less than a share is still tried: what runs alone is known to a hundredth of the requests."""


class First:
    """Closed forms.

    service_s    of each prompt: its pass, the slot, and before a loaded prefix the store of the prompt before
    variation    squared coefficient of variation of the gaps between requests
    """

    def __init__(self, cluster: Cluster, jobs: Jobs, ttft: Limit, tbt: Limit) -> None:
        self._cluster, self._jobs, self._ttft, self._tbt = cluster, jobs, ttft, tbt
        self._costs, self._over = cluster.costs, cluster.overheads
        token_bytes = cluster.layout.nbytes / cluster.block_tokens
        link, near = self._costs.transfer, self._costs.load.dram_bytes_per_s
        nbytes = jobs.tokens * token_bytes
        self._load_s = nbytes / near if cluster.together else link.latency_s + nbytes / link.far_bytes_per_s
        self.compute_s = compute_s(jobs, pass_seconds(cluster.profile))
        write_s = (jobs.tokens - jobs.cached) * token_bytes / near
        self._stored_s = np.where(jobs.cached > 0, write_s, write_s / GROUPS) + 6 * self._over.message_s
        stores_s = np.where(jobs.cached > 0, write_s, 0.0)
        self.service_s = self.compute_s + self._over.step_s + 2 * self._over.message_s + stores_s
        gaps_s = np.diff(jobs.arrived_s)
        self.variation = float(gaps_s.var() / gaps_s.mean() ** 2) if gaps_s.any() else 1.0

    def check(self) -> None:
        """Raise ConfigError where too many requests would miss a limit on an empty cluster of any size.

        There a prompt takes its pass, with all that can be reused; a first gap takes a load and one step.
        """
        cost, over = self._costs.decode, self._over
        step_s = cost.base_s + cost.per_sequence_s + cost.per_key_s * self._jobs.tokens + over.step_s
        gap_s = self._stored_s + self._load_s + step_s
        alone = (
            ("first tokens", self._ttft, self.compute_s + over.step_s + over.request_s),
            ("gaps", self._tbt, forms.tbt_s(self._jobs.answer, step_s, gap_s)),
        )
        for what, limit, seconds in alone:
            share = float(np.mean(seconds <= limit.seconds))
            if share < limit.share - ROOM:
                raise ConfigError(
                    f"no number of nodes keeps the limit on {what}: {limit.share:.1%} within "
                    f"{limit.seconds * 1e3:g} ms are wanted, and alone on such machines {share:.1%} are"
                )

    def guess(self) -> Nodes:
        """Return the smallest numbers of nodes that keep the limits."""
        return _least(self.prefills_keep), _least(self.decodes_keep)

    def load(self) -> tuple[float, float]:
        """Return how many nodes are busy in the mean: with prompts, and with what sequences add to steps."""
        jobs, cost = self._jobs, self._costs.decode
        each_s = (jobs.answer - 1) * (cost.per_sequence_s + cost.per_key_s * (jobs.tokens + jobs.answer / 2))
        return jobs.rate * float(self.service_s.mean()), jobs.rate * float(each_s.mean())

    def wait(self, count: int, speed: float = 1.0) -> forms.Wait:
        """Return the wait for so many nodes that prefill. speed: of the arrivals."""
        return forms.wait_of(speed * self._jobs.rate, self.service_s, count, self.variation)

    def prefills_keep(self, count: int, speed: float = 1.0) -> bool:
        """Tell whether so many nodes that prefill keep the limit on TTFT."""
        limit_s = self._ttft.seconds
        return forms.share_within(limit_s, self.wait(count, speed), self.service_s) >= self._ttft.share

    def step(self, count: int, speed: float = 1.0) -> forms.Decoding:
        """Return what each of so many nodes that decode does in the mean."""
        jobs, rate = self._jobs, speed * self._jobs.rate / count
        return forms.decoding_of(rate, jobs.tokens, jobs.answer, self._costs.decode, self._over.step_s)

    def gaps_s(self, count: int, speed: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean gap of each request, and the mean of its slowest tenth of gaps."""
        step_s, answer = self.step(count, speed).step_s, self._jobs.answer
        if step_s == inf:
            return np.full(len(answer), inf), np.full(len(answer), inf)
        gap_s = forms.first_gap_s(speed * self._jobs.rate / count, step_s, self._stored_s, self._load_s)
        return forms.tpot_s(answer, step_s, gap_s), forms.tbt_s(answer, step_s, gap_s)

    def decodes_keep(self, count: int, speed: float = 1.0) -> bool:
        """Tell whether so many nodes that decode keep the limit on gaps, and have memory for their KV."""
        jobs, step_s = self._jobs, self.step(count, speed).step_s
        if step_s == inf:
            return False
        most = self._cluster.kv_bytes * self._cluster.block_tokens // self._cluster.layout.nbytes
        base_s = self._costs.decode.base_s + self._over.step_s
        held = forms.kv_tokens(speed * jobs.rate / count, jobs.tokens, jobs.answer, step_s, base_s)
        if not forms.fits(*held, most):
            return False
        return float(np.mean(self.gaps_s(count, speed)[1] <= self._tbt.seconds)) >= self._tbt.share

    def to_spare(self, nodes: Nodes) -> tuple[float, float]:
        """Return how much faster requests could come until the nodes of a kind no longer keep their limit."""
        prefills, decodes = nodes
        return (
            _most(lambda speed: self.prefills_keep(prefills, speed)),
            _most(lambda speed: self.decodes_keep(decodes, speed)),
        )


def _least(keeps: Callable[[int], bool]) -> int:
    """Return the least number for which something holds; MOST_NODES where it does for none of them."""
    return next((count for count in range(1, MOST_NODES) if keeps(count)), MOST_NODES)


def _most(keeps: Callable[[float], bool]) -> float:
    """Return the speed from which on something does not hold any more, found by halving."""
    low, high = 0.0, MOST_SPEED
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
