        segment = self._segment(rank)
        names = []
        for object_id in sorted(self._objects):
            obj = self._objects[object_id]
            home = self._segment(obj.rank)
            if home is segment:
                names += obj.lessees if obj.state in PUBLISHED else [obj.owner, *obj.lessees]
                self._remove(obj)
            elif home.saver == rank and obj.unsaved:
                home.set_unsaved(obj, False)
        self._order.remove(segment)
        del self._segments[rank]
        for other in list(self._segments):
            if self._segments[other].saver == rank:
                self.set_saver(other, None)
        self._forget_saves(segment)
        self._events += self._tier.remove_rank(rank)
        return sorted(set(names))
