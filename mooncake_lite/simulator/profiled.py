"""Hardware of one kind of machine: times come from its profile, transfers share the network.

Used by `experiment.py`. The control plane has the same profile to begin with. It does not know which
transfers will overlap, or how long answers are. Explained in docs/explain/experiments.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.network import Network
from scheduler.costs import CostConfig
from store.objects import BlockRef


class ProfiledHardware:
    """Ranks that take as long as a profile says.

    seconds   of a forward pass; costs: of transfers
    nodes     the node of each rank
    """

    def __init__(
        self, clock: Clock, seconds: Callable[[PassLoad], float], costs: CostConfig, nodes: Sequence[int]
    ) -> None:
        self._seconds, self._nodes = seconds, nodes
        move = costs.transfer
        self._near_bytes_per_s, self._far_bytes_per_s = costs.load.dram_bytes_per_s, move.far_bytes_per_s
        self._latency_s = move.latency_s
        self._moved = {"far": 0, "near": 0}
        self._network = Network(clock, costs.load.dram_bytes_per_s, move.far_bytes_per_s, move.latency_s)

    def pass_s(self, rank: int, load: PassLoad) -> float:
        """Return the seconds of the profile, as the emulated engine waits for them."""
        return self._seconds(load)

    def stream_s(self, rank: int, refs: Sequence[BlockRef]) -> float:
        """Return the seconds of the profile."""
        far = sum(ref.nbytes for ref in refs if self._nodes[ref.rank] != self._nodes[rank])
        near = sum(ref.nbytes for ref in refs) - far
        return self._latency_s + near / self._near_bytes_per_s + far / self._far_bytes_per_s

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Move blocks from the nodes that hold them to the node of this rank."""
        parts: Counter[tuple[int, int]] = Counter()
        for ref in refs:
            parts[self._nodes[ref.rank], self._nodes[rank]] += ref.nbytes
        self._network.move(parts, done)

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes that went between nodes so far, and within nodes."""
        return dict(self._moved)

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action) -> None:
        """Move blocks from the node of this rank to the nodes that will hold them."""
        parts: Counter[tuple[int, int]] = Counter()
        for ref in refs:
            parts[self._nodes[rank], self._nodes[ref.rank]] += ref.nbytes
        self._network.move(parts, done)
