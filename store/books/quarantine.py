"""Quarantine of objects that late bytes may reach: until when, and because of which writer. Pure.

Used by `store.books.ledger` alone, which frees an object when its quarantine ends. Explained in
docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

QUARANTINE_S = 120.0
"""Time in which late bytes may land after a transfer has failed.

It is longer than any wait of `transport`, including all second tries.
"""


class Quarantine:
    """The objects into whose ranges late bytes may still land, by id.

    _entries  object_id -> (until, writer), in the order of the times
    held      the same, without an end: their writer cannot be reached
    _writers  writer -> ids of the objects that it may still write; objects without a known writer are left
              out

    Invariant: the times of _entries do not decrease; _writers holds the objects of both.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._entries: OrderedDict[int, tuple[float, int | None]] = OrderedDict()
        self.held: dict[int, int] = {}
        self._writers: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        """Return the number of objects in quarantine."""
        return len(self._entries) + len(self.held)

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._entries or object_id in self.held

    def add(self, object_id: int, now: float, writer: int | None) -> None:
        """Quarantine an object until `now` + limit_s, or until this writer is lost."""
        self._entries[object_id] = now + self.limit_s, writer
        if writer is not None:
            self._writers.setdefault(writer, {})[object_id] = None

    def remove(self, object_id: int) -> None:
        """End the quarantine of an object. Raises KeyError for one that is not here."""
        writer: int | None
        if object_id in self.held:
            writer = self.held.pop(object_id)
        else:
            _, writer = self._entries.pop(object_id)
        if writer is not None:
            del self._writers[writer][object_id]
            if not self._writers[writer]:
                del self._writers[writer]

    def of_writer(self, rank: int) -> list[int]:
        """Return the objects that this rank may still write."""
        return list(self._writers.get(rank, ()))

    def hold(self, writer: int) -> None:
        """Let the quarantines because of this writer last until it is known to be dead."""
        for object_id in self.of_writer(writer):
            self._entries.pop(object_id, None)
            self.held[object_id] = writer

    def ended(self, now: float) -> list[int]:
        """Return the objects whose time is over. They stay until `remove`."""
        found = []
        for object_id, (until, _) in self._entries.items():
            if until > now:
                break
            found.append(object_id)
        return found

    def next_deadline(self) -> float:
        """Return when the first quarantine ends by itself; inf: never."""
        return next(iter(self._entries.values()))[0] if self._entries else inf

    def check(self) -> None:
        """Assert the invariant (tests)."""
        times = [until for until, _ in self._entries.values()]
        assert times == sorted(times)
        by_writer = {(writer, i) for writer, ids in self._writers.items() for i in ids}
        timed = {(writer, i) for i, (_, writer) in self._entries.items() if writer is not None}
        assert by_writer == timed | {(writer, i) for i, writer in self.held.items()}
        assert all(self._writers.values()), "a writer of nothing"
