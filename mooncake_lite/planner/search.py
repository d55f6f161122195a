"""The smallest cluster that keeps the limits of a workload: candidates, how each does, and which one it is.

Pure. Explained in docs/explain/planning.md.

    closed forms -> where to begin    replays -> downhill to the smallest    simulations -> around it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from mooncake_lite.errors import ConfigError
from mooncake_lite.planner.first import most_tokens
from mooncake_lite.planner.limits import Found, Limit, Nodes
from mooncake_lite.planner.replay import Replayed, replay
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.traces import Trace

MOST_ROUNDS = 4
"""Of the search: links join the numbers so loosely that two are enough, nearly always."""

MOST_OF_A_KIND = 400

MOST_MORE = 4

NEAR = 0.02
"""How much less than a share makes it worth to look at a smaller number yet."""

KINDS = ("first tokens", "gaps")
"""What the limit on each kind of nodes is about."""


class Search:
    """Looks for the smallest candidate by replays, each of which is played once.

    cluster   whose numbers of nodes are varied
    told      is called with the number of replays so far
    """

    def __init__(
        self, cluster: Cluster, trace: Trace, ttft: Limit, tbt: Limit,
        told: Callable[[int], None] = lambda replays: None,
    ) -> None:  # fmt: skip
        self.cluster, self.trace, self.limits = cluster, trace, (ttft, tbt)
        self._told = told
        self.found: dict[Nodes, Found] = {}
        self.played: dict[Nodes, Replayed] = {}

    def at(self, nodes: Nodes) -> Found:
        """Return how a candidate does in a replay."""
        if nodes not in self.found:
            played = self.played[nodes] = replay(with_nodes(self.cluster, nodes), self.trace)
            seconds = played.ttft_s, played.tbt_s
            ttft, tbt = (float(np.mean(s <= limit.seconds)) for s, limit in zip(seconds, self.limits))
            fits = played.context <= most_tokens(self.cluster)
            self.found[nodes] = Found(nodes, ttft, tbt, spread(played.ttft_s), spread(played.tbt_s), fits)
            self._told(len(self.found))
        return self.found[nodes]

    def smallest(self, begin: Nodes) -> Found:
        """Return the candidate with the fewest nodes of each kind that keeps the limits.

        The limit on TTFT is about nodes that prefill, the one on gaps about nodes that decode, nearly: links
        join them. So one number is walked after the other until neither changes. Raises ConfigError where no
        number of nodes keeps a limit.
        """
        nodes = begin
        for _ in range(MOST_ROUNDS):
            before = nodes
            for kind in range(len(KINDS)):
                nodes = self._walk(nodes, kind)
            if nodes == before:
                break
        return self.at(nodes)

    def keeps(self, nodes: Nodes, kind: int, near: float = 0.0) -> bool:
        """Tell whether a candidate keeps the limit that is about a kind of nodes, or misses it by `near`."""
        if nodes[kind] < 1:
            return False
        one = self.at(nodes)
        return (one.fits or not kind) and one.shares[kind] + near >= self.limits[kind].share

    def grown(self, one: Found) -> Nodes:
        """Return the next candidate after a simulated one that does not keep the limits.

        It has more nodes of the kind that is short, MOST_MORE at most: so many that a replay keeps the limit
        by as much as the replay here promised too much.
        """
        kind = int(one.ttft >= self.limits[0].share)
        missing = self.at(one.nodes).shares[kind] - one.shares[kind]
        for more in range(1, MOST_MORE + 1):
            nodes = changed(one.nodes, kind, one.nodes[kind] + more)
            if self.at(nodes).shares[kind] - missing >= self.limits[kind].share:
                break
        return nodes

    def _walk(self, nodes: Nodes, kind: int) -> Nodes:
        """Return the candidate with the least number of nodes of a kind that keeps its limit.

        Strides double until one number keeps it and a smaller one does not, and are halved between these.
        Shares are not quite monotonous: the number below one that misses the limit by little is tried, too.
        """
        low, high, stride = nodes[kind] - 1, nodes[kind], 1
        while not self.keeps(changed(nodes, kind, high), kind):
            low, high, stride = high, high + stride, 2 * stride
            if high > MOST_OF_A_KIND:
                raise ConfigError(f"no number of nodes keeps the limit on {KINDS[kind]}: {self._best(kind)}")
        while low < nodes[kind] and self.keeps(changed(nodes, kind, low), kind):
            stride *= 2
            low, high = max(0, low - stride), low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.keeps(changed(nodes, kind, middle), kind) else (middle, high)
        past = changed(nodes, kind, low - 1)
        if self.keeps(changed(nodes, kind, low), kind, NEAR) and self.keeps(past, kind):
            return self._walk(past, kind)
        return changed(nodes, kind, high)

    def _best(self, kind: int) -> str:
        """Say how near to a limit any candidate has come."""
        limit, most = self.limits[kind], max(one.shares[kind] for one in self.found.values())
        return f"{limit.share:.1%} within {limit.seconds * 1e3:g} ms are wanted, and {most:.1%} are the most"


def changed(nodes: Nodes, kind: int, count: int) -> Nodes:
    """Return a candidate with another number of nodes of a kind."""
    return (nodes[0], count) if kind else (count, nodes[1])


def with_nodes(cluster: Cluster, nodes: Nodes) -> Cluster:
    """Return a cluster with other numbers of nodes."""
    return replace(cluster, nodes={"prefill": nodes[0], "decode": nodes[1]})


def spread(values: np.ndarray) -> tuple[float, float]:
    """Return mean and 90th percentile."""
    return float(values.mean()), float(np.quantile(values, 0.9))


def around(nodes: Nodes) -> Iterable[Nodes]:
    """Return the candidates with one node fewer."""
    return [(p, d) for p, d in ((nodes[0] - 1, nodes[1]), (nodes[0], nodes[1] - 1)) if min(p, d) > 0]
