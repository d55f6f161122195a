"""The directory of the KVCache pool: where each object lies, who may read it, and what is evicted.

The control plane calls it for every request, live and simulated; so does the stand-alone master
(`store.mooncake_store`). It is pure: time is an argument, and it never sees a byte of KV. Explained in
docs/explain/lifecycle.md. The door to store/books, its parts; `store.objects` draws an object's states.

Rules. Verbs raise a StoreError where a caller breaks one. `Ledger.check()` asserts what must hold between
calls; tests call it after every step.

  Write, read     allocate(), write the bytes, put_end(). No lookup finds an object before put_end(), so no
                  reader meets half of it. put_end() and put_revoke() reject an object that is visible.
  One per key     A key is visible once, or as copies on different segments with equal checksums. A second
                  put of a visible key stays private to its owner.
  All or nothing  allocate_many() returns all objects or raises PoolFull. Where the sizes alone rule the
                  objects out, it evicts nothing.
  Lease first     allocate() may evict a visible object unless it is leased, pinned hard or unsaved. So
                  lease hits before the next allocation. lease() raises UnknownObject for an evicted one.
  Owners          Leases and unpublished objects belong to an owner. release() ends its leases and frees its
                  PRIVATE objects; revoke_owner() frees the WRITING ones too. Unknown owners are fine.
                  Control.check() asserts that only open requests, puts, copies and checks own anything.
  Late bytes      revoke_owner() and put_revoke() quarantine a WRITING object if its writer may live. No
                  other object gets the range before settle(), settle_writer() or `quarantine_s` has passed.
  Saves           An object from take_saves() cannot be evicted until saved(), durable(), dropped() or
                  bad_in_dram() names its key. `max_unsaved_share` limits how much waits for a slow disk.
  Last first      put_end_many() and lookup() use a prefix from its end, so that under LRU its first blocks
                  are evicted last: a later block is useless without those before it.
  Events          Each change of what can be read is one event, in order. drain_events() feeds the
                  scheduler's index, which must equal places(); Control.check() compares the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from store.allocator import padded_size
from store.books.adoption import Adoption
from store.books.ledger import Event
from store.books.segment import Segment
from store.books.segment_order import Target
from store.errors import LayoutError, StoreError, WrongState
from store.objects import NO_CLASS, PUBLISHED, Found, ObjectState, PoolObject, Wanted
from store.policies.class_shares import ClassShares

GENERAL_OBJECT_NBYTES = 64 * 2**10
"""The size that an object is assumed to have in a pool without a block layout.

A policy is built with the capacity of its segment in objects, which then can only be guessed. Any value of
this order works, because a policy only sizes its own lists by it: how many keys it remembers, for example.
"""


class Directory(Adoption):
    """The directory of one pool. Its books and their invariant are those of `Ledger`.

    This class has the verbs that KV blocks need. Copies, pins and removal are in `GeneralVerbs`; blocks
    of an earlier directory, and what readers compare, in `Adoption`.
    """

    # ------------------------------------------------------------------------------ segments

    def add_segment(
        self, rank: int, nbytes: int, node: int, *, tier: bool = False, saver: int | None = None
    ) -> None:
        """Add the segment of a rank, which lends nbytes of DRAM on this node.

        tier    whether the rank also has an SSD tier, which saves its blocks
        saver   without a tier: the rank whose tier saves its blocks; it may register later

        Raises StoreError when the rank has a segment already, or a tier would have no layout of blocks.
        """
        if rank in self._segments:
            raise StoreError(f"rank {rank} has a segment already")
        saver = rank if tier else saver
        if saver is not None and self.layout is None:
            raise StoreError(f"rank {rank} has a tier, but tiers hold blocks and this pool has no layout")
        if self.layout is None:
            items = nbytes // GENERAL_OBJECT_NBYTES
        else:
            items = nbytes // padded_size(self.layout.nbytes)
        policy = self._policy(max(1, items))
        segment = Segment(rank, nbytes, node, policy, self._order.total, self._order.changed)
        segment.saver = saver
        self._segments[rank] = segment
        self._order.add(segment)

    def has(self, object_id: int) -> bool:
        """Tell whether an object exists: its segment is there, and it was not freed."""
        return object_id in self._objects

    def has_segment(self, rank: int) -> bool:
        """Tell whether this rank has a segment."""
        return rank in self._segments

    @property
    def has_segments(self) -> bool:
        """Tell whether any rank has a segment."""
        return bool(self._segments)

    def set_saver(self, rank: int, saver: int | None) -> None:
        """Have the tier of another rank, or none, save what this rank's segment gets from now on."""
        self._segment(rank).saver = saver

    def remove_segment(self, rank: int) -> list[str]:
        """Remove a lost rank, its DRAM and its tier; return the owners that lost an object or a lease.

        Every object in its segment is removed, in any state; copies on other segments stay. The owner of an
        unpublished object (QUARANTINED, too) loses it. Each lessee of an object in any state loses its lease.
        Their names are sorted. Other segments whose saver was this rank have none now, so what is published
        there later is not saved, and their `unsaved` objects need not be saved any more. The removed segment
        keeps its saver. At last come `_forget_saves`, which reads that, and `_tier.remove_rank`, whose events
        join `_events`. Raises UnknownObject when the rank has no segment.
        """
        # labs:begin 8b
        gone = self._segment(rank)
        lost = [obj for obj in self._objects.values() if obj.rank == rank]
        owners = {obj.owner for obj in lost if obj.state not in PUBLISHED}
        for obj in lost:
            owners.update(obj.lessees)
            self._remove(obj)
        del self._segments[rank]
        self._order.remove(gone)
        for segment in self._segments.values():
            if segment.saver == rank:
                segment.saver = None
        for obj in self._objects.values():
            if obj.unsaved and self._segments[obj.rank].saver is None:
                self._segments[obj.rank].set_unsaved(obj, False)
        self._forget_saves(gone)
        self._events += self._tier.remove_rank(rank)
        return sorted(owners)
        # labs:end 8b

    # --------------------------------------------------------------------- lookups and leases

    def lookup(
        self,
        keys: Sequence[int],
        digests: Sequence[int],
        now: float,
        *,
        rank: int | None = None,
        node: int | None = None,
        class_id: int = NO_CLASS,
        touch: bool = True,
    ) -> list[Found]:
        """Return the longest leading run of blocks that can be read, from DRAM or else from a tier.

        rank, node   of the reader: it is given the nearest copy of each block
        class_id     of the reader: blocks count for the highest class that has used them
        touch        False: neither recency, classes nor counters change

        A key whose digest differs is a miss, and counted. Blocks are touched last to first, so that the first
        blocks of a prefix are evicted last.
        """
        visible, tier = self._visible.get, self._tier.get
        found: list[Found] = []
        from_tier = 0
        for key, digest, obj in zip(keys, digests, map(visible, keys), strict=True):
            if obj is None:
                entry = tier(key)
                if entry is None or entry[0] != digest:
                    self.counters["digest_mismatches"] += touch and entry is not None
                    break
                found.append(entry[1][0])
                from_tier += 1
                continue
            if obj.digest != digest:
                self.counters["digest_mismatches"] += touch
                break
            if obj.copies is not None:
                obj = self._nearest(obj, rank, node)
            found.append(obj)
        if touch:
            self._count_lookup(len(keys), len(found) - from_tier, from_tier)
            self._touch(found, now, class_id)
        return found

    def spared(self, class_id: int, besides: Sequence[Found], rank: int | None = None) -> int:
        """Count the blocks that are never evicted for this class, in all segments or in that of this rank.

        besides   blocks that are not counted: those that the reader itself has found
        """
        segments = self._segments.values() if rank is None else (self._segment(rank),)
        keys: dict[int, list[int]] = {}
        for obj in besides:
            if isinstance(obj, PoolObject) and obj.key is not None:
                keys.setdefault(obj.rank, []).append(obj.key)
        return sum(segment.policy.spared(class_id, keys.get(segment.rank, ())) for segment in segments)

    def space(self, rank: int | None = None) -> tuple[int, int]:
        """Tell how much space all segments have, or this rank's, and how often it grew.

        Returns (how often bytes became free or evictable, free or evictable bytes).
        """
        accounts = self._order.accounts(Target(rank))
        return accounts.freed, accounts.reachable

    def class_blocks(self) -> list[int]:
        """Count the visible blocks of each service class, the highest first; [] when no class has a share."""
        policies = [segment.policy for segment in self._segments.values()]
        held = [policy.held() for policy in policies if isinstance(policy, ClassShares)]
        return [sum(column) for column in zip(*held)]

    def lease(self, owner: str, object_ids: Iterable[int], now: float, until: float) -> None:
        """Lease objects to an owner: they are not evicted until release(owner) or the time `until`.

        All leases of one owner end together, at the latest `until` of them. An object may be leased in any
        state, so that a block is safe from the moment it becomes visible.
        Raises UnknownObject when an object is gone; then none is leased.
        """
        objects = [self.object(object_id) for object_id in object_ids]
        if objects:
            self._leases.lease(owner, objects, until)

    def release(self, owner: str, now: float) -> None:
        """End the leases of an owner and free its private objects. Unknown owners are fine."""
        self._end_leases(owner)
        self._free_objects(owner, ObjectState.PRIVATE)

    # ---------------------------------------------------------------------------------- puts

    def allocate(
        self,
        owner: str,
        nbytes: int,
        *,
        now: float,
        node: int | None = None,
        rank: int | None = None,
        key: int | None = None,
        digest: int = 0,
        cost_s: float = 0.0,
        class_id: int = 0,
        parent: int | None = None,
        position: int = 0,
    ) -> PoolObject:
        """Allocate one object (put_start), with eviction where necessary. See allocate_many."""
        wanted = Wanted(nbytes, key, digest, cost_s, class_id, parent=parent, position=position)
        return self.allocate_many(owner, [wanted], now=now, node=node, rank=rank)[0]

    def allocate_many(
        self,
        owner: str,
        wanted: Sequence[Wanted],
        *,
        now: float,
        node: int | None = None,
        rank: int | None = None,
        first: int | None = None,
        contiguous: bool = True,
    ) -> list[PoolObject]:
        """Allocate several objects (put_start), all or none: each is WRITING, with an id of its own.

        node         preferred, and its rack; segments of other nodes are used when its own are full
        rank         only this rank's segment
        first        the segment of this rank is preferred to all others
        contiguous   False: an object that no hole is large enough for may get several extents

        The first object goes to the segment with the most free space, or else where eviction frees the
        coldest block. The other objects follow it as far as they fit. First lease the blocks that the same
        request reads. Raises PoolFull (nothing is evicted when the sizes alone rule it out), LayoutError,
        UnknownObject for a rank without a segment.
        """
        if rank is not None:
            self._segment(rank)
        return self._allocate_near(owner, wanted, Target(rank, first, node), contiguous, now)

    def put_end(self, object_id: int, checksums: Sequence[int], now: float) -> bool:
        """Publish an object under its key, once all its writers have reported. True when it became visible.

        The object stays private to its owner until release if it has no key, if its key is visible already,
        or if the eviction policy does not admit it. A copy (`put_copy`) becomes visible beside its original.
        A copy whose checksums differ from the original's is freed and counted, even if the original is gone.

        checksums: one u64 per layer (`BlockLayout.checksums`). Raises UnknownObject, WrongState when it
        is not WRITING, LayoutError when a keyed object comes with another number of checksums.
        """
        obj = self.object(object_id)
        if obj.state is not ObjectState.WRITING:
            raise WrongState(object_id, obj.state.value, ObjectState.WRITING.value)
        if self.layout is not None and obj.key is not None and len(checksums) != self.layout.layers:
            raise LayoutError(f"{len(checksums)} checksums for a block of {self.layout.layers} layers")
        expected, obj.sums = obj.sums, array("Q", checksums).tobytes()
        obj.last_use_s = now
        self.counters["puts_ended"] += 1
        first = None if obj.key is None else self._visible.get(obj.key)
        self._join_family(obj, first)
        is_copy = first is not None and first.copies is not None and first.copies is obj.copies
        if is_copy and first is not None:
            expected = first.sums
        if expected and expected != obj.sums:
            self.counters["copies_bad"] += 1
            self._remove(obj)
            return False
        segment, facts = self._segments[obj.rank], obj.facts
        if obj.key is None or (first is not None and not is_copy):
            self.counters["puts_duplicate"] += obj.key is not None
            if first is not None and obj.class_id < first.class_id:
                self._segments[first.rank].count_for(first, obj.class_id, now)
        elif is_copy or segment.policy.admits(obj.key, facts, now):
            self._publish(obj, obj.key, facts, now)
            return True
        else:
            self.counters["puts_not_admitted"] += 1
        self._leave_copies(obj)
        segment.set_state(obj, ObjectState.PRIVATE)
        return False

    def is_writing(self, object_id: int) -> bool:
        """Tell whether an object is there and waits for its put_end."""
        obj = self._objects.get(object_id)
        return obj is not None and obj.state is ObjectState.WRITING

    def put_end_many(
        self, object_ids: Sequence[int], checksums: Sequence[Sequence[int]], now: float
    ) -> list[bool]:
        """Publish the blocks of one request, last to first, so that its first blocks are evicted last."""
        pairs = list(zip(object_ids, checksums, strict=True))
        return [self.put_end(object_id, sums, now) for object_id, sums in reversed(pairs)][::-1]

    def put_revoke(
        self, object_id: int, *, now: float, writer_may_live: bool = False, writer: int | None = None
    ) -> None:
        """Free an object that is WRITING or PRIVATE; quarantine it first if late bytes may reach it.

        writer_may_live, writer   as for revoke_owner

        Raises UnknownObject, WrongState when it is visible or quarantined.
        """
        obj = self.object(object_id)
        if obj.state not in (ObjectState.WRITING, ObjectState.PRIVATE):
            raise WrongState(object_id, obj.state.value, "being written or private")
        self._revoke(obj, now, writer_may_live, writer)

    def revoke_owner(
        self, owner: str, now: float, *, writer_may_live: bool = False, writer: int | None = None
    ) -> None:
        """End the leases of an owner that failed, and free its WRITING and PRIVATE objects.

        Unknown owners are fine.

        writer_may_live   late bytes may still land in its WRITING objects. They are then quarantined, and no
                          other object gets their ranges, until settle(owner), settle_writer(writer), or
                          `quarantine_s` seconds have passed.
        writer            the rank that may still write, None when it is not known
        """
        self._end_leases(owner)
        for obj in self._leases.objects_of(owner):
            if obj.state is not ObjectState.QUARANTINED:
                self._revoke(obj, now, writer_may_live, writer)

    def settle(self, owner: str) -> int:
        """Free the quarantined objects of an owner without living writers; return how many."""
        return self._free_objects(owner, ObjectState.QUARANTINED)

    def settle_writer(self, rank: int) -> int:
        """Free the objects that are quarantined because of this rank, which is lost and writes nothing more.

        Returns how many objects were freed.
        """
        object_ids = self._late.of_writer(rank)
        self._free(object_ids)
        return len(object_ids)

    def hold_writer(self, rank: int) -> None:
        """Keep what is quarantined because of this rank, which may live and cannot be reached, until
        `settle_writer`."""
        self._late.hold(rank)

    # ---------------------------------------------------------------------------------- tier

    def add_tier_blocks(self, rank: int, keys: Sequence[int], digests: Sequence[int]) -> None:
        """Add blocks that the tier of a store rank holds at the start. They may come in several calls."""
        self._segment(rank).saver = rank
        self._events += self._tier.add(rank, keys, digests)

    def take_saves(self) -> dict[int, list[PoolObject]]:
        """Return the objects to save since the last call, in order, by the rank whose tier takes them.

        Each object stays where it is until saved() or dropped() names its key.
        """
        taken, self._saves = self._saves, []
        by_rank: dict[int, list[PoolObject]] = {}
        for obj in taken:
            saver = self._segments[obj.rank].saver
            assert saver is not None
            by_rank.setdefault(saver, []).append(obj)
        return by_rank

    def saved(self, rank: int, keys: Iterable[int]) -> None:
        """Note that keys are in the open segment file of rank: DRAM may evict them. Unknown keys are fine."""
        for key in keys:
            obj = self._unsaved(rank, key)
            if obj is not None:
                self._segments[obj.rank].set_unsaved(obj, False)
                self.counters["saves"] += 1

    def _unsaved(self, rank: int, key: int) -> PoolObject | None:
        """Return the object of a key that waits for this rank's tier. Of copies, only the first waits."""
        obj = self._visible.get(key)
        return obj if obj is not None and obj.unsaved and self._segments[obj.rank].saver == rank else None

    def durable(self, rank: int, keys: Sequence[int]) -> None:
        """Note that keys are in a sealed file of rank: lookups find them there from now on. Implies saved."""
        self.saved(rank, keys)
        self._events += self._tier.end_save(rank, keys, durable=True)

    def dropped(self, rank: int, keys: Sequence[int]) -> None:
        """Note that the tier of rank does not take these keys (disk full, queue full), and count them."""
        for key in keys:
            obj = self._unsaved(rank, key)
            if obj is not None:
                self._segments[obj.rank].set_unsaved(obj, False)
        self.counters["saves_dropped"] += len(keys)
        self._tier.end_save(rank, keys, durable=False)

    def bad_in_dram(self, rank: int, keys: Sequence[int]) -> None:
        """Note that bytes in DRAM differ from those of put_end. The keys are misses from now on, and counted.

        An object without a lease is freed at once, another one when its last lease ends.
        """
        for key in keys:
            obj = self._unsaved(rank, key)
            if obj is None:
                continue
            self.counters["dram_bad_blocks"] += 1
            self._retire(obj)
        self._tier.end_save(rank, keys, durable=False)

    def tier_evicted(self, rank: int, keys: Iterable[int]) -> None:
        """Note that the tier of rank has evicted the files of these keys."""
        events = self._tier.remove(rank, keys)
        self.counters["tier_evictions"] += len(events)
        self._events += events

    def tier_removed(self, rank: int, keys: Iterable[int]) -> None:
        """Note that the tier of rank has removed these keys, after `remove_everywhere`."""
        self._events += self._tier.remove(rank, keys)

    def drop_tier_block(self, rank: int, keys: Iterable[int]) -> None:
        """Note that bytes in the tier of rank were bad. The keys are misses there now, and counted."""
        events = self._tier.remove(rank, keys)
        self.counters["tier_bad_blocks"] += len(events)
        self._events += events

    def drain_events(self) -> list[Event]:
        """Return the events since the last call, in order: they feed the scheduler's index."""
        drained, self._events = self._events, []
        return drained
