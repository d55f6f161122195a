"""Transfers under way from each node: prefills on other nodes that read from it.

Kept by `scheduler.state`, read by policies. Books only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.prefix_index import Leading


class Flows:
    """The reading prefills.

    _by_node   node -> prefills that read from it
    _sources   request -> nodes that its prefill reads from
    """

    def __init__(self) -> None:
        self._by_node = Counter[int]()
        self._sources: dict[str, list[int]] = {}

    def begin(self, request_id: str, nodes: Iterable[int]) -> None:
        """Note the other nodes that a running prefill reads from, each named once."""
        if sources := list(nodes):
            self._sources[request_id] = sources
            self._by_node.update(sources)

    def end(self, request_id: str) -> None:
        """Note that a prefill has ended. One that reads nothing changes nothing."""
        self._by_node.subtract(self._sources.pop(request_id, ()))

    def least(self, pool: Leading) -> int:
        """Return the transfers under way at the least busy node with the longest prefix in DRAM."""
        if not self._sources:
            return 0
        longest = max(pool.by_node.values(), default=0)
        nodes = [node for node, blocks in pool.by_node.items() if blocks == longest]
        return min((self._by_node[node] for node in nodes), default=0)

    def check(self) -> None:
        """Assert that both books agree."""
        assert self._by_node.total() == sum(map(len, self._sources.values()))
