"""The data of the master's books: replicas, entries, lent segments, space in quarantine.

Made by `catalogue`. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from store.allocator import Extent
from store.directory import Directory
from store.mooncake_store.messages import Wish
from store.mooncake_store.shared_table import MAX_SEGMENT_BYTES, OFFSET_BITS


@dataclass(slots=True)
class Replica:
    """One copy: an object of the directory, in one range of a segment or several: (offset, bytes) each."""

    object_id: int
    segment: int
    extents: tuple[Extent, ...]

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Return (location, bytes) of each range; a location as it stands in the table."""
        return [(self.segment << OFFSET_BITS | offset, nbytes) for offset, nbytes in self.extents]


@dataclass(slots=True, eq=False)
class Entry:
    """One object of a name, or space for one that is being written.

    name             "" while it is space in advance
    put              number of the put; the directory's owner of its replicas
    client           that put it
    word             its slot in the table; 0: no reader sees it
    soft_until_ns    evicted last until then
    remote_until_ns  clients that cannot look at the table may read until then
    tasks            copies of it that are being made
    spare_bytes      its counted size while it is space in advance
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
    spare_bytes: int = 0

    @property
    def locations(self) -> list[int]:
        """Return the locations of the replicas in one range, which the table can list."""
        return [replica.pieces[0][0] for replica in self.replicas if len(replica.extents) == 1]

    @property
    def scattered(self) -> list[list[tuple[int, int]]]:
        """Return the pieces of the other replicas, which the master tells."""
        return [replica.pieces for replica in self.replicas if len(replica.extents) > 1]

    @property
    def owner(self) -> str:
        """Return the owner of its replicas in the directory."""
        return str(self.put)


@dataclass(slots=True)
class Lender:
    """A segment that is lent.

    used_until     the end of the last byte that was ever given out
    grows_until    where it may grow to: its machine has no memory for more
    """

    number: int
    name: str
    client: str
    machine: str
    nbytes: int
    used_until: int = 0
    grows_until: int = MAX_SEGMENT_BYTES


NEVER_NS = 1 << 63


@dataclass(slots=True)
class QuarantinedSpace:
    """Space that a writer or a remote reader may still touch: until a time, or until the client is gone.

    objects    of the owner, these alone; (): all of them
    """

    owner: str
    client: str
    until_ns: int = NEVER_NS
    objects: tuple[int, ...] = ()


class Space(Directory):
    """The directory, which allocates ranges, with figures per segment."""

    def free_bytes(self, number: int) -> int:
        """Return the free bytes of one segment. Raises UnknownObject."""
        return self._segment(number).allocator.free_bytes

    def totals(self) -> tuple[int, int]:
        """Return (capacity, free) bytes of all segments."""
        return self._order.total.capacity, self._order.total.free
