"""A line of waiting requests, in the order of their keys.

Kept by `scheduler.state`, one for each instance that prefills and one for requests without a place. What the
keys are is the choice of `scheduler.queues`. Books only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[float, ...]

FIRST: Key = (float("-inf"),)
"""The key before all others: a request that has begun continues before others begin."""


class Line:
    """Names in the order of their keys; equal keys in the order of joining, or the opposite with `front`.

    _sorted   (key, number, name) of each, the least in front
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[Key, int, str]] = []
        self._entries: dict[str, tuple[Key, int, str]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield the names in their order."""
        return iter([name for _, _, name in self._sorted])

    def add(self, name: str, key: Key, *, front: bool = False) -> None:
        """Let a name join. front: before those with an equal key."""
        assert name not in self._entries, f"{name} waits already"
        self._number += 1
        self._insert(name, key, -self._number if front else self._number)

    def head(self) -> str | None:
        """Return the first name; None of an empty line."""
        return self._sorted[0][2] if self._sorted else None

    def remove(self, name: str) -> None:
        """Let a name leave. An unknown one changes nothing."""
        if (entry := self._entries.pop(name, None)) is not None:
            del self._sorted[bisect_left(self._sorted, entry)]

    def change_key(self, name: str, key: Key) -> None:
        """Give a name another key. Among equal keys it keeps its place in the order of joining."""
        number = self._entries[name][1]
        self.remove(name)
        self._insert(name, key, number)

    def _insert(self, name: str, key: Key, number: int) -> None:
        entry = self._entries[name] = key, number, name
        insort(self._sorted, entry)

    def check(self) -> None:
        """Assert that the entries are in order."""
        assert self._sorted == sorted(self._entries.values())
