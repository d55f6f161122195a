"""Where an object goes, and what is evicted for it: the part of the directory that makes room.

Used through `store.directory` alone. Pure: no bytes, no clock. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from store.allocator import Extent, padded_size
from store.errors import LayoutError, PoolFull
from store.ledger import Ledger, Owner, visible_copies
from store.objects import PoolObject, Terms, Wanted
from store.segment import Segment, pool_full


class Placement(Ledger):
    """The books, and room in them for new objects."""

    def _allocate(
        self,
        owner: str,
        wanted: Sequence[Wanted],
        segments: list[Segment],
        node: int | None,
        contiguous: bool,
        now: float,
        first: int | None = None,
    ) -> list[PoolObject]:
        """`Directory.allocate_many`, in these segments."""
        for item in wanted:
            self._check_wanted(item)
        self._relieve(segments, now)
        self._check_room(wanted, segments, now)
        made: list[PoolObject] = []
        try:
            for item in wanted:
                made.append(self._put_start(owner, item, segments, node, contiguous, now, first))
        except PoolFull:
            self.counters["pool_full"] += 1
            for obj in made:
                self._remove(obj)
            raise
        self.counters["puts"] += len(made)
        return made

    def _check_wanted(self, item: Wanted) -> None:
        if item.nbytes < 1:
            raise LayoutError(f"an object of {item.nbytes} B")
        if self.layout is not None and item.key is not None and item.nbytes != self._block_nbytes:
            raise LayoutError(f"a keyed object of {item.nbytes} B; a block has {self._block_nbytes} B")

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
        self,
        owner: str,
        item: Wanted,
        segments: list[Segment],
        node: int | None,
        contiguous: bool,
        now: float,
        first: int | None,
    ) -> PoolObject:
        """One object, WRITING, in the segment with most room or else the coldest block."""
        segment, extents = self._place(item.nbytes, segments, node, contiguous, now, first)
        object_id, self._next_id = self._next_id, self._next_id + 1
        obj = PoolObject(
            object_id,
            owner,
            segment.rank,
            extents[0][0],
            item.nbytes,
            item.key,
            item.digest,
            item.cost_s,
            item.class_id,
            item.parent,
            item.position,
            extents if len(extents) > 1 else None,
        )
        if item.group_id or item.soft_until or item.hard_pin:
            obj.terms = Terms(item.group_id, item.soft_until, item.hard_pin)
        self._objects[object_id] = obj
        record = self._owners.get(owner)
        if record is None:
            record = self._owners[owner] = Owner()
        record.objects.add(object_id)
        return obj

    def _place(
        self,
        nbytes: int,
        segments: list[Segment],
        node: int | None,
        contiguous: bool,
        now: float,
        first: int | None,
    ) -> tuple[Segment, tuple[Extent, ...]]:
        if len(segments) > 1:
            segments = sorted(
                segments, key=lambda s: (s.rank != first, s.node != node, -s.allocator.free_bytes)
            )
        for segment in segments:
            extents = segment.place(nbytes, contiguous)
            if extents is not None:
                return segment, extents
        self.expire(now)
        if len(segments) > 1:
            segments = sorted(segments, key=lambda s: self._coldest(s, now))
        for segment in segments:
            extents = self._evict_for(segment, nbytes, contiguous, now)
            if extents is not None:
                return segment, extents
        raise pool_full(segments[0].allocator.padded(nbytes) if segments else nbytes, segments)

    # ------------------------------------------------------------------------------ eviction

    def _victims(self, segment: Segment, now: float) -> Iterator[PoolObject]:
        """What the segment may evict, in order: cold copies, then as the policy says, soft-pinned last."""
        cold = set()
        for object_id, obj in segment.copies.items():
            if now - obj.last_use_s < self._copy_cold_s:
                break
            if obj.evictable and not obj.soft_pinned(now):
                cold.add(object_id)
                yield obj
        pinned = []
        for key in segment.policy.victims(now):
            obj = self._copy_in(segment, key)
            if obj.evictable and obj.object_id not in cold:
                if obj.soft_pinned(now):
                    pinned.append(obj)
                else:
                    yield obj
        yield from pinned

    def _copy_in(self, segment: Segment, key: int) -> PoolObject:
        """The visible object of this key in this segment."""
        obj = self._visible[key]
        if obj.rank == segment.rank:
            return obj
        return next(copy for copy in visible_copies(obj) if copy.rank == segment.rank)

    def _coldest(self, segment: Segment, now: float) -> tuple[bool, float]:
        """(soft-pinned, last use) of the object that this segment would evict first."""
        for obj in self._victims(segment, now):
            return obj.soft_pinned(now), obj.last_use_s
        return True, float("inf")

    def _evict_for(
        self, segment: Segment, nbytes: int, contiguous: bool, now: float
    ) -> tuple[Extent, ...] | None:
        """Evict in order until there is room for nbytes, and take it; None when there never is."""
        padded = segment.allocator.padded(nbytes)
        while segment.evictable_bytes and segment.reachable_bytes >= padded:
            if not self._evict(segment, padded - segment.allocator.free_bytes, now):
                break
            extents = segment.place(nbytes, contiguous)
            if extents is not None:
                return extents
        return None

    def _evict(self, segment: Segment, nbytes: int, now: float) -> int:
        """Evict nbytes, at least one object and evict_share of the segment; less when there is no more.

        Returns how many objects went.
        """
        short = max(nbytes, int(self._evict_share * segment.allocator.capacity), 1)
        chosen = []
        for obj in self._victims(segment, now):
            chosen.append(obj)
            short -= segment.allocator.padded(obj.nbytes)
            if short <= 0:
                break
        for obj in chosen:
            self.counters["evictions"] += 1
            self.counters["evicted_bytes"] += obj.nbytes
            self.counters["copies_evicted"] += obj.object_id in segment.copies
            self._remove(obj, evicted=True)
        return len(chosen)

    def _relieve(self, segments: Sequence[Segment], now: float) -> None:
        """Evict where more than the high-water mark is used."""
        for segment in segments:
            over = segment.allocator.used_bytes - self._high_water * segment.allocator.capacity
            if over <= 0:
                continue
            self.expire(now)
            if segment.evictable_bytes:
                self._evict(segment, int(over), now)
