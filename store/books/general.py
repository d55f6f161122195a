"""Verbs for single objects, beyond those for runs of KV blocks: copies, pins, removal.

The second half of `store.directory`, used through it alone. Pure: time is an argument, and no bytes move
here: the caller that asks for a copy writes it. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from store.books.allocation import Allocation
from store.books.ledger import visible_copies
from store.books.segment_order import Target
from store.errors import LEASED, CopyExists, ObjectInUse, UnknownObject, WrongState
from store.objects import ObjectState, Pins, PoolObject, Wanted


class GeneralVerbs(Allocation):
    """Verbs by key. Unlike the blocks of a chain, each general object is found or missed by itself."""

    def locations(self, key: int, digest: int) -> list[PoolObject]:
        """Return the visible copies of a key, in the order of put_start; [] for a miss. Leases nothing."""
        obj = self._find(key, digest)
        return visible_copies(obj) if obj else []

    # ------------------------------------------------------------------------------- copies

    def put_copy(
        self, object_id: int, *, now: float, owner: str | None = None, rank: int | None = None
    ) -> PoolObject:
        """Allocate a copy of an object (put_start), WRITING or VISIBLE, on a segment that has none yet.

        owner   of the copy; None: that of the object
        rank    only this rank's segment

        put_end makes the copy visible beside the others, and may come before that of the original. Raises
        UnknownObject, WrongState for an object that is not, or will never be, found by its key, CopyExists
        when rank has a copy, PoolFull (also when every segment has one).
        """
        source = self.object(object_id)
        if source.key is None or source.state not in (ObjectState.WRITING, ObjectState.VISIBLE):
            raise WrongState(object_id, source.state.value, "keyed and being written or visible")
        taken = frozenset(copy.rank for copy in source.copies or [source])
        if rank is not None and self._segment(rank).rank in taken:
            raise CopyExists(source.key, rank)
        target = Target(rank, without=taken)
        pins = source.pins or Pins()
        wanted = Wanted(
            source.nbytes,
            source.key,
            source.digest,
            source.cost_s,
            source.class_id,
            pins.soft_until,
            pins.hard_pin,
            source.parent,
            source.position,
        )
        (copy,) = self._allocate(owner or source.owner, [wanted], target, True, now)
        if source.copies is None:
            source.copies = [source]
        copy.copies = source.copies
        copy.copies.append(copy)
        copy.sums = source.sums  # put_end compares with these, even if the source is found bad meanwhile
        return copy

    def replicate(
        self, owner: str, key: int, digest: int, *, rank: int, now: float, until: float, idle_s: float = 0.0
    ) -> tuple[PoolObject, PoolObject]:
        """Allocate a copy of a visible key on this rank's segment; return (object to read, object to write).

        idle_s   evict for the copy only objects that were not used for so long

        The object to read is leased to the owner until `until`, or release(owner). Raises UnknownObject for a
        key or a rank that is not there, CopyExists, PoolFull.
        """
        segment = self._segment(rank)
        source = self._nearest(self._known(key, digest), None, segment.node)
        free, minus_used_s = self.space_for_copies(rank, now)
        if idle_s and free < source.padded and -minus_used_s > now - idle_s:
            raise segment.accounts.pool_full(source.padded)
        copy = self.put_copy(source.object_id, now=now, owner=owner, rank=rank)
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
            if obj.pins is None:
                obj.pins = Pins()
            if hard is not None:
                obj.pins.hard_pin = hard
            if soft_until is not None:
                obj.pins.soft_until = soft_until
                self._segments[obj.rank].note_soft_pin(soft_until)
            self._segments[obj.rank].note_evictable(obj)

    # ------------------------------------------------------------------------------ removal

    def remove(
        self, key: int, digest: int, now: float, *, rank: int | None = None, force: bool = False
    ) -> int:
        """Remove a key from DRAM, pinned or not; return how many copies were removed. Tiers keep it.

        rank    remove only the copy there
        force   remove leased copies too: readers may then get other bytes, and must check what they read

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

    def remove_everywhere(self, keys: Sequence[int], now: float, *, force: bool = False) -> None:
        """Remove keys from DRAM and from the index of every tier, all or none. The caller tells the tiers.

        force   remove leased objects too: their readers read to the end, then the objects are freed

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
        """Return (every key that `remove_everywhere` would remove, how many other keys are in use)."""
        self.expire(now)
        writing = self._being_written()
        known = self._tier.keys().union(self._visible, writing)
        free = sorted(key for key in known if not self._in_use(key, writing, force))
        return free, len(known) - len(free)

    def _being_written(self) -> dict[int, int]:
        """Return {key: rank} of the objects that are being written."""
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
    """Return the error that says why these copies of a key cannot be removed now; None if they can."""
    for copy in copies:
        if copy.unsaved or (copy.held() and not force):
            return ObjectInUse(key, copy.rank, "not yet on SSD" if copy.unsaved else LEASED)
    return None
