        present = record.present
        blocks = self.room.written(record, now)
        known = max(present.hinted.values(), default=0)
        missing = len(present.load) + len(present.store) - known
        if len(blocks) - known >= max(1, missing / 8):
            present.hinted[present.decode] = len(blocks)
            tokens = len(blocks) * self._block_tokens
            self._emit(fx.Prefetch(present.decode, record.request_id, record.attempt, blocks, tokens))
