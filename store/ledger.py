"""The books behind the directory: objects, owners, leases, segments, and the steps that keep them exact.

Used through `store.directory` alone, which adds the verbs. Pure, like it; explained there. Every step
here leaves the invariant of `check()` true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop
from itertools import pairwise

from store.allocator import padded_size
from store.errors import LayoutError, UnknownObject
from store.layout import BlockLayout
from store.objects import BlockRemoved, BlockStored, Hit, ObjectState, PoolObject, Wanted
from store.policies import BlockFacts, PolicyFactory
from store.policies.lru import LRU
from store.segment import Segment, pool_full
from store.tier_index import TierIndex

Event = BlockStored | BlockRemoved

COUNTERS = (
    "lookups",
    "blocks_looked_up",
    "hits_dram",
    "hits_ssd",
    "digest_mismatches",
    "puts",
    "puts_ended",
    "puts_revoked",
    "puts_duplicate",
    "puts_not_admitted",
    "pool_full",
    "evictions",
    "evicted_bytes",
    "leases_expired",
    "saves",
    "saves_skipped",
    "saves_dropped",
    "tier_evictions",
    "tier_bad_blocks",
)


@dataclass(slots=True)
class Owner:
    """What one owner has: the leases it holds (all end at `until`) and the objects it has not published."""

    leased: set[int] = field(default_factory=set)
    until: float = 0.0
    objects: set[int] = field(default_factory=set)


class Ledger:
    """The books of one pool.

    _segments  rank -> Segment
    _objects   object_id -> PoolObject, all there are
    _visible   key -> the one VISIBLE object of that key
    _tier      keys on SSD, and on their way there
    _owners    owner -> leases and unpublished objects; absent when it has neither
    _expiries  heap of (until, owner), possibly outdated
    _saves     VISIBLE objects that nobody has been told to save yet
    """

    def __init__(self, layout: BlockLayout, *, policy: PolicyFactory = LRU, max_unsaved_share: float = 0.5):
        """policy: makes one for each segment, from its capacity in blocks; its items are the blocks' keys.

        max_unsaved_share: at most this share of a segment waits for its tier (such blocks cannot be
        evicted); what becomes visible beyond it is not saved, and counted."""
        self.layout = layout
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._policy = policy
        self._max_unsaved_share = max_unsaved_share
        self._segments: dict[int, Segment] = {}
        self._objects: dict[int, PoolObject] = {}
        self._visible: dict[int, PoolObject] = {}
        self._tier = TierIndex(layout.nbytes)
        self._owners: dict[str, Owner] = {}
        self._expiries: list[tuple[float, str]] = []
        self._events: list[Event] = []
        self._saves: list[PoolObject] = []
        self._next_id = 1

    def object(self, object_id: int) -> PoolObject:
        """The object of this id. Raises UnknownObject."""
        try:
            return self._objects[object_id]
        except KeyError:
            raise UnknownObject("object", object_id) from None

    def expire(self, now: float) -> int:
        """End the leases whose time is over; returns how many owners lost theirs."""
        expired = 0
        while self._expiries and self._expiries[0][0] <= now:
            _, owner = heappop(self._expiries)
            record = self._owners.get(owner)
            if record is not None and record.until <= now:
                expired += bool(record.leased)
                self._drop_leases(owner)
        self.counters["leases_expired"] += expired
        return expired

    # -------------------------------------------------------------------------------- rooms

    def _segment(self, rank: int) -> Segment:
        try:
            return self._segments[rank]
        except KeyError:
            raise UnknownObject("segment of rank", rank) from None

    def _check_wanted(self, item: Wanted) -> None:
        if item.nbytes < 1:
            raise LayoutError(f"an object of {item.nbytes} B")
        if item.key is not None and item.nbytes != self.layout.nbytes:
            raise LayoutError(f"a keyed object of {item.nbytes} B; a block has {self.layout.nbytes} B")

    def _check_room(self, wanted: Sequence[Wanted], segments: list[Segment], now: float) -> None:
        """Raise PoolFull, before anything is evicted, when the sizes alone rule it out."""
        needed = sum(padded_size(item.nbytes) for item in wanted)
        if sum(segment.reachable_bytes for segment in segments) >= needed:
            return
        self.expire(now)
        if sum(segment.reachable_bytes for segment in segments) < needed:
            self.counters["pool_full"] += 1
            raise pool_full(needed, segments)

    def _put_start(
        self, owner: str, item: Wanted, segments: list[Segment], node: int | None, now: float
    ) -> PoolObject:
        """One object, WRITING, in the segment with most room or else the coldest block."""
        segment, offset = self._place(item.nbytes, segments, node, now)
        object_id, self._next_id = self._next_id, self._next_id + 1
        obj = PoolObject(
            object_id,
            owner,
            segment.rank,
            offset,
            item.nbytes,
            item.key,
            item.digest,
            BlockFacts(item.nbytes, item.cost_s, item.class_id, item.parent, item.position),
        )
        self._objects[object_id] = obj
        record = self._owners.get(owner)
        if record is None:
            record = self._owners[owner] = Owner()
        record.objects.add(object_id)
        return obj

    def _place(
        self, nbytes: int, segments: list[Segment], node: int | None, now: float
    ) -> tuple[Segment, int]:
        if len(segments) > 1:
            segments = sorted(segments, key=lambda s: (s.node != node, -s.allocator.free_bytes))
        for segment in segments:
            offset = segment.place(nbytes)
            if offset is not None:
                return segment, offset
        self.expire(now)
        if len(segments) > 1:
            segments = sorted(segments, key=lambda s: self._coldest_use(s, now))
        for segment in segments:
            offset = self._evict_for(segment, nbytes, now)
            if offset is not None:
                return segment, offset
        raise pool_full(segments[0].allocator.padded(nbytes) if segments else nbytes, segments)

    def _coldest_use(self, segment: Segment, now: float) -> float:
        """When the block that this segment would evict first was last used."""
        obj = self._victim(segment, now)
        return float("inf") if obj is None else obj.last_use_s

    def _victim(self, segment: Segment, now: float) -> PoolObject | None:
        """The first block in the policy's order that may go now."""
        for key in segment.policy.victims(now):
            if self._visible[key].evictable:
                return self._visible[key]
        return None

    def _evict_for(self, segment: Segment, nbytes: int, now: float) -> int | None:
        """Evict in the policy's order until a range of nbytes is free; its offset, None when it never is."""
        padded = segment.allocator.padded(nbytes)
        while segment.evictable_bytes and segment.reachable_bytes >= padded:
            obj = self._victim(segment, now)
            if obj is None:  # the policy holds back what may go
                return None
            self.counters["evictions"] += 1
            self.counters["evicted_bytes"] += obj.nbytes
            self._remove(obj, evicted=True)
            if segment.allocator.free_bytes < padded:
                continue
            offset = segment.place(nbytes)
            if offset is not None:
                return offset
        return None

    # ------------------------------------------------------------------------------ objects

    def _publish(self, obj: PoolObject, key: int, now: float) -> None:
        """WRITING -> VISIBLE, and into the line for the tier where there is one that lacks it."""
        segment = self._segments[obj.rank]
        self._disown(obj)
        obj.hit = Hit(key, "dram", obj.object_id, obj.rank, obj.offset, obj.nbytes)
        self._visible[key] = obj
        segment.policy.on_insert(key, obj.facts, now)
        segment.set_state(obj, ObjectState.VISIBLE)
        self._events.append(BlockStored(key, obj.rank, "dram"))
        if not segment.has_tier or self._tier.holds(obj.rank, key):
            return
        if segment.unsaved_bytes + obj.nbytes > self._max_unsaved_share * segment.allocator.capacity:
            self.counters["saves_skipped"] += 1
            return
        segment.set_unsaved(obj, True)
        self._tier.start_save(obj.rank, key, obj.digest)
        self._saves.append(obj)

    def _remove(self, obj: PoolObject, *, evicted: bool = False) -> None:
        """The object is no more: out of every book, its range free. evicted: it was the policy's victim."""
        segment = self._segments[obj.rank]
        for owner in list(obj.lessees or ()):
            self._unlease(owner, obj)
        if obj.state is ObjectState.VISIBLE:
            assert obj.key is not None
            del self._visible[obj.key]
            segment.policy.on_remove(obj.key, evicted=evicted)
            self._events.append(BlockRemoved(obj.key, obj.rank, "dram"))
        else:
            self._disown(obj)
        segment.clear(obj)
        del self._objects[obj.object_id]

    def _revoke(self, obj: PoolObject, writer_may_live: bool) -> None:
        self.counters["puts_revoked"] += 1
        if obj.state is ObjectState.WRITING and writer_may_live:
            self._segments[obj.rank].set_state(obj, ObjectState.QUARANTINED)
        else:
            self._remove(obj)

    def _free_objects(self, owner: str, state: ObjectState) -> int:
        """Free the owner's unpublished objects in this state; returns how many."""
        record = self._owners.get(owner)
        objects = [self._objects[object_id] for object_id in record.objects] if record else []
        freed = [obj for obj in objects if obj.state is state]
        for obj in freed:
            self._remove(obj)
        return len(freed)

    # ---------------------------------------------------------------------- owners and leases

    def _disown(self, obj: PoolObject) -> None:
        self._owners[obj.owner].objects.remove(obj.object_id)
        self._forget_empty(obj.owner)

    def _unlease(self, owner: str, obj: PoolObject) -> None:
        assert obj.lessees is not None
        obj.lessees.remove(owner)
        self._owners[owner].leased.remove(obj.object_id)
        self._segments[obj.rank].note_evictable(obj)
        self._forget_empty(owner)

    def _drop_leases(self, owner: str) -> None:
        record = self._owners.get(owner)
        for object_id in list(record.leased) if record else ():
            self._unlease(owner, self._objects[object_id])
        if record is not None:
            record.until = 0.0

    def _forget_empty(self, owner: str) -> None:
        record = self._owners[owner]
        if not record.leased and not record.objects:
            del self._owners[owner]

    # --------------------------------------------------------------------------- inspection

    def stats(self) -> dict[str, int]:
        """All counters, and these gauges: objects, owners, keys_dram, keys_ssd, saving (blocks on their
        way to a tier), and bytes: capacity, free, evictable, unsaved, and by state."""
        segments = self._segments.values()
        gauges = {
            "objects": len(self._objects),
            "owners": len(self._owners),
            "keys_dram": len(self._visible),
            "keys_ssd": len(self._tier),
            "saving": self._tier.saving,
            "capacity_bytes": sum(segment.allocator.capacity for segment in segments),
            "free_bytes": sum(segment.allocator.free_bytes for segment in segments),
            "evictable_bytes": sum(segment.evictable_bytes for segment in segments),
            "unsaved_bytes": sum(segment.unsaved_bytes for segment in segments),
        }
        for state in ObjectState:
            gauges[f"{state.name.lower()}_bytes"] = sum(segment.state_bytes[state] for segment in segments)
        return self.counters | gauges

    def places(self) -> set[tuple[int, int, str]]:
        """Every (key, rank, tier) that can be read, for comparison with the scheduler's index."""
        dram = {(key, obj.rank, "dram") for key, obj in self._visible.items()}
        return dram | self._tier.places()

    def check(self) -> None:
        """Assert every invariant (tests): ranges disjoint, accounts exact, indexes equal to the objects."""
        self._tier.check()
        for rank in self._segments:
            self._check_segment(rank)
        visible = {o.key: o for o in self._objects.values() if o.state is ObjectState.VISIBLE}
        assert visible == self._visible
        unpublished = {i for i, o in self._objects.items() if o.state is not ObjectState.VISIBLE}
        assert unpublished == {i for record in self._owners.values() for i in record.objects}
        for name, record in self._owners.items():
            assert record.leased or record.objects, f"owner {name} has nothing"
            assert not record.leased or any(name == owner for _, owner in self._expiries)
            assert all(self._objects[i].owner == name for i in record.objects)
        leases = {(name, i) for name, record in self._owners.items() for i in record.leased}
        assert leases == {(name, i) for i, o in self._objects.items() for name in o.lessees or ()}
        assert all(obj.unsaved and self._objects[obj.object_id] is obj for obj in self._saves)

    def _check_segment(self, rank: int) -> None:
        segment = self._segments[rank]
        segment.allocator.check()
        padded = segment.allocator.padded
        objects = [obj for obj in self._objects.values() if obj.rank == rank]
        ranges = sorted((obj.offset, obj.offset + padded(obj.nbytes)) for obj in objects)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges)), "objects overlap"
        assert segment.allocator.used_bytes == sum(end - start for start, end in ranges)
        for state in ObjectState:
            assert segment.state_bytes[state] == sum(padded(o.nbytes) for o in objects if o.state is state)
        assert segment.evictable_bytes == sum(padded(o.nbytes) for o in objects if o.evictable)
        assert segment.unsaved_bytes == sum(padded(o.nbytes) for o in objects if o.unsaved)
        segment.policy.check()
        known = list(segment.policy)
        assert set(known) == {o.key for o in objects if o.state is ObjectState.VISIBLE}
        assert len(segment.policy) == len(known)
        for obj in objects:
            visible = obj.state is ObjectState.VISIBLE
            assert obj.evictable == (visible and not obj.lessees and not obj.unsaved)
            assert visible or not obj.unsaved
