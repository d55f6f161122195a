"""Hardware of one kind of machine: times come from its profile, transfers share links.

Used by `cluster.py`. The control plane has the same profile to begin with. It does not know which
transfers will overlap, or how long answers are. Explained in docs/explain/experiments.md.

    read     source's OUT ---> IN of the rank's node ---> LOAD of the rank's node ---> pages
    write    pages ---> LOAD of the rank's node ---> OUT of the rank's node ---> target's IN
    copy     source's OUT ---> IN of the store's node ---> its DRAM
    load     DISK of the store's node ---> its DRAM, and back for a save

Between two sites a flow also passes the uplinks of both: OUT of the one site, and IN of the other.

The first bytes are in pages while the last ones are still at their source, so a transfer is one flow over all
its links. Within a node it is a flow over LOAD alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.costs import PassSeconds
from mooncake_lite.profiles.file import OverheadsSection
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.network import Link, Network
from scheduler.costs import CostConfig
from store.objects import BlockRef

NOTHING = PassLoad()
KINDS = 4
OUT, IN, LOAD, DISK = range(KINDS)
"""The links of a node: to other nodes, from other nodes, between its memory and the pages of its ranks, and
between its SSD and its memory. Reads and writes share a disk."""


def link_of(kind: int, node: int) -> Link:
    """Return the number of a link."""
    return KINDS * node + kind


@dataclass(frozen=True, slots=True)
class Sites:
    """Groups of nodes with a link each to all other groups: racks, or data centers.

    of_node       site of each node; empty: all nodes are on one site
    bytes_per_s   of the uplink of a site, each way; latency_s: one way from site to site
    """

    of_node: Sequence[int] = ()
    bytes_per_s: float = inf
    latency_s: float = 0.0

    def apart(self, node: int, other: int) -> bool:
        """Tell whether two nodes are on different sites."""
        return bool(self.of_node) and self.of_node[node] != self.of_node[other]


class ProfiledHardware:
    """Ranks that take as long as a profile says.

    seconds     of a forward pass; costs: of transfers
    nodes       the node of each rank
    overheads   of what is neither
    covered     the most of each that was measured
    together    seconds of a pass of instances whose ranks compute it together, by their first rank
    sites       of the nodes. The links of a site are those of a node whose number is above all others
    """

    def __init__(
        self,
        clock: Clock,
        seconds: PassSeconds,
        costs: CostConfig,
        nodes: Sequence[int],
        overheads: OverheadsSection,
        covered: PassLoad = NOTHING,
        together: Mapping[int, PassSeconds] | None = None,
        sites: Sites = Sites(),
    ) -> None:
        self._together = together or {}
        self._clock, self._seconds, self._nodes = clock, seconds, nodes
        self.step_s, self.request_s = overheads.step_s, overheads.request_s
        self.message_s = 2 * overheads.message_s
        self._latency_s = costs.transfer.latency_s
        self._disk_latency_s = costs.load.ssd_latency_s
        far = costs.transfer.far_bytes_per_s
        self._bytes_per_s = (far, far, costs.load.dram_bytes_per_s, costs.load.ssd_bytes_per_s)
        self._covered, self._steps, self._steps_outside = covered, 0, 0
        self._prompts, self._prompts_outside = 0, 0
        self._moved = {"near": 0, "far": 0, "disk": 0}
        self._sites, self._first_site = sites, max(nodes) + 1
        if sites.of_node:
            self._moved["sites"] = 0
        self._network = Network(clock, self._capacity)

    def _capacity(self, link: Link) -> float:
        is_uplink = link >= link_of(0, self._first_site)
        return self._sites.bytes_per_s if is_uplink else self._bytes_per_s[link % KINDS]

    def away_s(self, rank: int) -> float:
        """Return the latency between sites, unless the rank is on that of the conductor."""
        apart = self._sites.apart(self._nodes[rank], self._nodes[0])
        return self._sites.latency_s if apart else 0.0

    def pass_s(self, rank: int, load: PassLoad) -> float:
        """Return the seconds of the profile, as the emulated engine waits for them."""
        return self._together.get(rank, self._seconds)(load)

    def count(self, load: PassLoad, passes: int) -> None:
        """Note that so many passes like this one were done."""
        most = self._covered
        if load.new_tokens:
            self._prompts += passes
            self._prompts_outside += passes * (load.new_tokens > most.new_tokens or load.pairs > most.pairs)
        if load.sequences:
            self._steps += passes
            self._steps_outside += passes * (load.sequences > most.sequences or load.context > most.context)

    def outside(self) -> dict[str, float]:
        """Return the share of the passes of prompts, and of decode steps, that no measurement covers."""
        return {
            "prefill": self._prompts_outside / max(1, self._prompts),
            "decode": self._steps_outside / max(1, self._steps),
        }

    def notice_s(self) -> float:
        """Return the time of a message: the launcher sees at once that a process has ended."""
        return self.message_s / 2

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Move blocks from the nodes that hold them to the node of this rank."""
        self._move(rank, refs, done, least_s)

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes that went between nodes so far, within nodes, and from and to disks.

        sites   of those between nodes, those between sites; only where there are sites
        """
        return dict(self._moved)

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Move blocks from the node of this rank to the nodes that will hold them."""
        self._move(rank, refs, done, least_s, leaves=True)

    def copy(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Move blocks from the nodes that hold them into the DRAM of this rank's node."""
        self._move(rank, refs, done, in_pages=False)

    def load(self, rank: int, nbytes: int, done: Action) -> None:
        """Read from the disk of this rank's node."""
        self._moved["disk"] += nbytes
        self._network.send((link_of(DISK, self._nodes[rank]),), nbytes, done, self._disk_latency_s)

    save = load

    def _move(
        self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0, *,
        leaves: bool = False, in_pages: bool = True,
    ) -> None:  # fmt: skip
        """Begin a flow for each node that holds some of the blocks, and call `done` when the last one ends.

        least_s    as long as each flow takes at least
        leaves     the node of the rank; otherwise blocks come to it
        in_pages   of this rank they end, or begin
        """
        here = self._nodes[rank]
        nbytes: Counter[int] = Counter()
        for ref in refs:
            nbytes[self._nodes[ref.rank]] += ref.nbytes
        left = len(nbytes)
        if not left:
            self._clock.after(0.0, done)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        load = (link_of(LOAD, here),) if in_pages else ()
        for node, count in nbytes.items():
            self._moved["near" if node == here else "far"] += count
            most = count / least_s if least_s else inf
            if node == here:
                self._network.send((link_of(LOAD, here),), count, one_done, most=most)
            else:
                links, latency_s = self._between(*((here, node) if leaves else (node, here)), count)
                self._network.send((*links, *load), count, one_done, latency_s, most)

    def _between(self, source: int, target: int, nbytes: int) -> tuple[tuple[Link, ...], float]:
        """Return the links from node to node, and their latency in seconds. Counts the bytes."""
        links, sites = (link_of(OUT, source), link_of(IN, target)), self._sites
        if not sites.apart(source, target):
            return links, self._latency_s
        self._moved["sites"] += nbytes
        leave, enter = (self._first_site + sites.of_node[node] for node in (source, target))
        uplinks = link_of(OUT, leave), link_of(IN, enter)
        return (*links, *uplinks), self._latency_s + sites.latency_s
