"""Transfers under way from each node: prefills on other nodes that read from it.

Kept by `scheduler.state`, read by policies. Books only.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.prefix_index import Leading


class Flows:
    """The reading prefills.

    _by_node   node -> prefills that read from it
    _sources   request -> nodes that its prefill reads from
    """

    def __init__(self) -> None:
        self._by_node: dict[int, int] = {}
        self._sources: dict[str, list[int]] = {}

    def begin(self, request_id: str, nodes: Iterable[int]) -> None:
        """Note the other nodes that a running prefill reads from, each named once."""
        if sources := list(nodes):
            self._sources[request_id] = sources
        for node in sources:
            self._by_node[node] = self._by_node.get(node, 0) + 1

    def end(self, request_id: str) -> None:
        """Note that a prefill has ended. One that reads nothing changes nothing."""
        for node in self._sources.pop(request_id, ()):
            self._by_node[node] -= 1

    def least(self, pool: Leading) -> int:
        """Return the transfers under way at the least busy node with the longest prefix in DRAM."""
        if not self._sources:
            return 0
        longest = max(pool.by_node.values(), default=0)
        nodes = [node for node, blocks in pool.by_node.items() if blocks == longest]
        return min((self._by_node.get(node, 0) for node in nodes), default=0)

    def check(self) -> None:
        """Assert that both books agree."""
        assert sum(self._by_node.values()) == sum(map(len, self._sources.values()))
