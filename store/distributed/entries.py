"""The nouns of the master's books: replicas, entries, lent segments, rooms in quarantine. Plain data.

Made by `catalogue`. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from store.directory import Directory
from store.distributed.messages import Wish
from store.distributed.shared_table import OFFSET_BITS


@dataclass(slots=True)
class Replica:
    """One copy: an object of the directory, at an offset of a segment."""

    object_id: int
    segment: int
    offset: int

    @property
    def location(self) -> int:
        """As it stands in the table."""
        return self.segment << OFFSET_BITS | self.offset


@dataclass(slots=True, eq=False)
class Entry:
    """One object of a name, or room for one that is being written.

    name             "" while it is room in advance
    put              number of the put; the directory's owner of its replicas
    client           who put it
    word             its slot in the table; 0: no reader sees it
    soft_until_ns    evicted last until then
    remote_until_ns  clients that cannot look at the table may read until then
    """

    name: str
    put: int
    client: str
    nbytes: int
    replicas: list[Replica]
    wish: Wish
    started_ns: int
    upsert: bool = False
    soft_until_ns: int = 0
    word: int = 0
    remote_until_ns: int = 0
    tasks: int = 0

    @property
    def owner(self) -> str:
        """In the directory."""
        return str(self.put)


@dataclass(slots=True)
class Lender:
    """A segment that is lent. used_until: the end of the last byte that was ever given out."""

    number: int
    name: str
    client: str
    machine: str
    nbytes: int
    used_until: int = 0


@dataclass(slots=True)
class Quarantine:
    """Room that a writer or a remote reader may still touch: until a time, or until the client is gone."""

    owner: str
    client: str
    until_ns: int = field(default=1 << 63)


class Space(Directory):
    """Who has which range of which segment: the directory, asked for what it keeps per segment."""

    def free_bytes(self, number: int) -> int:
        """Free in one segment. Raises UnknownObject."""
        return self._segment(number).allocator.free_bytes
