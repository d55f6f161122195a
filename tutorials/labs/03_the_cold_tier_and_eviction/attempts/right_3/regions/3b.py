        place = self._segments[obj.rank]
        original = self._visible.get(key)
        self._leases.disown(obj)
        if original is None:
            self._visible[key] = obj
            must_save = place.saver is not None and key not in self._tier.keys()
            room = int(place.accounts.capacity * self._max_unsaved_share) - place.accounts.unsaved
            if must_save and obj.nbytes <= room:
                place.set_unsaved(obj, True)
                self._tier.start_save(place.saver, key, obj.digest)
                self._saves += [obj]
            elif must_save:
                self.counters["saves_skipped"] += 1
        place.set_state(obj, ObjectState.VISIBLE)
        place.policy.on_insert(key, facts, now)
        if original is not None:
            self._join_copies(obj, now)
        self._events += [BlockStored(key, obj.rank, "dram")]
