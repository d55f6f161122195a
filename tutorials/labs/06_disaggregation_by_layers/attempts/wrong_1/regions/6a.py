        if not self._prefetches or record.request_id not in self._state or not record.keys:
            return
        present = record.present
        blocks = self.room.written(record, now)
        known = present.hinted.get(present.decode, 0)
        total = len(present.load) + len(present.store)
        if len(blocks) - known >= max(1, total / 8):
            present.hinted[present.decode] = len(blocks)
            tokens = len(blocks) * self._block_tokens
            self._emit(fx.Prefetch(present.decode, record.request_id, record.attempt, blocks, tokens))
