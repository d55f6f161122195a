"""The answer to how many of each: simulations around what the replays found, and what it rests on.

Explained in docs/explain/planning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from mooncake_lite.errors import ConfigError
from mooncake_lite.planner.limits import Found, Limit, Nodes
from mooncake_lite.planner.search import Search, around, with_nodes
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.file import MovesSection
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.intervals import scaled
from mooncake_lite.workloads.traces import Trace

MOST_SIMULATIONS = 4

OFF = 0.2
"""How far each assumption is moved, up and down."""

LEAST_SHARE_OF_DRAM = 1 / 64


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulations came to. best: the smallest that kept the limits; None: none of them did."""

    best: Found | None
    found: dict[Nodes, Found]
    outside: float


def confirm(
    search: Search, begin: Nodes, executor: Executor, at_once: int, told: Callable[[], None]
) -> Simulated:
    """Simulate a candidate and those around it, at most MOST_SIMULATIONS, several at once.

    Where it keeps the limits, those with one node fewer follow, and one of these that keeps them takes its
    place. Where it does not, it gets more nodes of the kind that is short.
    """
    cluster, trace, limits = search.cluster, search.trace, (search.ttft, search.tbt)
    found: dict[Nodes, Found] = {}
    outside = 0.0
    while len(found) < MOST_SIMULATIONS and (next_ones := wanted(search, found, begin)):
        batch = next_ones[: min(at_once, MOST_SIMULATIONS - len(found))]
        runs = [executor.submit(simulate, with_nodes(cluster, one), trace, *limits) for one in batch]
        for nodes, run in zip(batch, runs):
            found[nodes], share = run.result()
            outside = max(outside, share)
            told()
    good = [one for one in found.values() if one.keeps(*limits)]
    return Simulated(min(good, key=lambda one: (sum(one.nodes), one.nodes), default=None), found, outside)


def wanted(search: Search, found: dict[Nodes, Found], begin: Nodes) -> list[Nodes]:
    """Return the candidates to be simulated next, the most important one first; [] where all is known."""
    nodes = begin
    for _ in range(2 * len(found) + 2):
        if nodes not in found:
            return [nodes, *(one for one in around(nodes) if one not in found)]
        if not found[nodes].keeps(search.ttft, search.tbt):
            nodes = search.grown(found[nodes])
            continue
        fewer = around(nodes)
        better = next(
            (one for one in fewer if one in found and found[one].keeps(search.ttft, search.tbt)), None
        )
        if better is None:
            return [one for one in fewer if one not in found]
        nodes = better
    return []


def least_dram(search: Search, nodes: Nodes) -> int:
    """Return the least DRAM of a node, halved again and again, with which a candidate keeps the limits."""
    nbytes = search.cluster.node_bytes
    least = max(search.cluster.layout.nbytes, LEAST_SHARE_OF_DRAM * nbytes)
    while nbytes / 2 >= least:
        smaller = replace(search.cluster, node_bytes=nbytes // 2)
        one = Search(smaller, search.trace, search.ttft, search.tbt).at(nodes)
        if not one.keeps(search.ttft, search.tbt):
            break
        nbytes //= 2
    return nbytes


ASSUMED: dict[str, Callable[[Cluster, float], Cluster]] = {
    "passes of prompts": lambda cluster, factor: _scaled(cluster, factor, 1.0, 1.0),
    "decode steps": lambda cluster, factor: _scaled(cluster, 1.0, factor, 1.0),
    "overheads of the program": lambda cluster, factor: _scaled(cluster, 1.0, 1.0, factor),
    "links": lambda cluster, factor: replace(
        cluster, link_bytes_per_s=cluster.costs.transfer.far_bytes_per_s / factor
    ),
    "copies within a node": lambda cluster, factor: _near(cluster, factor),
}
"""What an answer rests on -> the same cluster with these times longer by a factor."""


def assumed_of(cluster: Cluster) -> list[str]:
    """Return the names of what an answer for this cluster rests on: ranks of one node have no links."""
    return [name for name in ASSUMED if name != "links" or not cluster.together]


def _scaled(cluster: Cluster, *factors: float) -> Cluster:
    return replace(cluster, profile=scaled(cluster.profile, *factors))


def _near(cluster: Cluster, factor: float) -> Cluster:
    moves = cluster.profile.moves or MovesSection()
    slower = MovesSection(
        moves.near_bytes_per_s, moves.near_latency_s, moves.far_bytes_per_s,
        cluster.costs.load.dram_bytes_per_s / factor, moves.ssd_bytes_per_s,
    )  # fmt: skip
    return replace(cluster, profile=cluster.profile.with_section("moves", slower))


def moved(
    cluster: Cluster, trace: Trace, ttft: Limit, tbt: Limit, begin: Nodes, name: str, factor: float
) -> Nodes | None:
    """Return the smallest candidate by replays if an assumption is off by a factor; None: there is none."""
    try:
        return Search(ASSUMED[name](cluster, factor), trace, ttft, tbt).smallest(begin).nodes
    except ConfigError:
        return None
