        segment = self._segments[obj.rank]
        first = self._visible.setdefault(key, obj)
        self._leases.disown(obj)
        if first is obj and segment.saver is not None and not self._tier.knows(key):
            most = self._max_unsaved_share * segment.accounts.capacity
            if segment.accounts.unsaved + obj.nbytes <= most:
                # before it is VISIBLE: it must not be evictable for a moment
                segment.set_unsaved(obj, True)
                self._tier.start_save(obj.rank, key, obj.digest)
                self._saves.append(obj)
            else:
                self.counters["saves_skipped"] += 1
        segment.set_state(obj, ObjectState.VISIBLE)
        segment.policy.on_insert(key, facts, now)
        if first is not obj:
            self._join_copies(obj, now)
        self._events.append(BlockStored(key, obj.rank, "dram"))
