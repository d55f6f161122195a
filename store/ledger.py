"""The books behind the directory: objects, owners, leases, segments, and the steps that keep them exact.

Used through `store.directory` alone, which adds the verbs; `store.placement` makes room. Pure, like them;
explained in docs/lifecycle.md. Every step here leaves the invariant of `check()` true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

from store.errors import UnknownObject
from store.layout import BlockLayout
from store.objects import (
    PUBLISHED,
    BlockRemoved,
    BlockStored,
    Found,
    ObjectState,
    PoolObject,
    Terms,
)
from store.policies import PolicyFactory
from store.policies.lru import LRU
from store.segment import Segment
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
    "copies_stored",
    "copies_bad",
    "removals",
    "tier_removals",
    "puts_not_admitted",
    "pool_full",
    "evictions",
    "evicted_bytes",
    "copies_evicted",
    "leases_expired",
    "saves",
    "saves_skipped",
    "saves_dropped",
    "tier_evictions",
    "tier_bad_blocks",
    "dram_bad_blocks",
)


@dataclass(slots=True)
class Owner:
    """What one owner has: the leases it holds (all end at `until`) and the objects it has not published."""

    leased: set[int] = field(default_factory=set)
    until: float = 0.0
    objects: set[int] = field(default_factory=set)


def visible_copies(obj: PoolObject) -> list[PoolObject]:
    """A visible object and its copies, those that are visible."""
    return [copy for copy in obj.copies if copy.state is ObjectState.VISIBLE] if obj.copies else [obj]


class Ledger:
    """The books of one pool.

    _segments  rank -> Segment
    _objects   object_id -> PoolObject, all there are
    _visible   key -> the VISIBLE object of that key, the one published first when there are copies
    _tier      keys on SSD, and on their way there
    _owners    owner -> leases and unpublished objects; absent when it has neither
    _expiries  heap of (until, owner), possibly outdated
    _held      heap of (until, object_id), one for each object with a lease of its own, possibly outdated
    _saves     VISIBLE objects that nobody has been told to save yet
    """

    def __init__(
        self,
        layout: BlockLayout | None,
        *,
        policy: PolicyFactory = LRU,
        max_unsaved_share: float = 0.5,
        high_water: float = 1.0,
        evict_share: float = 0.0,
        copy_cold_s: float = 60.0,
    ):
        """
        layout              of the blocks; None: objects of any size, with any number of checksums, no tiers
        policy              makes one for each segment, from its capacity in blocks; its items are the keys
        max_unsaved_share   at most this share of a segment waits for its tier (such blocks cannot be
                            evicted); what becomes visible beyond it is not saved, and counted
        high_water          a segment used beyond this share evicts at the next put, full or not
        evict_share         whoever evicts frees at least this share of the segment
        copy_cold_s         a copy that was not used for so long goes before anything else
        """
        self.layout = layout
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._policy = policy
        self._max_unsaved_share = max_unsaved_share
        self._high_water = high_water
        self._evict_share = evict_share
        self._copy_cold_s = copy_cold_s
        self._segments: dict[int, Segment] = {}
        self._objects: dict[int, PoolObject] = {}
        self._visible: dict[int, PoolObject] = {}
        self._block_nbytes = layout.nbytes if layout else 0
        self._tier = TierIndex(self._block_nbytes)
        self._owners: dict[str, Owner] = {}
        self._expiries: list[tuple[float, str]] = []
        self._held: list[tuple[float, int]] = []
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
        while self._held and self._held[0][0] <= now:
            _, object_id = heappop(self._held)
            obj = self._objects.get(object_id)
            if obj is not None and obj.terms is not None:
                until = obj.terms.lease_until
                obj.terms.lease_until = 0.0
                self._hold(obj, until if until > now else 0.0)
        self.counters["leases_expired"] += expired
        return expired

    # ------------------------------------------------------------------------------ objects

    def _segment(self, rank: int) -> Segment:
        try:
            return self._segments[rank]
        except KeyError:
            raise UnknownObject("segment of rank", rank) from None

    def _publish(self, obj: PoolObject, key: int, now: float) -> None:
        """WRITING -> VISIBLE, and into the line for its tier where there is one, and none has it."""
        segment = self._segments[obj.rank]
        self._disown(obj)
        is_copy = key in self._visible
        if not is_copy:
            self._visible[key] = obj
        segment.policy.on_insert(key, obj.facts, now)
        segment.set_state(obj, ObjectState.VISIBLE)
        self._events.append(BlockStored(key, obj.rank, "dram"))
        if is_copy:
            self.counters["copies_stored"] += 1
            self._join_copies(obj, now)
            return
        if segment.saver is None or self._tier.knows(key):
            return
        if segment.unsaved_bytes + obj.nbytes > self._max_unsaved_share * segment.allocator.capacity:
            self.counters["saves_skipped"] += 1
            return
        segment.set_unsaved(obj, True)
        self._tier.start_save(segment.saver, key, obj.digest)
        self._saves.append(obj)

    def _remove(self, obj: PoolObject, *, evicted: bool = False) -> None:
        """The object is no more: out of every book, its extents free. evicted: it was the policy's victim."""
        segment = self._segments[obj.rank]
        for owner in list(obj.lessees or ()):
            self._unlease(owner, obj)
        if obj.state is ObjectState.VISIBLE:
            self._hide(obj, evicted=evicted)
        elif obj.state is not ObjectState.UNLISTED:
            self._disown(obj)
            self._leave_copies(obj)
        segment.clear(obj)
        del self._objects[obj.object_id]

    def _hide(self, obj: PoolObject, *, evicted: bool = False) -> None:
        """No lookup finds this VISIBLE object any more, and nobody evicts it; its state is the caller's."""
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

    def _retire(self, obj: PoolObject) -> None:
        """A VISIBLE object is found no more, and freed when its last lease ends; at once without any."""
        if not obj.lessees:
            self._remove(obj)
            return
        self._hide(obj)
        self._segments[obj.rank].set_unsaved(obj, False)
        self._segments[obj.rank].set_state(obj, ObjectState.UNLISTED)

    def _revoke(self, obj: PoolObject, writer_may_live: bool) -> None:
        self.counters["puts_revoked"] += 1
        if obj.state is ObjectState.WRITING and writer_may_live:
            self._leave_copies(obj)
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

    def _touch(self, found: Sequence[Found], now: float) -> None:
        """What a lookup found was used, the last block first."""
        used: dict[int, list[int]] = {}
        for obj in reversed(found):
            if isinstance(obj, PoolObject) and obj.key is not None:
                obj.last_use_s = now
                if obj.rank in used:
                    used[obj.rank].append(obj.key)
                else:
                    used[obj.rank] = [obj.key]
                if obj.copies is not None and obj.object_id in self._segments[obj.rank].copies:
                    self._segments[obj.rank].copies.move_to_end(obj.object_id)
        for rank, keys in used.items():
            self._segments[rank].policy.on_access_all(keys, now)

    def _count_lookup(self, asked: int, from_dram: int, from_tier: int) -> None:
        self.counters["lookups"] += 1
        self.counters["blocks_looked_up"] += asked
        self.counters["hits_dram"] += from_dram
        self.counters["hits_ssd"] += from_tier

    # -------------------------------------------------------------------------------- copies

    def _join_copies(self, obj: PoolObject, now: float) -> None:
        """A copy has become visible beside others. For those which had none until now it counts as a use."""
        for copy in visible_copies(obj):
            copies = self._segments[copy.rank].copies
            if copy.object_id not in copies:
                copies[copy.object_id] = copy
                copy.last_use_s = now

    def _leave_copies(self, obj: PoolObject) -> None:
        """The others are there without this one."""
        family, obj.copies = obj.copies, None
        if family is None:
            return
        family.remove(obj)
        self._segments[obj.rank].copies.pop(obj.object_id, None)
        visible = visible_copies(family[0])
        if len(visible) == 1:
            self._segments[visible[0].rank].copies.pop(visible[0].object_id, None)
        if len(family) == 1:
            family[0].copies = None

    def _nearest(self, obj: PoolObject, rank: int | None, node: int | None) -> PoolObject:
        """Of this visible object and its visible copies: on this rank, else on this node, else the first."""
        nodes = self._segments
        return min(visible_copies(obj), key=lambda c: (c.rank != rank, nodes[c.rank].node != node))

    # ---------------------------------------------------------------------- owners and leases

    def _lease(self, owner: str, objects: Sequence[PoolObject], until: float) -> None:
        """`Directory.lease`, of at least one object."""
        record = self._owners.setdefault(owner, Owner())
        if until > record.until:
            record.until = until
            heappush(self._expiries, (until, owner))
        for obj in objects:
            record.leased.add(obj.object_id)
            if obj.lessees is None:
                obj.lessees = set()
            obj.lessees.add(owner)
            self._segments[obj.rank].note_evictable(obj)

    def _hold(self, obj: PoolObject, until: float) -> None:
        """Prolong an object's own lease to this time; an earlier one changes nothing."""
        if obj.terms is None:
            obj.terms = Terms()
        if until > obj.terms.lease_until:
            if not obj.terms.lease_until:
                heappush(self._held, (until, obj.object_id))
            obj.terms.lease_until = until
        self._segments[obj.rank].note_evictable(obj)

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
            obj = self._objects[object_id]
            self._unlease(owner, obj)
            if obj.state is ObjectState.UNLISTED and not obj.lessees:
                self._remove(obj)
        if record is not None:
            record.until = 0.0

    def _forget_empty(self, owner: str) -> None:
        record = self._owners[owner]
        if not record.leased and not record.objects:
            del self._owners[owner]

    # --------------------------------------------------------------------------- inspection

    def will_free(self) -> bool:
        """Whether a full pool gets room without being asked: a request ends, a tier saves, a late writer's
        time is over. If not, all that lookups cannot evict is pinned."""
        waiting = any(
            segment.unsaved_bytes or segment.state_bytes[ObjectState.QUARANTINED]
            for segment in self._segments.values()
        )
        return waiting or bool(self._owners)

    def stats(self) -> dict[str, int]:
        """All counters, and these gauges: objects, owners, keys_dram, keys_ssd, copies_dram (objects whose
        key is visible elsewhere too), saving (blocks on their way to a tier), and bytes: capacity, free,
        evictable, unsaved, and by state."""
        segments = self._segments.values()
        gauges = {
            "objects": len(self._objects),
            "owners": len(self._owners),
            "keys_dram": len(self._visible),
            "copies_dram": sum(len(segment.copies) for segment in segments),
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

    def segments(self) -> list[tuple[int, int, int]]:
        """(rank, bytes, free bytes) of each segment, in the order in which they came."""
        found = self._segments.values()
        return [(seg.rank, seg.allocator.capacity, seg.allocator.free_bytes) for seg in found]

    def visible_objects(self) -> list[PoolObject]:
        """All that lookups can find in DRAM, copies too, in the order of their put_start."""
        return [obj for obj in self._objects.values() if obj.state is ObjectState.VISIBLE]

    def is_visible(self, obj: PoolObject) -> bool:
        """Whether this very object can still be found."""
        return self._objects.get(obj.object_id) is obj and obj.state is ObjectState.VISIBLE

    def places(self) -> set[tuple[int, int, str]]:
        """Every (key, rank, tier) that can be read, for comparison with the scheduler's index."""
        copies = ((key, obj) for key, first in self._visible.items() for obj in visible_copies(first))
        dram = {(key, obj.rank, "dram") for key, obj in copies}
        return dram | self._tier.places()

    def check(self) -> None:
        """Assert every invariant (tests): ranges disjoint, accounts exact, indexes equal to the objects."""
        self._tier.check()
        for rank in self._segments:
            self._check_segment(rank)
        self._check_copies()
        unpublished = {i for i, o in self._objects.items() if o.state not in PUBLISHED}
        assert unpublished == {i for record in self._owners.values() for i in record.objects}
        for name, record in self._owners.items():
            assert record.leased or record.objects, f"owner {name} has nothing"
            assert not record.leased or any(name == owner for _, owner in self._expiries)
            assert all(self._objects[i].owner == name for i in record.objects)
        leases = {(name, i) for name, record in self._owners.items() for i in record.leased}
        assert leases == {(name, i) for i, o in self._objects.items() for name in o.lessees or ()}
        assert all(obj.unsaved and self._objects[obj.object_id] is obj for obj in self._saves)
        held = [i for i, o in self._objects.items() if o.terms is not None and o.terms.lease_until]
        queued = [i for _, i in self._held if i in self._objects]
        assert sorted(held) == sorted(queued), "a lease that does not end, or ends twice"

    def _check_copies(self) -> None:
        """One object or one family of copies to a visible key, each on a segment of its own."""
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
        assert segment.allocator.used_bytes == sum(end - start for start, end in ranges)
        for state in ObjectState:
            assert segment.state_bytes[state] == sum(padded(o.nbytes) for o in objects if o.state is state)
        assert segment.evictable_bytes == sum(padded(o.nbytes) for o in objects if o.evictable)
        assert segment.unsaved_bytes == sum(padded(o.nbytes) for o in objects if o.unsaved)
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
