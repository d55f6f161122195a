"""One rank's DRAM segment as the directory sees it: ranges, the order of eviction, the accounts.

Used by `store.directory` alone. Pure: no bytes, no clock. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

from collections import OrderedDict

from store.allocator import Extent, RangeAllocator
from store.errors import PoolFull
from store.objects import ObjectState, PoolObject
from store.policies import Policy


class Segment:
    """Accounts of one segment, in bytes as allocated (padded).

    Invariant: evictable_bytes is the sum over objects with `evictable` set; unsaved_bytes over those
    with `unsaved`; state_bytes[s] over those in state s; the allocator's used bytes over all.
    saver: the rank whose tier takes what becomes visible here, None for none.
    copies: VISIBLE objects here whose key is VISIBLE on another segment too, by id, longest unused first.
    """

    def __init__(self, rank: int, nbytes: int, node: int, policy: Policy):
        self.rank = rank
        self.node = node
        self.allocator = RangeAllocator(nbytes)
        self.policy = policy
        self.copies: OrderedDict[int, PoolObject] = OrderedDict()
        self.saver: int | None = None
        self.evictable_bytes = 0
        self.unsaved_bytes = 0
        self.state_bytes = dict.fromkeys(ObjectState, 0)

    @property
    def reachable_bytes(self) -> int:
        """Free or evictable: an upper bound of what can be allocated now."""
        return self.allocator.free_bytes + self.evictable_bytes

    def place(self, nbytes: int, contiguous: bool) -> tuple[Extent, ...] | None:
        """Allocate for an object that is WRITING; None when there is no room for it.

        contiguous: in one range or not at all.
        """
        extents: tuple[Extent, ...] | None
        if contiguous:
            offset = self.allocator.allocate(nbytes)
            extents = None if offset is None else ((offset, nbytes),)
        else:
            extents = self.allocator.allocate_extents(nbytes)
        if extents is not None:
            self.state_bytes[ObjectState.WRITING] += self.allocator.padded(nbytes)
        return extents

    def clear(self, obj: PoolObject) -> None:
        """Free an object's extents. It must be out of the policy's order."""
        if obj.unsaved:
            self.set_unsaved(obj, False)
        if obj.evictable:
            self.evictable_bytes -= self.allocator.padded(obj.nbytes)
            obj.evictable = False
        for offset, _ in obj.extents:
            self.state_bytes[obj.state] -= self.allocator.free(offset)

    def set_state(self, obj: PoolObject, state: ObjectState) -> None:
        """Change an object's state, and the bytes counted by state with it."""
        padded = self.allocator.padded(obj.nbytes)
        self.state_bytes[obj.state] -= padded
        self.state_bytes[state] += padded
        obj.state = state
        self.note_evictable(obj)

    def set_unsaved(self, obj: PoolObject, unsaved: bool) -> None:
        """Whether the tier still has to write an object: until then it may not be evicted."""
        padded = self.allocator.padded(obj.nbytes)
        self.unsaved_bytes += padded * (unsaved - obj.unsaved)
        obj.unsaved = unsaved
        self.note_evictable(obj)

    def note_evictable(self, obj: PoolObject) -> None:
        """Call after any change of an object's state, leases, pins or unsaved."""
        evictable = obj.state is ObjectState.VISIBLE and not obj.held() and not obj.hard_pinned()
        if evictable is not obj.evictable:
            self.evictable_bytes += self.allocator.padded(obj.nbytes) * (1 if evictable else -1)
            obj.evictable = evictable


def pool_full(needed_bytes: int, segments: list[Segment]) -> PoolFull:
    """The error that says what holds these segments."""

    def bytes_in(*states: ObjectState) -> int:
        return sum(segment.state_bytes[state] for segment in segments for state in states)

    evictable = sum(segment.evictable_bytes for segment in segments)
    unsaved = sum(segment.unsaved_bytes for segment in segments)
    kept = bytes_in(ObjectState.VISIBLE) - evictable - unsaved  # visible, saved, and still not evictable
    return PoolFull(
        needed_bytes=needed_bytes,
        capacity_bytes=sum(segment.allocator.capacity for segment in segments),
        free_bytes=sum(segment.allocator.free_bytes for segment in segments),
        evictable_bytes=evictable,
        leased_bytes=kept + bytes_in(ObjectState.PRIVATE, ObjectState.UNLISTED),
        writing_bytes=bytes_in(ObjectState.WRITING, ObjectState.QUARANTINED),
        unsaved_bytes=unsaved,
    )
