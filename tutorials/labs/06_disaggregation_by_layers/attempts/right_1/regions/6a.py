        if not self._prefetches or record.request_id not in self._state or not record.keys:
            return
        present = record.present
        rank = present.decode
        blocks = self.room.written(record, now)
        known = present.hinted.get(rank, 0)
        new = len(blocks) - known
        unknown = len(present.load) + len(present.store) - known
        if new < 1 or 8 * new < unknown:
            return
        present.hinted[rank] = len(blocks)
        tokens = len(blocks) * self._block_tokens
        self._emit(fx.Prefetch(rank, record.request_id, record.attempt, blocks, tokens))
