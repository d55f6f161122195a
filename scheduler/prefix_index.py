"""Which prefix of a prompt is in the pool, and how near to whom.

Fed by BlockStored and BlockRemoved alone; the store's directory is the truth, and a test compares
the two. Asked by `scheduler.conductor` once per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.events import BlockRemoved, BlockStored, Tier


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest run of leading blocks that the pool holds.

    blocks       length of the run
    dram_blocks  how many of them lie in DRAM
    by_node      blocks of the run with a DRAM copy on a node
    """

    blocks: int
    dram_blocks: int
    by_node: dict[int, int]


class PrefixIndex:
    """Where each key lies: key -> set of (rank, tier).

    Invariant: no key maps to an empty set.
    """

    def __init__(self) -> None:
        self._holders: dict[int, set[tuple[int, Tier]]] = {}
        self._node_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add_rank(self, rank: int, node: int) -> None:
        """Tell on which node a rank runs that may hold blocks."""
        self._node_of[rank] = node

    def on(self, event: BlockStored | BlockRemoved) -> None:
        """Apply one event; a BlockRemoved for what is not there changes nothing."""
        place = (event.rank, event.tier)
        if isinstance(event, BlockStored):
            self._holders.setdefault(event.key, set()).add(place)
            return
        holders = self._holders.get(event.key)
        if holders is not None:
            holders.discard(place)
            if not holders:
                del self._holders[event.key]

    def match(self, keys: Sequence[int]) -> PrefixMatch:
        """The longest run of leading `keys` that is held anywhere. Cost: one lookup per block of the run."""
        blocks = dram_blocks = 0
        by_node: dict[int, int] = {}
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            blocks += 1
            nodes = {self._node_of.get(rank, -1) for rank, tier in holders if tier == "dram"}
            dram_blocks += bool(nodes)
            for node in nodes:
                by_node[node] = by_node.get(node, 0) + 1
        return PrefixMatch(blocks, dram_blocks, by_node)

    def places(self) -> set[tuple[int, int, Tier]]:
        """Every (key, rank, tier) known, for comparison with the store's directory."""
        return {(key, rank, tier) for key, holders in self._holders.items() for rank, tier in holders}

    def check(self) -> None:
        """Assert the invariant."""
        assert all(self._holders.values()), "a key without a holder is kept"
