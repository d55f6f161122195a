"""The answer to how many of each: simulations around what the replays found, and what it rests on.

Explained in docs/explain/planning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from msgspec.structs import replace as changed

from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.progress import bar, counted
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Found, Limit, Nodes
from mooncake_lite.planner.roofline import Roofline, roofline_of
from mooncake_lite.planner.search import Search, around, with_nodes
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.planner.warnings import warnings_of
from mooncake_lite.profiles.file import MovesSection, Profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.intervals import scaled
from mooncake_lite.simulator.sweep import processes
from mooncake_lite.workloads.traces import Trace

MOST_SIMULATIONS = 4

OFF = 0.2
"""How far each assumption is moved, up and down."""

LEAST_SHARE_OF_DRAM = 1 / 64

Off = dict[tuple[str, float], Nodes | None]
"""(assumption, factor) -> the smallest cluster by replays if it is off by that; None: there is none."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan.

    search     has all candidates that were replayed
    first      closed forms, with what the replay of the answer reuses; guess: by those before any replay
    nodes      the answer
    simulated  what was simulated; outside: the share of decode steps there that the profile does not cover
    to_spare   how much faster requests could come, by closed forms, for the nodes of each kind
    dram       bytes of each node that prefills, with which the limits are still kept in replays
    """

    search: Search
    first: First
    guess: Nodes
    nodes: Nodes
    simulated: dict[Nodes, Found]
    outside: float | None
    to_spare: tuple[float, float]
    dram: int
    off: Off
    roofline: Roofline
    warnings: list[str]

    @property
    def is_confirmed(self) -> bool:
        """Tell whether a simulation kept the limits."""
        return best_of(self.search, self.simulated) is not None

    @property
    def balance(self) -> float | None:
        """Return the nodes that prefill for each that decodes where both have as much to spare.

        None: closed forms keep a limit with no number of nodes.
        """
        prefills, decodes = self.to_spare
        return self.nodes[0] / self.nodes[1] * decodes / prefills if prefills and decodes else None

    def frontier(self) -> list[Found]:
        """Return the answer and its neighbours, simulated ones in place of replayed ones, by nodes."""
        found, (prefills, decodes) = {**self.search.found, **self.simulated}, self.nodes
        near = [(p, d) for p, d in found if abs(p - prefills) + abs(d - decodes) <= 2]
        return [found[one] for one in sorted(near, key=_size)]


def _size(nodes: Nodes) -> tuple[int, Nodes]:
    return sum(nodes), nodes


def best_of(search: Search, found: dict[Nodes, Found]) -> Nodes | None:
    """Return the smallest of these candidates that keeps the limits; None: none of them does."""
    good = (nodes for nodes, one in found.items() if one.keeps(*search.limits))
    return min(good, key=_size, default=None)


def answer_of(
    cluster: Cluster, trace: Trace, ttft: Limit, tbt: Limit, quick: bool, jobs: int | None
) -> Planned:
    """Look for the answer. quick: without simulations; jobs: processes; None: one per core."""
    first = First(cluster, jobs_of(trace), ttft, tbt)
    first.check()
    guess = first.guess()
    with bar("replays", None) as update:
        search = Search(cluster, trace, ttft, tbt, lambda replays: update(completed=replays))
        nodes = search.smallest(guess).nodes
    simulated, outside, off = dict[Nodes, Found](), None, Off()
    dram = cluster.node_bytes if cluster.mode == "pooled" else 0
    if not quick:
        simulated, outside, off = _surer(search, nodes, jobs or usable_cores())
        nodes = best_of(search, simulated) or nodes
        dram = least_dram(search, nodes) if dram else 0
    search.at(nodes)
    first = First(cluster, replace(first.jobs, cached=search.played[nodes].cached), ttft, tbt)
    return Planned(
        search, first, guess, nodes, simulated, outside, first.to_spare(nodes), dram, off,
        roofline_of(first, sum(nodes)), warnings_of(search, first, nodes),
    )  # fmt: skip


def _surer(search: Search, begin: Nodes, at_once: int) -> tuple[dict[Nodes, Found], float, Off]:
    """Simulate around a candidate, and then move each assumption; several at once, with a bar."""
    cluster, off = search.cluster, Off()
    names = [name for name in ASSUMED if name != "links" or not cluster.together]  # one node has no links
    tries = [(name, factor) for name in names for factor in (1 - OFF, 1 + OFF)]
    with counted("runs", MOST_SIMULATIONS + len(tries)) as told, processes(at_once, mpi=False) as executor:
        simulated, outside = confirm(search, begin, executor, at_once, told)
        nodes = best_of(search, simulated) or begin
        others = [ASSUMED[name](cluster, factor) for name, factor in tries]
        asked = [executor.submit(moved, one, search.trace, *search.limits, nodes) for one in others]
        for one, future in zip(tries, asked):
            off[one] = future.result()
            told()
    return simulated, outside, off


def confirm(
    search: Search, begin: Nodes, executor: Executor, at_once: int, told: Callable[[], None]
) -> tuple[dict[Nodes, Found], float]:
    """Simulate a candidate and those around it, at most MOST_SIMULATIONS, several at once.

    Where it keeps the limits, those with one node fewer follow, and one of these that keeps them takes its
    place. Where it does not, it gets more nodes of the kind that is short.
    """
    found: dict[Nodes, Found] = {}
    outside = 0.0
    while len(found) < MOST_SIMULATIONS and (next_ones := wanted(search, found, begin)):
        batch = next_ones[: min(at_once, MOST_SIMULATIONS - len(found))]
        clusters = [with_nodes(search.cluster, one) for one in batch]
        runs = [executor.submit(simulate, one, search.trace, *search.limits) for one in clusters]
        for nodes, run in zip(batch, runs):
            found[nodes], share = run.result()
            outside = max(outside, share)
            told()
    return found, outside


def wanted(search: Search, found: dict[Nodes, Found], begin: Nodes) -> list[Nodes]:
    """Return the candidates to be simulated next, the most important one first; [] where all is known."""
    nodes = begin
    for _ in range(2 * len(found) + 2):
        fewer = around(nodes)
        if nodes not in found:
            return [nodes, *(one for one in fewer if one not in found)]
        if not found[nodes].keeps(*search.limits):
            nodes = search.grown(found[nodes])
            continue
        better = (one for one in fewer if one in found and found[one].keeps(*search.limits))
        if (smaller := next(better, None)) is None:
            return [one for one in fewer if one not in found]
        nodes = smaller
    return []


def least_dram(search: Search, nodes: Nodes) -> int:
    """Return the least DRAM of a node, halved again and again, with which a candidate keeps the limits."""
    nbytes = search.cluster.node_bytes
    least = max(search.cluster.layout.nbytes, LEAST_SHARE_OF_DRAM * nbytes)
    while nbytes / 2 >= least:
        smaller = replace(search.cluster, node_bytes=nbytes // 2)
        if not Search(smaller, search.trace, *search.limits).at(nodes).keeps(*search.limits):
            break
        nbytes //= 2
    return nbytes


def _with(cluster: Cluster, profile: Profile) -> Cluster:
    return replace(cluster, profile=profile)


def _slower_links(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, link_bytes_per_s=cluster.costs.transfer.far_bytes_per_s / factor)


def _slower_copies(cluster: Cluster, factor: float) -> Cluster:
    moves, rate = cluster.profile.moves or MovesSection(), cluster.costs.load.dram_bytes_per_s / factor
    return _with(cluster, cluster.profile.with_section("moves", changed(moves, dram_bytes_per_s=rate)))


ASSUMED: dict[str, Callable[[Cluster, float], Cluster]] = {
    "passes of prompts": lambda cluster, factor: _with(cluster, scaled(cluster.profile, factor, 1.0, 1.0)),
    "decode steps": lambda cluster, factor: _with(cluster, scaled(cluster.profile, 1.0, factor, 1.0)),
    "overheads of the program": lambda cluster, factor: _with(cluster, scaled(cluster.profile, 1, 1, factor)),
    "links": _slower_links,
    "copies within a node": _slower_copies,
}
"""What an answer rests on -> the same cluster with these times longer by a factor."""


def moved(cluster: Cluster, trace: Trace, ttft: Limit, tbt: Limit, begin: Nodes) -> Nodes | None:
    """Return the smallest cluster of such machines by replays; None: there is none."""
    try:
        return Search(cluster, trace, ttft, tbt).smallest(begin).nodes
    except ConfigError:
        return None
