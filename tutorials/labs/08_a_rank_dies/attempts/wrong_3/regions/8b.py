        segment = self._segment(rank)
        losers: set[str] = set()
        for obj in list(self._objects.values()):
            if obj.rank == rank:
                if obj.state not in PUBLISHED:
                    losers.add(obj.owner)
                losers.update(obj.lessees)
                self._remove(obj)
        del self._segments[rank]
        self._order.remove(segment)
        self._forget_saves(segment)
        for obj in self._objects.values():
            if obj.unsaved and self._segments[obj.rank].saver == rank:
                self._segments[obj.rank].set_unsaved(obj, False)
        for other in self._segments.values():
            if other.saver == rank:
                other.saver = None
        self._events += self._tier.remove_rank(rank)
        return sorted(losers)
