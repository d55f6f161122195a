        gone = self._segment(rank)
        inside = [obj for obj in self._objects.values() if obj.rank == rank]
        owners = {obj.owner for obj in inside if obj.state not in PUBLISHED}
        readers = {lessee for obj in inside for lessee in obj.lessees}
        for obj in inside:
            self._remove(obj)
        self._order.remove(gone)
        self._segments.pop(rank)
        orphans = {other.rank: other for other in self._segments.values() if other.saver == rank}
        for other in orphans:
            self.set_saver(other, None)
        waiting = [obj for obj in self._objects.values() if obj.unsaved and obj.rank in orphans]
        for obj in waiting:
            orphans[obj.rank].set_unsaved(obj, False)
        self._forget_saves(gone)
        self._events.extend(self._tier.remove_rank(rank))
        return sorted(owners | readers)
