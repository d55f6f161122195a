"""Hardware of one kind of machine: times come from its profile, transfers share links.

Used by `cluster.py`. The control plane has the same profile to begin with. It does not know which
transfers will overlap, or how long answers are. Explained in docs/explain/experiments.md.

    read     source's OUT ---> IN of the rank's node ---> LOAD of the rank's node ---> pages
    write    pages ---> LOAD of the rank's node ---> OUT of the rank's node ---> target's IN
    copy     source's OUT ---> IN of the store's node ---> its DRAM
    load     DISK of the store's node ---> its DRAM, and back for a save

The first bytes are in pages while the last ones are still at their source, so a transfer is one flow over all
its links. Within a node it is a flow over LOAD alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


class ProfiledHardware:
    """Ranks that take as long as a profile says.

    seconds     of a forward pass; costs: of transfers
    nodes       the node of each rank
    overheads   of what is neither
    covered     the most of each that was measured
    together    seconds of a pass of instances whose ranks compute it together, by their first rank
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
        self._network = Network(clock, lambda link: self._bytes_per_s[link % KINDS])

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
        here = self._nodes[rank]
        self._move(rank, refs, lambda node: (link_of(OUT, node), link_of(IN, here)), done, least_s)

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes that went between nodes so far, within nodes, and from and to disks."""
        return dict(self._moved)

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Move blocks from the node of this rank to the nodes that will hold them."""
        here = self._nodes[rank]
        self._move(rank, refs, lambda node: (link_of(OUT, here), link_of(IN, node)), done, least_s)

    def copy(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Move blocks from the nodes that hold them into the DRAM of this rank's node."""
        here = self._nodes[rank]
        self._move(rank, refs, lambda node: (link_of(OUT, node), link_of(IN, here)), done, into_pages=False)

    def load(self, rank: int, nbytes: int, done: Action) -> None:
        """Read from the disk of this rank's node."""
        self._moved["disk"] += nbytes
        self._network.send((link_of(DISK, self._nodes[rank]),), nbytes, done, self._disk_latency_s)

    save = load

    def _move(
        self, rank: int, refs: Sequence[BlockRef], far: Callable[[int], tuple[Link, Link]], done: Action,
        least_s: float = 0.0, *, into_pages: bool = True,
    ) -> None:  # fmt: skip
        """Begin a flow for each node that holds some of the blocks, and call `done` when the last one ends.

        far          the links between another node and that of the rank
        least_s      as long as each flow takes at least
        into_pages   of this rank, or out of them
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

        load = (link_of(LOAD, here),) if into_pages else ()
        for node, count in nbytes.items():
            self._moved["near" if node == here else "far"] += count
            most = count / least_s if least_s else inf
            if node == here:
                self._network.send((link_of(LOAD, here),), count, one_done, most=most)
            else:
                self._network.send((*far(node), *load), count, one_done, self._latency_s, most)
