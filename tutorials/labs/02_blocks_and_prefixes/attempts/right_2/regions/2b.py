        data = b"".join((token_bytes(self.pending), token_bytes(token_ids)))
        size = 4 * self.block_tokens
        keys = []
        key = self._before_first if self.last_key is None else self.last_key
        for start in range(0, len(data) - size + 1, size):
            local = xxh3_64_intdigest(data[start : start + size], KEY_SEED)
            key = local if key is None else xxh3_64_intdigest(_PAIR.pack(key, local), KEY_SEED)
            keys.append(key)
        if keys:
            self.last_key = keys[-1]
        self.pending = [*self.pending, *token_ids][len(keys) * self.block_tokens :]
        return keys
