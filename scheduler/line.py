"""A line of waiting requests, in the order of their keys.

Kept by `scheduler.state`, one for each instance that prefills and one for requests without a place. What the
keys are is the choice of `scheduler.queues`. Books only.

    heap of (key, number, name), least in front       an entry that was removed stays until it is in front
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

Key = tuple[float, ...]

FIRST: Key = (float("-inf"),)
"""The key before all others: a request that has begun continues before others begin."""

MOST_DEAD = 64
"""Removed entries that may stay, besides as many as living ones, before the heap is rebuilt.

Any small number works: it keeps a short line from being rebuilt at nearly every removal.
"""


class Line:
    """Names in the order of their keys; equal keys in the order of joining, or the opposite with `front`."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, str]] = []
        self._entries: dict[str, tuple[Key, int, str]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield the names in their order. Sorts them: for tests and people."""
        return iter([name for _, _, name in sorted(self._entries.values())])

    def add(self, name: str, key: Key, *, front: bool = False) -> None:
        """Let a name join. front: before those with an equal key."""
        assert name not in self._entries, f"{name} waits already"
        self._number += 1
        entry = self._entries[name] = key, -self._number if front else self._number, name
        heappush(self._heap, entry)

    def head(self) -> str | None:
        """Return the first name; None of an empty line."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heappop(heap)
        return None

    def remove(self, name: str) -> None:
        """Let a name leave. An unknown one changes nothing."""
        if self._entries.pop(name, None) is not None and len(self._heap) > 2 * len(self) + MOST_DEAD:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def change_key(self, name: str, key: Key) -> None:
        """Give a name another key. Among equal keys it keeps its place in the order of joining."""
        number = self._entries[name][1]
        self.remove(name)
        entry = self._entries[name] = key, number, name
        heappush(self._heap, entry)

    def check(self) -> None:
        """Assert that every living entry is in the heap."""
        found = {entry[2] for entry in self._heap if self._entries.get(entry[2]) is entry}
        assert found == self._entries.keys()
