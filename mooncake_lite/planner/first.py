"""The closed forms of one workload on one kind of machine: where the search begins, and how much is to spare.

Explained in docs/explain/planning.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from math import ceil, inf

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

    Split nodes that decode take in the KV of one prompt after another: their links are a queue.
    """

    def __init__(self, cluster: Cluster, jobs: Jobs, ttft: Limit, tbt: Limit) -> None:
        self.cluster, self.jobs, self.ttft, self.tbt = cluster, jobs, ttft, tbt
        self.costs, self.over = cluster.costs, cluster.overheads
        token_bytes = cluster.layout.nbytes / cluster.block_tokens
        link, near = self.costs.transfer, self.costs.load.dram_bytes_per_s
        nbytes, new_bytes = jobs.tokens * token_bytes, (jobs.tokens - jobs.cached) * token_bytes
        far_s = nbytes / near if cluster.together else link.latency_s + nbytes / link.far_bytes_per_s
        self.compute_s = compute_s(jobs, pass_seconds(cluster.profile))
        self.service_s = self.compute_s + self.over.step_s + 2 * self.over.message_s
        self._link_s: np.ndarray | None = None
        if cluster.mode == "split":  # straight to the node that decodes, which has it in its memory then
            left_s, self._load_s = np.maximum(far_s / GROUPS, far_s - self.compute_s), nbytes / near
            self._link_s = far_s
        else:
            write_s, loads = new_bytes / near, jobs.cached > 0
            left_s, self._load_s = np.where(loads, write_s, write_s / GROUPS), far_s
            self.service_s += np.where(loads, write_s, 0.0)
        self._stored_s = left_s + 6 * self.over.message_s
        gaps_s = np.diff(jobs.arrived_s)
        self.variation = float(gaps_s.var() / gaps_s.mean() ** 2) if gaps_s.any() else 1.0

    def like(self, jobs: Jobs, cluster: Cluster | None = None) -> First:
        """Return the same for other requests that come as irregularly, or another cluster."""
        other = First(cluster or self.cluster, jobs, self.ttft, self.tbt)
        other.variation = self.variation
        return other

    def check(self) -> None:
        """Raise ConfigError where too many requests would miss a limit on an empty cluster of any size.

        There a prompt takes its pass, with all that can be reused; a first gap takes a load and one step.
        """
        cost, over = self.costs.decode, self.over
        step_s = cost.base_s + cost.per_sequence_s + cost.per_key_s * self.jobs.tokens + over.step_s
        gap_s = self._stored_s + self._load_s + step_s
        alone = (
            ("first tokens", self.ttft, self.compute_s + over.step_s + over.request_s),
            ("gaps", self.tbt, forms.tbt_s(self.jobs.answer, step_s, gap_s)),
        )
        for what, limit, seconds in alone:
            share = float(np.mean(seconds <= limit.seconds))
            if share < limit.share - ROOM:
                raise ConfigError(
                    f"no number of nodes keeps the limit on {what}: {limit.share:.1%} within "
                    f"{limit.seconds * 1e3:g} ms are wanted, and alone on such machines {share:.1%} are"
                )

    def guess(self) -> Nodes:
        """Return the smallest numbers of nodes that keep the limits; where none does, the load and one."""
        prefills, decodes = (ceil(load) + 1 for load in self.load())
        return _least(self.prefills_keep, prefills), _least(self.decodes_keep, decodes)

    def load(self) -> tuple[float, float]:
        """Return how many nodes are busy in the mean: with prompts, and with what sequences add to steps."""
        jobs = self.jobs
        each_s = forms.sequence_s(jobs.tokens, jobs.answer, self.costs.decode)
        return jobs.rate * float(self.service_s.mean()), jobs.rate * float(each_s.mean())

    def prefills_keep(self, count: int, speed: float = 1.0) -> bool:
        """Tell whether so many nodes that prefill keep the limit on TTFT. speed: of the arrivals."""
        wait = forms.wait_of(speed * self.jobs.rate, self.service_s, count, self.variation)
        return forms.share_within(self.ttft.seconds, wait, self.service_s) >= self.ttft.share

    def step_s(self, rate: float) -> float:
        """Return the seconds of a step, in the mean, of a node to which requests come at this rate."""
        return forms.step_s(rate, self.jobs.tokens, self.jobs.answer, self.costs.decode, self.over.step_s)

    def gaps_s(self, rate: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean gap of each request on such a node, and the mean of its slowest tenth of gaps."""
        step_s, answer = self.step_s(rate), self.jobs.answer
        stored_s = self._stored_s
        if self._link_s is not None:
            stored_s = stored_s + forms.wait_of(rate, self._link_s, 1).mean_s
        gap_s = forms.first_gap_s(rate, step_s, stored_s, self._load_s)
        return forms.tpot_s(answer, step_s, gap_s), forms.tbt_s(answer, step_s, gap_s)

    def decodes_keep(self, count: int, speed: float = 1.0) -> bool:
        """Tell whether so many nodes that decode keep the limit on gaps, and have memory for their KV."""
        rate = speed * self.jobs.rate / count
        step_s, base_s = self.step_s(rate), self.costs.decode.base_s + self.over.step_s
        if step_s == inf or not self.has_space(rate, step_s, base_s):
            return False
        return float(np.mean(self.gaps_s(rate)[1] <= self.tbt.seconds)) >= self.tbt.share

    def has_space(self, rate: float, step_s: float, base_s: float) -> bool:
        """Tell whether a node has memory for the KV of its sequences nearly always; see `forms.kv_tokens`."""
        mean, deviation = forms.kv_tokens(rate, self.jobs.tokens, self.jobs.answer, step_s, base_s)
        return mean + forms.DEVIATIONS * deviation <= most_tokens(self.cluster)

    def to_spare(self, nodes: Nodes) -> tuple[float, float]:
        """Return how much faster requests could come until the nodes of a kind no longer keep their limit."""
        return highest(partial(self.prefills_keep, nodes[0])), highest(partial(self.decodes_keep, nodes[1]))


def most_tokens(cluster: Cluster) -> int:
    """Return the tokens whose KV has space on a node that decodes."""
    return cluster.kv_bytes * cluster.block_tokens // cluster.layout.nbytes


def _least(keeps: Callable[[int], bool], otherwise: int) -> int:
    """Return the least number for which something holds."""
    least = 1 + bisect_left(range(1, MOST_NODES), True, key=keeps)
    return least if least < MOST_NODES else otherwise


def highest(keeps: Callable[[float], bool]) -> float:
    """Return the speed from which on something does not hold any more, found by halving."""
    low, high = 0.0, MOST_SPEED
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
