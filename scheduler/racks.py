"""Racks: groups of nodes that are near each other. Bytes may travel faster within a rack than between racks.

Kept by `scheduler.state`; asked by the view of a placement and by the store's directory. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence


class Racks:
    """The rack of each node. Without a list, every node is a rack of its own.

    of_node   rack of node 0, 1, ...
    """

    def __init__(self, of_node: Sequence[int] = ()) -> None:
        self.of_node = list(of_node)

    def of(self, node: int) -> int:
        """Return the rack of a node."""
        return self.of_node[node] if self.of_node else node

    def bits(self, nodes: Sequence[int]) -> dict[int, int]:
        """Return rack -> one bit for each of its nodes: their positions in `nodes`."""
        bits: dict[int, int] = {}
        for position, node in enumerate(nodes):
            rack = self.of(node)
            bits[rack] = bits.get(rack, 0) | 1 << position
        return bits
