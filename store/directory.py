"""The directory of the KVCache pool: where each object lies, who may read it, and what is evicted.

The control plane calls it for every request, live and simulated; so does the stand-alone master
(`store.distributed`). It is pure: time is an argument, and it never sees a byte of KV. Explained in
docs/explain/lifecycle.md. The states of an object are drawn in `store.objects`.

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
from store.errors import LayoutError, StoreError, WrongState
from store.general import GeneralVerbs
from store.ledger import Event
from store.objects import NO_CLASS, PUBLISHED, Found, ObjectState, PoolObject, Wanted
from store.policies.class_shares import ClassShares
from store.segment import Segment
from store.segment_order import Target

GENERAL_OBJECT_NBYTES = 64 * 2**10
"""What eviction policies take an object for without a layout: how many there may be is then a guess."""


class Directory(GeneralVerbs):
    """The directory of one pool: the verbs. Its books and their invariant are those of `Ledger`.

    Here is what KV blocks need; copies, pins, reads that lease and removal are in `GeneralVerbs`.
    """

    # ------------------------------------------------------------------------------ segments

    def add_segment(
        self, rank: int, nbytes: int, node: int, *, tier: bool = False, saver: int | None = None
    ) -> None:
        """Rank lends nbytes of DRAM on this node.

        tier    it also has an SSD tier to write behind to
        saver   without one: the rank whose tier takes its blocks, which may register later

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

    def remove_segment(self, rank: int) -> list[str]:
        """Rank is gone, with its DRAM and its tier; returns the owners that lost an object or a lease.

        What it was to save for others stays in their DRAM alone. Raises UnknownObject when it has no segment.
        """
        saver = self._segment(rank).saver
        lost = [obj for obj in self._objects.values() if obj.rank == rank]
        owners = {obj.owner for obj in lost if obj.state not in PUBLISHED}
        for obj in lost:
            owners.update(obj.lessees)
            self._remove(obj)
        self._order.remove(self._segments.pop(rank))
        for segment in self._segments.values():
            if segment.saver == rank:
                segment.saver = None
        for obj in self._objects.values():
            if obj.unsaved and self._segments[obj.rank].saver is None:
                self._segments[obj.rank].set_unsaved(obj, False)
        for obj in self._saves:  # nobody was told to save these, and so nobody will say what became of them
            if obj.rank == rank and saver is not None and obj.key is not None:
                self._tier.end_save(saver, [obj.key], durable=False)
        self._saves = [obj for obj in self._saves if obj.unsaved]
        self._events += self._tier.remove_rank(rank)
        return sorted(owners)

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
        """The longest leading run of blocks that can be read, from DRAM or else from a tier.

        rank, node   of the reader: it is given the nearest copy of each block
        class_id     of the reader: blocks count for the highest class that has used them
        touch        False: neither recency, classes nor counters change

        A key whose digest differs is a miss, and counted. Blocks are touched last to first, so that a
        prefix outlives what hangs on it.
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
        """How many blocks are never evicted for this class, all segments together, or that of this rank.

        besides   blocks that are not counted: what the reader itself has found
        """
        segments = self._segments.values() if rank is None else (self._segment(rank),)
        keys: dict[int, list[int]] = {}
        for obj in besides:
            if isinstance(obj, PoolObject) and obj.key is not None:
                keys.setdefault(obj.rank, []).append(obj.key)
        return sum(segment.policy.spared(class_id, keys.get(segment.rank, ())) for segment in segments)

    def space(self, rank: int | None = None) -> tuple[int, int]:
        """Bytes that are free or evictable, of all segments or of this rank's, and how often there came more.

        Returns (how often bytes became free or evictable, free or evictable bytes).
        """
        accounts = self._order.accounts(Target(rank))
        return accounts.freed, accounts.reachable

    def class_blocks(self) -> list[int]:
        """Visible blocks of each service class, the highest first; empty when no class has a share."""
        policies = [segment.policy for segment in self._segments.values()]
        held = [policy.held() for policy in policies if isinstance(policy, ClassShares)]
        return [sum(column) for column in zip(*held)]

    def lease(self, owner: str, object_ids: Iterable[int], now: float, until: float) -> None:
        """What is leased is not evicted until release(owner) or the time `until`.

        All leases of one owner end together, at the latest `until` it was given; any state may be
        leased, so that a block is safe from the moment it becomes visible.
        Raises UnknownObject when one is gone; then none is added.
        """
        objects = [self.object(object_id) for object_id in object_ids]
        if objects:
            self._leases.lease(owner, objects, until)

    def release(self, owner: str, now: float) -> None:
        """The owner is done: its leases end and its private objects are freed. Unknown owners are fine."""
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
        """put_start of one object, evicting where necessary. See allocate_many."""
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
        """put_start of several objects, all or none: each WRITING, with an id of its own.

        node         preferred; others serve when it is full.     rank   this rank's segment only
        first        preferred to all others: this rank's segment
        contiguous   False: an object that no hole is large enough for may get several extents

        Room is taken where most is free, then by evicting where the coldest block is. The other objects
        follow the first one as far as they fit. Lease what the same request is going to read before.
        Raises PoolFull (nothing is evicted when the sizes alone rule it out), LayoutError, UnknownObject for
        a rank without a segment.
        """
        if rank is not None:
            self._segment(rank)
        return self._allocate(owner, wanted, Target(rank, first, node), contiguous, now)

    def put_end(self, object_id: int, checksums: Sequence[int], now: float) -> bool:
        """All writers have reported: publish the object under its key. True when it became visible.

        Without a key, when its key is visible already, or when the eviction policy does not admit it, it
        stays private to its owner until release. A copy (`put_copy`) becomes visible beside what it is a
        copy of; one whose checksums differ from that is freed, and counted, also when that is gone by now.

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

    def put_end_many(
        self, object_ids: Sequence[int], checksums: Sequence[Sequence[int]], now: float
    ) -> list[bool]:
        """put_end of one request's blocks, last to first: a prefix then outlives what hangs on it."""
        pairs = list(zip(object_ids, checksums, strict=True))
        return [self.put_end(object_id, sums, now) for object_id, sums in reversed(pairs)][::-1]

    def put_revoke(
        self, object_id: int, *, now: float, writer_may_live: bool = False, writer: int | None = None
    ) -> None:
        """Free an object that is WRITING or PRIVATE; one that late bytes may reach is quarantined first.

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
        """The owner failed: its leases end, and its WRITING and PRIVATE objects are freed.

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
        """No writer of this owner lives any more: free what is quarantined; returns how many objects."""
        return self._free_objects(owner, ObjectState.QUARANTINED)

    def settle_writer(self, rank: int) -> int:
        """This rank is lost and writes nothing any more: free what is quarantined because of it.

        Returns how many objects were freed.
        """
        object_ids = self._late.of_writer(rank)
        self._free(object_ids)
        return len(object_ids)

    # ---------------------------------------------------------------------------------- tier

    def add_tier_blocks(self, rank: int, keys: Sequence[int], digests: Sequence[int]) -> None:
        """What the tier of a store rank holds at the start (may come in pieces; empty is fine)."""
        self._segment(rank).saver = rank
        self._events += self._tier.add(rank, keys, digests)

    def take_saves(self) -> dict[int, list[PoolObject]]:
        """Objects to write behind since the last call, by the rank whose tier takes them, as they were put.

        Each stays where it is until saved() or dropped() names its key.
        """
        taken, self._saves = self._saves, []
        by_rank: dict[int, list[PoolObject]] = {}
        for obj in taken:
            saver = self._segments[obj.rank].saver
            assert saver is not None
            by_rank.setdefault(saver, []).append(obj)
        return by_rank

    def saved(self, rank: int, keys: Iterable[int]) -> None:
        """Written to the open segment file of rank: the DRAM copy may be evicted. Unknown keys are fine."""
        for key in keys:
            obj = self._unsaved(rank, key)
            if obj is not None:
                self._segments[obj.rank].set_unsaved(obj, False)
                self.counters["saves"] += 1

    def _unsaved(self, rank: int, key: int) -> PoolObject | None:
        """The object that waits for this rank's tier. Copies, which were published later, never do."""
        obj = self._visible.get(key)
        return obj if obj is not None and obj.unsaved and self._segments[obj.rank].saver == rank else None

    def durable(self, rank: int, keys: Sequence[int]) -> None:
        """In a sealed file of rank: from now on a hit there. Implies saved."""
        self.saved(rank, keys)
        self._events += self._tier.end_save(rank, keys, durable=True)

    def dropped(self, rank: int, keys: Sequence[int]) -> None:
        """Will not be in the tier (disk full, queue full); counted."""
        for key in keys:
            obj = self._unsaved(rank, key)
            if obj is not None:
                self._segments[obj.rank].set_unsaved(obj, False)
        self.counters["saves_dropped"] += len(keys)
        self._tier.end_save(rank, keys, durable=False)

    def bad_in_dram(self, rank: int, keys: Sequence[int]) -> None:
        """The bytes that were to be written behind are not those of put_end: a miss from now on, and counted.

        An object that nobody has a lease on is freed at once, another one when its last lease ends.
        """
        for key in keys:
            obj = self._unsaved(rank, key)
            if obj is None:
                continue
            self.counters["dram_bad_blocks"] += 1
            self._retire(obj)
        self._tier.end_save(rank, keys, durable=False)

    def tier_evicted(self, rank: int, keys: Iterable[int]) -> None:
        """No longer in the tier of rank: its file was evicted."""
        events = self._tier.remove(rank, keys)
        self.counters["tier_evictions"] += len(events)
        self._events += events

    def tier_removed(self, rank: int, keys: Iterable[int]) -> None:
        """No longer in the tier of rank: `remove_everywhere` wanted it."""
        self._events += self._tier.remove(rank, keys)

    def drop_tier_block(self, rank: int, keys: Iterable[int]) -> None:
        """The bytes in the tier of rank were bad: a miss from now on, and counted."""
        events = self._tier.remove(rank, keys)
        self.counters["tier_bad_blocks"] += len(events)
        self._events += events

    def drain_events(self) -> list[Event]:
        """What was stored and removed since the last call, in order: feeds the scheduler's index."""
        drained, self._events = self._events, []
        return drained
