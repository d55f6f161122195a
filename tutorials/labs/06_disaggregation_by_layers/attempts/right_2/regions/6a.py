        present = record.present
        if not (self._prefetches and record.keys and record.request_id in self._state):
            return
        before = present.hinted.get(present.decode, 0)
        there = self.room.written(record, now)
        count = len(there)
        rest = [*present.load, *present.store][before:]
        if count > before and (count - before) * 8 >= len(rest):
            present.hinted[present.decode] = count
            hint = fx.Prefetch(
                present.decode, record.request_id, record.attempt, there, count * self._block_tokens
            )
            self._emit(hint)
