        segment = self._segment(rank)
        losers: set[str] = set()
        for obj in list(self._objects.values()):
            if obj.rank == rank:
                if obj.state not in PUBLISHED:
                    losers.add(obj.owner)
                self._remove(obj)
            elif obj.unsaved and self._segments[obj.rank].saver == rank:
                self._segments[obj.rank].set_unsaved(obj, False)
        del self._segments[rank]
        self._order.remove(segment)
        for other in self._segments.values():
            if other.saver == rank:
                other.saver = None
        self._forget_saves(segment)
        self._events += self._tier.remove_rank(rank)
        return sorted(losers)
