"""The books behind the directory: objects, owners, leases, segments, and the steps that keep them exact.

Used through `store.directory` alone, which adds the verbs; `store.books.allocation` finds space. Pure, like
them; explained in docs/explain/lifecycle.md. Every step here leaves the invariant of `check()` true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from store.books.leases import Leases
from store.books.quarantine import QUARANTINE_S, Quarantine
from store.books.segment import Segment
from store.books.segment_order import Coldest, SegmentOrder
from store.books.tier_index import TierIndex
from store.errors import UnknownObject
from store.layout import BlockLayout
from store.objects import NO_CLASS, BlockRemoved, BlockStored, Found, ObjectState, PoolObject
from store.policies import PolicyFactory
from store.policies.contract import BlockFacts
from store.policies.lru import LRU

Event = BlockStored | BlockRemoved

COUNTERS = (
    *("lookups", "blocks_looked_up", "hits_dram", "hits_ssd", "digest_mismatches"),
    *("puts", "puts_ended", "puts_revoked", "puts_duplicate", "copies_stored", "copies_bad"),
    *("removals", "tier_removals", "puts_not_admitted"),
    *("pool_full", "evictions", "evicted_bytes", "copies_evicted", "leases_expired", "quarantines_expired"),
    *("saves", "saves_skipped", "saves_dropped", "tier_evictions", "tier_bad_blocks", "dram_bad_blocks"),
)


def visible_copies(obj: PoolObject) -> list[PoolObject]:
    """Return the visible ones among a visible object and its copies."""
    return [copy for copy in obj.copies if copy.state is ObjectState.VISIBLE] if obj.copies else [obj]


class Ledger:
    """The books of one pool. Of copies a reader gets the nearest: `rack_of` a node is its rack.

    has_racks  blocks stay in the rack of their writer, and each rack may compute a copy of its own
    _segments  rank -> Segment
    _objects   object_id -> PoolObject, all there are
    _visible   key -> the VISIBLE object of that key, the one published first when there are copies
    _tier      keys on SSD, and on their way there
    _leases    owners: what they lease, and what they have not published
    _late      QUARANTINED objects, and when their quarantine ends
    _order     the segments in the order in which new objects are put there
    _saves     VISIBLE objects that no tier has been told to save yet
    _unsure    ids of objects that may have been overwritten; until _unsure_until all may be"""

    def __init__(
        self,
        layout: BlockLayout | None,
        *,
        policy: PolicyFactory = LRU,
        max_unsaved_share: float = 0.5,
        copy_cold_s: float = 60.0,
        quarantine_s: float = QUARANTINE_S,
    ):
        """Open empty books.

        layout              of the blocks; None: objects of any size, with any number of checksums, no tiers
        policy              makes one for each segment, from its capacity in blocks; its items are the keys
        max_unsaved_share   at most this share of a segment waits for its tier (such blocks cannot be
                            evicted); what becomes visible beyond it is not saved, and counted
        copy_cold_s         a copy that was not used for so long is evicted before all other objects
        quarantine_s        how long late bytes may land after a transfer has failed
        """
        self.layout = layout
        self.rack_of: Callable[[int], int] = int
        self.has_racks = False
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._policy = policy
        self._max_unsaved_share = max_unsaved_share
        self._copy_cold_s = copy_cold_s
        self._segments: dict[int, Segment] = {}
        self._objects: dict[int, PoolObject] = {}
        self._visible: dict[int, PoolObject] = {}
        self._block_nbytes = layout.nbytes if layout else 0
        self._tier = TierIndex(self._block_nbytes)
        self._leases = Leases(self._segments)
        self._late = Quarantine(quarantine_s)
        self._order = SegmentOrder(self._coldest)
        self._events: list[Event] = []
        self._saves: list[PoolObject] = []
        self._unsure: set[int] = set()
        self._unsure_until = 0.0
        self._next_id = 1

    def object(self, object_id: int) -> PoolObject:
        """Return the object of this id. Raises UnknownObject."""
        try:
            return self._objects[object_id]
        except KeyError:
            raise UnknownObject("object", object_id) from None

    def expire(self, now: float) -> int:
        """End the leases and quarantines whose time is over; return how many ended, of both kinds."""
        if now < self.next_deadline():
            return 0
        owners = self._leases.ended(now)
        for owner in owners:
            self._end_leases(owner)
        late = self._late.ended(now)
        self._free(late)
        self.counters["leases_expired"] += len(owners)
        self.counters["quarantines_expired"] += len(late)
        return len(owners) + len(late)

    def next_deadline(self) -> float:
        """Return when `expire` may next change something, or an earlier time; inf when only events can."""
        return min(self._leases.next_deadline(), self._late.next_deadline())

    # ------------------------------------------------------------------------------ objects

    def _segment(self, rank: int) -> Segment:
        try:
            return self._segments[rank]
        except KeyError:
            raise UnknownObject("segment of rank", rank) from None

    def _publish(self, obj: PoolObject, key: int, facts: BlockFacts, now: float) -> None:
        """Make a WRITING object VISIBLE under its key, and hand it to its tier if that has to save it.

        It no longer belongs to its owner, lookups find it, the policy of its segment may evict it, and one
        BlockStored of tier "dram" tells so.
        If its key is visible already, it is a copy: lookups go on finding the object that was published
        first, the copy joins the others (`_join_copies`), and it is never saved.
        Any other object is saved if its segment has a saver (perhaps another rank) and no tier knows the key.
        It is then unsaved, which keeps it in DRAM; its save is started for the saver, in the tier index,
        and it is put at the end of _saves. But at most _max_unsaved_share of the segment's capacity may be
        unsaved. Its nbytes (not its padded size) are added to what is unsaved already. An object beyond the
        share is not saved, and is counted in "saves_skipped".
        The order of these changes is free: an object may be unsaved before it is VISIBLE, or after. But
        whether it is a copy is decided before _visible changes, and _join_copies needs its new state.
        """
        # labs:begin 3b
        segment = self._segments[obj.rank]
        self._leases.disown(obj)
        is_copy = key in self._visible
        if not is_copy:
            self._visible[key] = obj
        segment.policy.on_insert(key, facts, now)
        segment.set_state(obj, ObjectState.VISIBLE)
        self._events.append(BlockStored(key, obj.rank, "dram"))
        if is_copy:
            self._join_copies(obj, now)
            return
        if segment.saver is None or self._tier.knows(key):
            return
        if segment.accounts.unsaved + obj.nbytes > self._max_unsaved_share * segment.accounts.capacity:
            self.counters["saves_skipped"] += 1
            return
        segment.set_unsaved(obj, True)
        self._tier.start_save(segment.saver, key, obj.digest)
        self._saves.append(obj)
        # labs:end 3b

    def _remove(self, obj: PoolObject, *, evicted: bool = False) -> None:
        """Remove an object from every book and free its extents. evicted: it was the policy's victim."""
        if obj.lessees:
            self._leases.forget(obj)
        if obj.state is ObjectState.VISIBLE:
            self._hide(obj, evicted=evicted)
        elif obj.state is not ObjectState.UNLISTED:
            self._leases.disown(obj)
            self._leave_copies(obj)
        if obj.state is ObjectState.QUARANTINED:
            self._late.remove(obj.object_id)
        self._segments[obj.rank].clear(obj)
        self._unsure.discard(obj.object_id)
        del self._objects[obj.object_id]

    def _hide(self, obj: PoolObject, *, evicted: bool = False) -> None:
        """Hide a VISIBLE object from lookups and from eviction. The caller then changes its state."""
        assert obj.key is not None
        if self._visible[obj.key] is obj:
            others = [copy for copy in visible_copies(obj) if copy is not obj]
            if others:
                self._visible[obj.key] = others[0]
            else:
                del self._visible[obj.key]
        self._leave_copies(obj)
        self._segments[obj.rank].policy.on_remove(obj.key, evicted=evicted)
        self._events.append(BlockRemoved(obj.key, obj.rank, "dram"))

    def _forget_saves(self, gone: Segment) -> None:
        """Forget saves that no tier was told of: from a removed segment, and of objects not `unsaved` now."""
        for obj in self._saves:  # so no report about them will come
            if obj.rank == gone.rank and gone.saver is not None and obj.key is not None:
                self._tier.end_save(gone.saver, [obj.key], durable=False)
        self._saves = [obj for obj in self._saves if obj.unsaved]

    def _retire(self, obj: PoolObject) -> None:
        """Hide a VISIBLE object, and free it when its last lease ends; at once without a lease."""
        if not obj.lessees:
            self._remove(obj)
            return
        self._hide(obj)
        self._segments[obj.rank].set_unsaved(obj, False)
        self._segments[obj.rank].set_state(obj, ObjectState.UNLISTED)

    def _revoke(self, obj: PoolObject, now: float, writer_may_live: bool, writer: int | None) -> None:
        self.counters["puts_revoked"] += 1
        if obj.state is ObjectState.WRITING and writer_may_live:
            self._leave_copies(obj)
            self._segments[obj.rank].set_state(obj, ObjectState.QUARANTINED)
            self._late.add(obj.object_id, now, writer)
        else:
            self._remove(obj)

    def _free_objects(self, owner: str, state: ObjectState) -> int:
        """Free the owner's unpublished objects in this state; return how many."""
        freed = [obj for obj in self._leases.objects_of(owner) if obj.state is state]
        for obj in freed:
            self._remove(obj)
        return len(freed)

    def _free(self, object_ids: Sequence[int]) -> None:
        """Free these objects."""
        for object_id in object_ids:
            self._remove(self._objects[object_id])

    def _end_leases(self, owner: str) -> None:
        """End an owner's leases, and free the unlisted objects that no other owner leases."""
        for obj in self._leases.end(owner):
            if obj.state is ObjectState.UNLISTED:
                self._remove(obj)

    def _touch(self, found: Sequence[Found], now: float, class_id: int = NO_CLASS) -> None:
        """Note that this class has used what a lookup found, the last block first."""
        used: dict[int, list[int]] = {}
        for obj in reversed(found):
            if isinstance(obj, PoolObject) and obj.key is not None:
                obj.last_use_s = now
                if class_id < obj.class_id:
                    self._segments[obj.rank].count_for(obj, class_id, now)
                if obj.rank in used:
                    used[obj.rank].append(obj.key)
                else:
                    used[obj.rank] = [obj.key]
                if obj.copies is not None and obj.object_id in self._segments[obj.rank].copies:
                    self._segments[obj.rank].copies.move_to_end(obj.object_id)
        for rank, keys in used.items():
            self._segments[rank].policy.on_access_all(keys, now)
            self._segments[rank].note_change()

    def _count_lookup(self, asked: int, from_dram: int, from_tier: int) -> None:
        self.counters["lookups"] += 1
        self.counters["blocks_looked_up"] += asked
        self.counters["hits_dram"] += from_dram
        self.counters["hits_ssd"] += from_tier

    # -------------------------------------------------------------------------------- copies

    def _join_copies(self, obj: PoolObject, now: float) -> None:
        """Count a copy that became visible. It counts as a use of objects that had no visible copy before."""
        self.counters["copies_stored"] += 1
        for copy in visible_copies(obj):
            copies = self._segments[copy.rank].copies
            if copy.object_id not in copies:
                copies[copy.object_id] = copy
                copy.last_use_s = now
                self._segments[copy.rank].note_change()

    def _leave_copies(self, obj: PoolObject) -> None:
        """Take an object out of its family of copies."""
        family, obj.copies = obj.copies, None
        if family is None:
            return
        family.remove(obj)
        self._segments[obj.rank].copies.pop(obj.object_id, None)
        visible = visible_copies(family[0])
        if len(visible) == 1:
            self._segments[visible[0].rank].copies.pop(visible[0].object_id, None)
            self._segments[visible[0].rank].note_change()
        if len(family) == 1:
            family[0].copies = None

    def _nearest(self, obj: PoolObject, rank: int | None, node: int | None) -> PoolObject:
        """Return the copy on this rank, or else on this node, in its rack, or the one published first."""
        rack = None if node is None else self.rack_of(node)

        def distance(copy: PoolObject) -> tuple[bool, bool, bool]:
            at = self._segments[copy.rank].node
            return copy.rank != rank, at != node, self.rack_of(at) != rack

        return min(visible_copies(obj), key=distance)

    # ------------------------------------------------------------------------------ eviction

    def _victims(self, segment: Segment, now: float, class_id: int | None = None) -> Iterator[PoolObject]:
        """Yield objects to evict for a class or any: cold copies, the policy's order, soft-pinned last."""
        policy, cold = segment.policy, set()
        own_only = class_id is not None and policy.spared(class_id) > 0
        for object_id, obj in segment.copies.items():
            if now - obj.last_use_s < self._copy_cold_s:
                break
            if obj.evictable and not obj.soft_pinned(now) and not (own_only and obj.class_id != class_id):
                cold.add(object_id)
                yield obj
        pinned = []
        for key in policy.victims(now) if class_id is None else policy.victims_for(class_id, now):
            obj = self._copy_in(segment, key)
            if obj.evictable and obj.object_id not in cold:
                if obj.soft_pinned(now):
                    pinned.append(obj)
                else:
                    yield obj
        yield from pinned

    def _copy_in(self, segment: Segment, key: int) -> PoolObject:
        """Return the visible object of this key in this segment."""
        obj = self._visible[key]
        if obj.rank == segment.rank:
            return obj
        return next(copy for copy in visible_copies(obj) if copy.rank == segment.rank)

    def _coldest(self, segment: Segment, now: float) -> Coldest | None:
        """Return the object that this segment would evict first; None when it may evict nothing."""
        for obj in self._victims(segment, now):
            until = segment.first_victim_until(now, self._copy_cold_s)
            is_held, last_use_s = segment.policy.coldness(obj.key or 0, obj.last_use_s)
            return Coldest(is_held or obj.soft_pinned(now), last_use_s, until)
        return None

    # --------------------------------------------------------------------------- inspection

    def stats(self) -> dict[str, int]:
        """Return all counters, and these gauges: objects, owners, keys_dram, keys_ssd, copies_dram
        (objects whose key is visible elsewhere too), saving (blocks on their way to a tier), and bytes:
        capacity, free, evictable, unsaved, and by state."""
        total = self._order.total
        gauges = {
            "objects": len(self._objects),
            "owners": len(self._leases.owners),
            "keys_dram": len(self._visible),
            "copies_dram": sum(len(segment.copies) for segment in self._segments.values()),
            "keys_ssd": len(self._tier),
            "saving": self._tier.saving,
            "capacity_bytes": total.capacity,
            "free_bytes": total.free,
            "evictable_bytes": total.evictable,
            "unsaved_bytes": total.unsaved,
        }
        for state in ObjectState:
            gauges[f"{state.name.lower()}_bytes"] = total.states[state]
        return self.counters | gauges

    def segments(self) -> list[tuple[int, int, int, int]]:
        """Return (rank, bytes, free bytes, visible blocks) of each segment, in the order of joining."""
        found = self._segments.values()
        return [(s.rank, s.allocator.capacity, s.allocator.free_bytes, len(s.policy)) for s in found]

    def visible_objects(self) -> list[PoolObject]:
        """Return all objects that lookups can find in DRAM, copies too, in the order of put_start."""
        return [obj for obj in self._objects.values() if obj.state is ObjectState.VISIBLE]

    def find(self, key: int) -> PoolObject | None:
        """Return the visible object of this key with any digest; None for a miss."""
        return self._visible.get(key)

    def active_owners(self) -> list[str]:
        """Return the owners with a lease, or with an object neither published nor in quarantine."""
        return [
            name
            for name, record in self._leases.owners.items()
            if record.leased or any(i not in self._late for i in record.objects)
        ]

    def is_visible(self, obj: PoolObject) -> bool:
        """Tell whether lookups can still find this very object."""
        return self._objects.get(obj.object_id) is obj and obj.state is ObjectState.VISIBLE

    def places(self) -> set[tuple[int, int, str]]:
        """Return every (key, rank, tier) that can be read, for comparison with the scheduler's index."""
        copies = ((key, obj) for key, first in self._visible.items() for obj in visible_copies(first))
        dram = {(key, obj.rank, "dram") for key, obj in copies}
        return dram | self._tier.places()

    def check(self) -> None:
        """Assert every invariant (tests): ranges disjoint, accounts exact, indexes equal to the objects."""
        self._tier.check()
        for rank in self._segments:
            self._check_segment(rank)
        self._check_copies()
        self._order.check()
        self._leases.check(self._objects)
        self._late.check()
        quarantined = {i for i, o in self._objects.items() if o.state is ObjectState.QUARANTINED}
        assert len(quarantined) == len(self._late)
        assert all(object_id in self._late for object_id in quarantined)
        assert all(obj.unsaved and self._objects[obj.object_id] is obj for obj in self._saves)

    def _check_copies(self) -> None:
        """Assert that a visible key has one object, or copies that are each on a segment of their own."""
        visible = [obj for obj in self._objects.values() if obj.state is ObjectState.VISIBLE]
        assert {obj.key for obj in visible} == self._visible.keys()
        copied: set[int] = set()
        for obj in visible:
            assert obj.key is not None
            family = visible_copies(self._visible[obj.key])
            assert obj in family, f"two objects of key {obj.key:x} that are no copies"
            assert all((o.digest, o.nbytes, o.sums) == (obj.digest, obj.nbytes, obj.sums) for o in family)
            copied.update(o.object_id for o in family if len(family) > 1)
        assert copied == {i for segment in self._segments.values() for i in segment.copies}
        for obj in self._objects.values():
            if obj.copies is not None:
                assert len(obj.copies) > 1
                assert obj in obj.copies
                assert len({copy.rank for copy in obj.copies}) == len(obj.copies), "two copies on a segment"
                assert all(copy.copies is obj.copies and copy.key == obj.key for copy in obj.copies)
                assert obj.state in (ObjectState.WRITING, ObjectState.VISIBLE)

    def _check_segment(self, rank: int) -> None:
        segment = self._segments[rank]
        segment.allocator.check()
        padded = segment.allocator.padded
        objects = [obj for obj in self._objects.values() if obj.rank == rank]
        ranges = sorted((start, start + padded(size)) for obj in objects for start, size in obj.extents)
        assert all(sum(size for _, size in obj.extents) == obj.nbytes for obj in objects)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges)), "objects overlap"
        accounts, used = segment.accounts, sum(end - start for start, end in ranges)
        assert segment.allocator.used_bytes == used == accounts.capacity - accounts.free
        assert all(obj.padded == padded(obj.nbytes) for obj in objects)
        for state in ObjectState:
            assert accounts.states[state] == sum(o.padded for o in objects if o.state is state)
        assert accounts.evictable == sum(o.padded for o in objects if o.evictable)
        assert accounts.unsaved == sum(o.padded for o in objects if o.unsaved)
        pinned = [o for o in objects if o.hard_pinned() and o.state is ObjectState.VISIBLE]
        assert accounts.pinned == sum(o.padded for o in pinned)
        uses = [obj.last_use_s for obj in segment.copies.values()]
        assert uses == sorted(uses)
        assert all(self._objects[i] is o and o.rank == rank for i, o in segment.copies.items())
        segment.policy.check()
        known = list(segment.policy)
        assert set(known) == {o.key for o in objects if o.state is ObjectState.VISIBLE}
        assert len(segment.policy) == len(known)
        for obj in objects:
            visible = obj.state is ObjectState.VISIBLE
            assert obj.evictable == (visible and not obj.held() and not obj.hard_pinned())
            assert visible or not obj.unsaved
            assert segment.saver is not None or not obj.unsaved
            assert obj.lessees or obj.state is not ObjectState.UNLISTED
