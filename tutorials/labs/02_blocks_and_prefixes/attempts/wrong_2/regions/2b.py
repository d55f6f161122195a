        self.pending.extend(token_ids)
        keys = []
        for block in _full_blocks(self.pending, self.block_tokens):
            local = xxh3_64_intdigest(block, KEY_SEED)
            before = self.last_key if self.last_key is not None else self._before_first
            if before is None:
                self.last_key = local
            else:
                self.last_key = xxh3_64_intdigest(_PAIR.pack(before, local), KEY_SEED)
            keys.append(self.last_key)
        self.pending = self.pending[len(keys) * self.block_tokens :]
        return keys
