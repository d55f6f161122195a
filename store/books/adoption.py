"""Blocks that an earlier directory knew, and what readers of blocks have to compare.

Used through `store.directory`. A conductor that takes over learns from store ranks what segments hold. Nobody
knows which of these blocks were overwritten since: a reader compares their checksums, and a difference is a
miss. Explained in docs/explain/failures.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from store.books.hints import HintVerbs
from store.layout import check_of
from store.objects import HeldBlock, ObjectState, Wanted


class Adoption(HintVerbs):
    """The verbs of adopted blocks, and of checks."""

    def adopt(self, blocks: Sequence[tuple[HeldBlock, Wanted]], now: float, late_s: float) -> int:
        """Make blocks visible that were put under an earlier directory; return how many could be.

        They are told by those who keep them, for evictors the least useful first. Their bytes may have been
        overwritten since, so that readers compare them. To be called before anything is allocated.

        late_s   how long late bytes of earlier transfers may land anywhere
        """
        self._unsure_until = now + late_s
        places = sorted({held.ref for held, _ in blocks}, key=lambda ref: (ref.rank, ref.offset))
        taken = {
            ref
            for ref in places
            if (segment := self._segments.get(ref.rank)) and segment.take_behind(ref.offset, ref.nbytes)
        }
        adopted = 0
        for held, wanted in blocks:
            if held.ref not in taken:
                continue
            taken.remove(held.ref)
            obj = self._object("adopted", wanted, held.ref.rank, ((held.ref.offset, held.ref.nbytes),))
            self._leases.own("adopted", [obj])
            if held.key in self._visible:
                self._remove(obj)
                continue
            obj.sums, obj.last_use_s = held.sums, now
            self._unsure.add(obj.object_id)
            self._publish(obj, held.key, obj.facts, now)
            adopted += 1
        return adopted

    def note_sums(self, object_id: int, checksums: Sequence[int]) -> None:
        """Note the checksums of an object that is never published, for those who read it."""
        if (obj := self._objects.get(object_id)) is not None:
            obj.sums = array("Q", checksums).tobytes()

    @property
    def has_doubts(self) -> bool:
        """Tell whether any object may have been overwritten, so that readers have to compare it."""
        return bool(self._unsure_until or self._unsure)

    def check_of(self, object_id: int, now: float, *, always: bool = False) -> int:
        """Return `layout.check_of` an object, 0 if a reader need not compare it or its checksums are unknown.

        always   compare every object, and not only those that may have been overwritten
        """
        if 0.0 < self._unsure_until <= now:
            self._unsure.update(self._objects)
            self._unsure_until = 0.0
        unsure = always or now < self._unsure_until or object_id in self._unsure
        sums = self.object(object_id).sums if unsure else b""
        return check_of(array("Q", sums)) if sums else 0

    def bad(self, object_ids: Iterable[int]) -> None:
        """Note that a reader found other bytes in these objects than were put. Visible ones are misses now,
        and counted; ids that are gone are ignored."""
        for object_id in object_ids:
            obj = self._objects.get(object_id)
            if obj is not None and obj.state is ObjectState.VISIBLE:
                self.counters["dram_bad_blocks"] += 1
                self._retire(obj)
