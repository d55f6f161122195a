        seg = self._segments[obj.rank]
        first = self._visible.setdefault(key, obj)
        seg.set_state(obj, ObjectState.VISIBLE)
        self._leases.disown(obj)
        seg.policy.on_insert(key, facts, now)
        if first is not obj:
            self._join_copies(obj, now)
        elif seg.saver is not None and not self._tier.knows(key):
            share = (seg.accounts.unsaved + obj.nbytes) / seg.accounts.capacity
            if share <= self._max_unsaved_share:
                self._tier.start_save(seg.saver, key, obj.digest)
                self._saves.append(obj)
                seg.set_unsaved(obj, True)
            else:
                self.counters["saves_skipped"] += 1
        self._events.append(BlockStored(key, obj.rank, "dram"))
