"""What objects of a general store need beyond KV blocks: copies, reads that lease, pins, removal.

The second half of `store.directory`, used through it alone. Pure: time is an argument, no bytes move here:
who asks for a copy writes it. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from store.allocation import Allocation
from store.errors import LEASED, CopyExists, ObjectInUse, UnknownObject, WrongState
from store.ledger import visible_copies
from store.objects import ObjectState, PoolObject, Terms, Wanted
from store.segment_order import Target

LEASE_S = 10.0
"""How long whoever reads or asks for an object may rely on it: Mooncake Store's default."""


class GeneralVerbs(Allocation):
    """Verbs by key. Unlike a chain of blocks, general objects are found or missed each by itself."""

    # ------------------------------------------------------------------------------ reading

    def read(
        self,
        keys: Sequence[int],
        digests: Sequence[int],
        now: float,
        *,
        lease_s: float = LEASE_S,
        rank: int | None = None,
        node: int | None = None,
    ) -> list[PoolObject | None]:
        """Where to read each key, None for a miss; neither evicted nor removed before now + lease_s.

        rank, node   of the reader, who is given the nearest copy

        A lease that ends later already is not shortened. Counted like a lookup, and touched.
        """
        found = [self._find(key, digest) for key, digest in zip(keys, digests, strict=True)]
        nearest = [obj and self._nearest(obj, rank, node) for obj in found]
        there = [obj for obj in nearest if obj is not None]
        for obj in there:
            self._leases.hold(obj, now + lease_s)
        self._count_lookup(len(keys), len(there), 0)
        self._touch(there, now)
        return nearest

    def exists(
        self, keys: Sequence[int], digests: Sequence[int], now: float, *, lease_s: float = LEASE_S
    ) -> list[bool]:
        """Whether each key can be read. Leases all its copies like `read`; counts and touches nothing."""
        found = [self._find(key, digest) for key, digest in zip(keys, digests, strict=True)]
        for obj in found:
            for copy in visible_copies(obj) if obj else ():
                self._leases.hold(copy, now + lease_s)
        return [obj is not None for obj in found]

    def locations(self, key: int, digest: int) -> list[PoolObject]:
        """The visible copies of a key, in the order of their put_start; empty for a miss. Leases nothing."""
        obj = self._find(key, digest)
        return visible_copies(obj) if obj else []

    # ------------------------------------------------------------------------------- copies

    def put_copy(
        self,
        object_id: int,
        *,
        now: float,
        owner: str | None = None,
        rank: int | None = None,
        node: int | None = None,
        contiguous: bool = True,
    ) -> PoolObject:
        """put_start of a copy of an object, WRITING or VISIBLE, on a segment that has none yet.

        owner        of the copy; None: the object's
        rank, node   as for allocate_many

        put_end makes it visible beside the others; it may end before what it is a copy of. Raises
        UnknownObject, WrongState for an object that is not, or will never be, found by its key, CopyExists
        when rank has one, PoolFull (so too when every segment has one).
        """
        source = self.object(object_id)
        if source.key is None or source.state not in (ObjectState.WRITING, ObjectState.VISIBLE):
            raise WrongState(object_id, source.state.value, "keyed and being written or visible")
        taken = frozenset(copy.rank for copy in source.copies or [source])
        if rank is not None and self._segment(rank).rank in taken:
            raise CopyExists(source.key, rank)
        target = Target(rank, node=node, without=taken)
        terms = source.terms or Terms()
        wanted = Wanted(
            source.nbytes,
            source.key,
            source.digest,
            source.cost_s,
            source.class_id,
            terms.group_id,
            terms.soft_until,
            terms.hard_pin,
            source.parent,
            source.position,
        )
        (copy,) = self._allocate(owner or source.owner, [wanted], target, contiguous, now)
        if source.copies is None:
            source.copies = [source]
        copy.copies = source.copies
        copy.copies.append(copy)
        copy.sums = source.sums  # what its put_end is held against, should the source be found bad till then
        return copy

    def replicate(
        self,
        owner: str,
        key: int,
        digest: int,
        *,
        rank: int,
        now: float,
        until: float,
        contiguous: bool = True,
        idle_s: float = 0.0,
    ) -> tuple[PoolObject, PoolObject]:
        """put_start of a copy of a visible key on this rank's segment: (what to read, where to write).

        idle_s   evict for the copy only what was not used for so long

        What is read is leased to the owner until `until`, or release(owner). Raises UnknownObject for a
        key or a rank that is not there, CopyExists, PoolFull.
        """
        segment = self._segment(rank)
        source = self._nearest(self._known(key, digest), None, segment.node)
        free, minus_used_s = self.space_for_copies(rank, now)
        if idle_s and free < source.padded and -minus_used_s > now - idle_s:
            raise segment.accounts.pool_full(source.padded)
        copy = self.put_copy(source.object_id, now=now, owner=owner, rank=rank, contiguous=contiguous)
        self._leases.lease(owner, [source], until)
        return source, copy

    def space_for_copies(self, rank: int, now: float) -> tuple[int, float]:
        """Rate a segment as a target of copies, the best one highest.

        Returns (free bytes, -last use of the object that it would evict first; -inf: only pinned ones).
        """
        segment = self._segment(rank)
        coldest = self._coldest(segment, now)
        if coldest is None or coldest.soft_pinned:
            return segment.accounts.free, float("-inf")
        return segment.accounts.free, -coldest.last_use_s

    # --------------------------------------------------------------------------------- pins

    def pin(
        self, key: int, digest: int, *, hard: bool | None = None, soft_until: float | None = None
    ) -> None:
        """Change the pins of a key, all its copies; None leaves one as it is. Raises UnknownObject.

        hard         True: never evicted; removal is still possible
        soft_until   evicted only when nothing else is left, until this time; 0.0: like anything else
        """
        first = self._known(key, digest)
        for obj in first.copies or [first]:
            if obj.terms is None:
                obj.terms = Terms()
            if hard is not None:
                obj.terms.hard_pin = hard
            if soft_until is not None:
                obj.terms.soft_until = soft_until
                self._segments[obj.rank].note_soft_pin(soft_until)
            self._segments[obj.rank].note_evictable(obj)

    # ------------------------------------------------------------------------------ removal

    def remove(
        self, key: int, digest: int, now: float, *, rank: int | None = None, force: bool = False
    ) -> int:
        """Take a key out of DRAM, pinned or not; returns how many copies went. What a tier has stays.

        rank    only the copy there
        force   though it is leased: its readers may meet other bytes, and have to check what they got

        A copy that is still being written is given up: at its put_end it stays private to its owner.
        Raises UnknownObject when nothing is there, ObjectInUse for a leased object, or one that its tier
        still has to write (force or not); then all stay.
        """
        self.expire(now)
        first = self._known(key, digest)
        gone = [copy for copy in visible_copies(first) if rank in (None, copy.rank)]
        if not gone:
            raise UnknownObject(f"copy of object {key:016x} on rank", rank or 0)
        if busy := _busy(key, gone, force):
            raise busy
        if rank is None:
            for copy in list(first.copies or ()):
                if copy.state is ObjectState.WRITING:
                    self._leave_copies(copy)
                    copy.key = None
        for copy in gone:
            self._remove(copy)
        self.counters["removals"] += len(gone)
        return len(gone)

    def remove_all(self, now: float, *, group_id: int | None = None, force: bool = False) -> int:
        """`remove` every key (of this group), but for those in use; returns how many keys went."""
        found = [obj for obj in self._visible.values() if group_id in (None, _group(obj))]
        removed = 0
        for obj in found:
            assert obj.key is not None
            try:
                self.remove(obj.key, obj.digest, now, force=force)
            except ObjectInUse:
                continue
            removed += 1
        return removed

    def remove_everywhere(self, keys: Sequence[int], now: float, *, force: bool = False) -> None:
        """Take keys out of DRAM and out of the index of every tier, all or none; tiers have to be told.

        force   also what is leased: whoever reads it does so to the end, then it is freed

        Raises UnknownObject for a key that is nowhere, ObjectInUse for one that `remove` would not take, or
        that is being written under its key: computed, read back from a tier, copied.
        """
        self.expire(now)
        writing = self._being_written()
        for key in keys:
            if key not in self._visible and key not in writing and not self._tier.knows(key):
                raise UnknownObject("key", key)
            if busy := self._in_use(key, writing, force):
                raise busy
        for key in dict.fromkeys(keys):
            self.counters["tier_removals"] += self._tier.knows(key)
            for obj in visible_copies(self._visible[key]) if key in self._visible else ():
                self._retire(obj)
                self.counters["removals"] += 1
        self._events += self._tier.forget(keys)

    def removable(self, now: float, *, force: bool = False) -> tuple[list[int], int]:
        """(every key that `remove_everywhere` would take, how many are in use)."""
        self.expire(now)
        writing = self._being_written()
        known = self._tier.keys().union(self._visible, writing)
        free = sorted(key for key in known if not self._in_use(key, writing, force))
        return free, len(known) - len(free)

    def _being_written(self) -> dict[int, int]:
        """key -> rank."""
        unpublished = self._leases.unpublished()
        writing = (obj for obj in unpublished if obj.state is ObjectState.WRITING)
        return {obj.key: obj.rank for obj in writing if obj.key is not None}

    def _in_use(self, key: int, writing: Mapping[int, int], force: bool) -> ObjectInUse | None:
        if key in writing:
            return ObjectInUse(key, writing[key], "being written")
        first = self._visible.get(key)
        return _busy(key, visible_copies(first), force) if first is not None else None

    # ------------------------------------------------------------------------------- shared

    def _find(self, key: int, digest: int) -> PoolObject | None:
        obj = self._visible.get(key)
        if obj is not None and obj.digest != digest:
            self.counters["digest_mismatches"] += 1
            return None
        return obj

    def _known(self, key: int, digest: int) -> PoolObject:
        obj = self._find(key, digest)
        if obj is None:
            raise UnknownObject("key", key)
        return obj


def _busy(key: int, copies: Sequence[PoolObject], force: bool) -> ObjectInUse | None:
    """Why these copies of a key cannot go now."""
    for copy in copies:
        if copy.unsaved or (copy.held() and not force):
            return ObjectInUse(key, copy.rank, "not yet on SSD" if copy.unsaved else LEASED)
    return None


def _group(obj: PoolObject) -> int:
    return obj.terms.group_id if obj.terms else 0
