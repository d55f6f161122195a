        present = record.present
        if not (self._prefetches and record.keys and record.request_id in self._state):
            return
        blocks = self.room.written(record, now)
        known = present.hinted.get(present.decode, 0)
        new, missing = len(blocks) - known, len(present.places) - known
        if new < 1 or 8 * new < missing:
            return
        present.hinted[present.decode] = len(blocks)
        num_tokens = len(blocks) * self._block_tokens
        self._emit(fx.Prefetch(present.decode, record.request_id, record.attempt, blocks, num_tokens))
