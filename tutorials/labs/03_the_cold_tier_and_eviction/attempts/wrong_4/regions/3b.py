        segment = self._segments[obj.rank]
        is_copy = key in self._visible
        self._leases.disown(obj)
        segment.set_state(obj, ObjectState.VISIBLE)
        segment.policy.on_insert(key, facts, now)
        if is_copy:
            self._join_copies(obj, now)
            return
        self._visible[key] = obj
        self._events.append(BlockStored(key, obj.rank, "dram"))
        if segment.saver is None or self._tier.knows(key):
            return
        most = self._max_unsaved_share * segment.accounts.capacity
        if segment.accounts.unsaved + obj.nbytes > most:
            self.counters["saves_skipped"] += 1
            return
        segment.set_unsaved(obj, True)
        self._tier.start_save(segment.saver, key, obj.digest)
        self._saves.append(obj)
