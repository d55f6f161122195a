"""Allocation: the part of the directory that finds space for new objects, and evicts others for them.

Used through `store.directory` alone. Pure: no bytes, no clock. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from store.allocator import ALIGNMENT, Extent, padded_size
from store.books.ledger import Ledger
from store.books.segment import Segment
from store.books.segment_order import Target
from store.errors import LayoutError, PoolFull
from store.objects import Pins, PoolObject, Wanted


class Allocation(Ledger):
    """The books of a pool, and the steps that find space for new objects."""

    def _allocate(
        self, owner: str, wanted: Sequence[Wanted], target: Target, contiguous: bool, now: float
    ) -> list[PoolObject]:
        """Allocate in the segments of the target."""
        for item in wanted:
            self._check_wanted(item)
        self._check_room(wanted, target, now)
        made: list[PoolObject] = []
        try:
            while len(made) < len(wanted):
                self._put_start(owner, wanted, made, target, contiguous, now)
        except PoolFull:
            self.counters["pool_full"] += 1
            for obj in made:
                self._remove(obj)
            raise
        self.counters["puts"] += len(made)
        return made

    def _allocate_near(
        self, owner: str, wanted: Sequence[Wanted], target: Target, contiguous: bool, now: float
    ) -> list[PoolObject]:
        """Allocate many, where there are racks in that of the target's node if it has the space."""
        if self.has_racks and target.node is not None and target.rank is target.first is None:
            rack, rack_of = self.rack_of(target.node), self.rack_of
            others = frozenset(rank for rank, one in self._segments.items() if rack_of(one.node) != rack)
            with suppress(PoolFull):
                return self._allocate(owner, wanted, target._replace(without=others), contiguous, now)
        return self._allocate(owner, wanted, target, contiguous, now)

    def _join_family(self, obj: PoolObject, first: PoolObject | None) -> None:
        """Make an object a copy of one that is visible, if they are equal and its rack has no other one."""
        if first is None or not self.has_racks or obj.copies is not None:
            return
        family, rack_of = first.copies or [first], self.rack_of
        racks = {rack_of(self._segments[copy.rank].node) for copy in family}
        is_new = rack_of(self._segments[obj.rank].node) not in racks
        if is_new and (obj.digest, obj.sums) == (first.digest, first.sums):
            family.append(obj)
            first.copies = obj.copies = family

    def _check_wanted(self, item: Wanted) -> None:
        if item.nbytes < 1:
            raise LayoutError(f"an object of {item.nbytes} B")
        if self.layout is not None and item.key is not None and item.nbytes != self._block_nbytes:
            raise LayoutError(f"a keyed object of {item.nbytes} B; a block has {self._block_nbytes} B")

    def _check_room(self, wanted: Sequence[Wanted], target: Target, now: float) -> None:
        """Raise PoolFull, before anything is evicted, when the sizes alone rule it out."""
        needed = sum([padded_size(item.nbytes) for item in wanted])
        if self._order.accounts(target).reachable >= needed:
            return
        self.expire(now)
        if self._order.accounts(target).reachable < needed:
            self.counters["pool_full"] += 1
            raise self._order.accounts(target).pool_full(needed)

    def will_fit(self, sizes: Sequence[int], rank: int | None = None) -> bool:
        """Tell whether objects of these sizes, each in one range, can be allocated some day.

        rank   this rank's segment only; None: any

        The answer assumes that every object is freed some day except those that are pinned hard, and those
        that a writer which cannot be reached may still write. False is
        certain. True is certain when all sizes are equal, as those of KV blocks are.
        """
        counts = Counter(map(padded_size, sizes))
        kept = [obj for obj in map(self._objects.get, self._late.held) if obj and rank in (None, obj.rank)]
        for size in (ALIGNMENT, *counts):
            needed = sum(count * (other // size) for other, count in counts.items())
            if needed > self._order.places(size, rank) - sum(obj.padded // size for obj in kept):
                return False
        return True

    def _put_start(
        self,
        owner: str,
        wanted: Sequence[Wanted],
        made: list[PoolObject],
        target: Target,
        contiguous: bool,
        now: float,
    ) -> None:
        """Make the next objects, WRITING: all of one size that fit into the segment of the object before.

        If none fits there, make one object in the segment with the most free space, or else where eviction
        frees the coldest block.
        """
        nbytes = wanted[len(made)].nbytes
        segment = self._segments[made[-1].rank] if made else None
        places = []
        if segment and (room := segment.accounts.free // padded_size(nbytes)):
            rest = wanted[len(made) : len(made) + room]
            same = itertools.takewhile(lambda item: item.nbytes == nbytes, rest)
            places = segment.place(nbytes, contiguous, len(list(same)))
        if not segment or not places:
            class_id = wanted[len(made)].class_id
            segment, places = self._place(nbytes, padded_size(nbytes), target, contiguous, class_id, now)
        new = [
            self._object(owner, item, segment.rank, extents)
            for item, extents in zip(wanted[len(made) :], places)
        ]
        self._leases.own(owner, new)
        made += new

    def _object(self, owner: str, item: Wanted, rank: int, extents: tuple[Extent, ...]) -> PoolObject:
        """Enter a new object into the books of objects."""
        object_id, self._next_id = self._next_id, self._next_id + 1
        obj = self._objects[object_id] = PoolObject(
            object_id,
            owner,
            rank,
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
        if item.soft_until or item.hard_pin:
            obj.pins = Pins(item.soft_until, item.hard_pin)
        return obj

    def _place(
        self, nbytes: int, padded: int, target: Target, contiguous: bool, class_id: int, now: float
    ) -> tuple[Segment, list[tuple[Extent, ...]]]:
        """Take space for an object, by eviction if necessary. Raises PoolFull."""
        found = self._place_free(nbytes, padded, target, contiguous)
        if found is None and self.expire(now):
            found = self._place_free(nbytes, padded, target, contiguous)
        if found is not None:
            return found
        for segment in self._order.by_coldness(target, now):
            places = self._evict_for(segment, nbytes, padded, contiguous, class_id, now)
            if places:
                return segment, places
        raise self._order.accounts(target).pool_full(padded)

    def _place_free(
        self, nbytes: int, padded: int, target: Target, contiguous: bool
    ) -> tuple[Segment, list[tuple[Extent, ...]]] | None:
        """Take space for an object without eviction; None when no segment has a large enough hole."""
        for segment in self._order.by_room(padded, target):
            places = segment.place(nbytes, contiguous)
            if places:
                return segment, places
        return None

    # ------------------------------------------------------------------------------ eviction

    def _evict_for(
        self, segment: Segment, nbytes: int, padded: int, contiguous: bool, class_id: int, now: float
    ) -> list[tuple[Extent, ...]]:
        """Evict in order until nbytes fit, and take the space; return [] when they never fit."""
        accounts = segment.accounts
        while accounts.evictable and accounts.reachable >= padded:
            if not self._evict(segment, padded - accounts.free, class_id, now):
                break
            places = segment.place(nbytes, contiguous)
            if places:
                return places
        return []

    def _evict(self, segment: Segment, nbytes: int, class_id: int, now: float) -> int:
        """Evict nbytes for a class, but at least one object.

        Evicts less when nothing more may be evicted. Returns the number of evicted objects.
        """
        short = max(nbytes, 1)
        gone = 0
        while short > 0 and (chosen := self._next_victims(segment, short, class_id, now)):
            for obj in chosen:
                short -= obj.padded
                self.counters["evictions"] += 1
                self.counters["evicted_bytes"] += obj.nbytes
                self.counters["copies_evicted"] += obj.object_id in segment.copies
                self._remove(obj, evicted=True)
            gone += len(chosen)
        return gone

    def _next_victims(self, segment: Segment, nbytes: int, class_id: int, now: float) -> list[PoolObject]:
        """Choose objects of nbytes in all to evict for a class.

        Chooses only one where an eviction may protect the other objects (class shares).
        """
        one_by_one = segment.policy.spared(class_id) > 0
        chosen: list[PoolObject] = []
        for obj in self._victims(segment, now, class_id):
            chosen.append(obj)
            nbytes -= obj.padded
            if nbytes <= 0 or one_by_one:
                break
        return chosen
