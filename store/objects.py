"""The data of the directory: pool objects and their states, hits, requests for space, and events.

Made by `store.directory`; read by the conductor. Explained in docs/explain/lifecycle.md.
The life of an object:

    put_start -> WRITING -> put_end -> VISIBLE   (keyed: in the index, evictable)
                    |          `-----> PRIVATE   (no key, its key was visible already, or it is not admitted:
                    |                             its owner's alone)
                    |              VISIBLE -> found bad, removed -> UNLISTED while leased, else gone
                    `--- revoke -----> QUARANTINED while a writer may still write, else gone

One key may be visible in several segments: copies, each an object of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, NamedTuple

import msgspec

from store.allocator import ALIGNMENT, Extent
from store.errors import LayoutError
from store.policies.contract import BlockFacts

Tier = Literal["dram", "ssd"]


NO_CLASS = 2**31
"""The class of a reader without a service class: lower than every class, so that no block counts for it."""


class ObjectState(Enum):
    """The state of an object in DRAM. Lookups find only VISIBLE objects.

    PRIVATE       of one request alone: a tail, which has no key, or a block that is not kept
    QUARANTINED   its owner is gone, and late bytes may still land in its range: no other object gets it yet
    UNLISTED      was visible, and is bad or removed; it is freed when its last lease ends
    """

    __hash__ = object.__hash__  # Enum's own is a Python function, and the accounts look states up per block

    WRITING = "being written"
    VISIBLE = "visible"
    PRIVATE = "private"
    QUARANTINED = "quarantined"
    UNLISTED = "unlisted"


PUBLISHED = (ObjectState.VISIBLE, ObjectState.UNLISTED)
"""States in which an object no longer belongs to its owner."""


class Hit(NamedTuple):
    """A block that lies in the SSD tier of `rank` and not in DRAM (hence object_id None and offset 0).

    A block in DRAM is found as its PoolObject, which has the same fields.
    """

    key: int
    tier: Tier
    object_id: None
    rank: int
    offset: int
    nbytes: int


class BlockRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name an object of the pool by its one range: `nbytes` at `offset` in the segment of `rank`.

    object_id   the directory's id of this object, unique in the life of a conductor
    check       `layout.check_of` its checksums, for a reader that has to compare; 0: it need not
    """

    object_id: int
    rank: int
    offset: int
    nbytes: int
    check: int = 0


class HeldBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A visible block in DRAM, as the store rank that keeps it knows it. Fields as in Wanted.

    sums   u64 per layer as bytes
    """

    ref: BlockRef
    key: int
    digest: int
    sums: bytes
    parent: int | None
    position: int
    class_id: int


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """One object to allocate. key None: private to its owner, never in the index.

    cost_s, class_id, parent, position   for eviction policies, see `store.policies.contract.BlockFacts`:
                                         parent is the key of the block before it in its prefix
    soft_until                           evicted only when nothing else is left, until this time
    hard_pin                             never evicted
    """

    nbytes: int
    key: int | None = None
    digest: int = 0
    cost_s: float = 0.0
    class_id: int = 0
    soft_until: float = 0.0
    hard_pin: bool = False
    parent: int | None = None
    position: int = 0


class BlockStored(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A block can now be read from this tier ("dram", "ssd") of this rank."""

    key: int
    rank: int
    tier: Tier


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A block is no longer in this tier of this rank."""

    key: int
    rank: int
    tier: Tier


@dataclass(slots=True)
class Pins:
    """The pins of an object. Few objects have any. See Wanted.

    is_pinned      VISIBLE and pinned hard (kept by the directory)
    """

    soft_until: float = 0.0
    hard_pin: bool = False
    is_pinned: bool = False


@dataclass(slots=True, eq=False)
class PoolObject:
    """One object: its range in a segment (or several: extents), its state, and the owners that lease it.

        object_id     unique in the life of the cluster
        owner         the request (or put, copy, check) that allocated it; frees it until it is visible
        offset        of its first byte in the segment of `rank`
        nbytes        size of all extents together
        scattered     its extents when there are several, else None
        copies        all objects of the same put that are WRITING or VISIBLE, itself among them, on as
                      many segments: one list that they share; None when there are no others
        pins          None when there are none
        class_id      the highest class that has used it, 0 the highest; for policies
    sums          u64 per layer as bytes, set by put_end: a quarter smaller than a list of numbers
        parent        key of the block before it in its prefix, and position: how many there are; for policies
        lessees       owners that hold a lease on it
        unsaved       waits to be written to the tier of its segment's saver: not evictable until then
        evictable     VISIBLE, not leased, not pinned hard, not unsaved (kept by the directory)

    Immutable once VISIBLE, except for its leases and pins, copies, class_id, unsaved, evictable, last_use_s,
    and the state UNLISTED. A pool holds millions of objects, so attributes that most do not need are one
    None. With twenty fields an object takes three lines of a cache, and a lookup of 250 blocks is 15 % faster
    than with twenty-one.
    """

    tier: ClassVar[Tier] = "dram"

    object_id: int
    owner: str
    rank: int
    offset: int
    nbytes: int
    key: int | None
    digest: int
    cost_s: float
    class_id: int
    parent: int | None = None
    position: int = 0
    scattered: tuple[Extent, ...] | None = None
    pins: Pins | None = None
    state: ObjectState = ObjectState.WRITING
    copies: list[PoolObject] | None = field(default=None, repr=False)
    sums: bytes = field(default=b"", repr=False)
    lessees: tuple[str, ...] = ()
    unsaved: bool = False
    evictable: bool = False
    last_use_s: float = 0.0

    @property
    def padded(self) -> int:
        """Return the bytes that its extents take in the segment, rounded up to the alignment."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def facts(self) -> BlockFacts:
        """Return what eviction policies may know of it. Made on demand, because a pool holds millions."""
        return BlockFacts(self.nbytes, self.cost_s, self.class_id, self.parent, self.position)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Return its ranges in the segment, in the order of its bytes. A KV block has one."""
        return self.scattered or ((self.offset, self.nbytes),)

    @property
    def checksums(self) -> array:
        """Return the u64 of each layer, as put_end was given them."""
        return array("Q", self.sums)

    @property
    def ref(self) -> BlockRef:
        """Return the name of this object in messages and effects. It must have one extent, as KV blocks
        do."""
        assert self.scattered is None, f"object {self.object_id} has {len(self.extents)} extents"
        return BlockRef(self.object_id, self.rank, self.offset, self.nbytes)

    def held(self) -> bool:
        """Tell whether it is leased, or its tier still has to read it."""
        return bool(self.lessees or self.unsaved)

    def hard_pinned(self) -> bool:
        """Tell whether it is never evicted."""
        return self.pins is not None and self.pins.hard_pin

    def soft_pinned(self, now: float) -> bool:
        """Tell whether it is evicted only when nothing else is left."""
        return self.pins is not None and self.pins.soft_until > now


Found = PoolObject | Hit
"""A block as a lookup finds it: in DRAM, or in a tier alone. Both tell key, tier, object_id, rank, nbytes."""


def pieces(extents: Sequence[Extent], start: int, nbytes: int) -> list[Extent]:
    """Return the ranges of a segment that hold bytes start .. start+nbytes-1 of an object, in their order.

    Readers and writers of objects with several extents need it. Raises LayoutError when the object is
    shorter.
    """
    found: list[Extent] = []
    begin, end = 0, start + nbytes
    for offset, length in extents:
        low, high = max(start, begin), min(end, begin + length)
        if low < high:
            found.append((offset + low - begin, high - low))
        begin += length
    if not 0 <= start <= end <= begin:
        raise LayoutError(f"bytes {start} .. {end} of an object of {begin} B")
    return found
