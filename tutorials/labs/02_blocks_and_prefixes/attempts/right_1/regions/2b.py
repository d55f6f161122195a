        token_bytes(token_ids)  # raises TokenError while nothing is changed yet
        keys = []
        for token in token_ids:
            self.pending.append(token)
            if len(self.pending) < self.block_tokens:
                continue
            local = xxh3_64_intdigest(token_bytes(self.pending), KEY_SEED)
            self.pending.clear()
            if self.last_key is not None:
                self.last_key = xxh3_64_intdigest(_PAIR.pack(self.last_key, local), KEY_SEED)
            elif self._before_first is not None:
                self.last_key = xxh3_64_intdigest(_PAIR.pack(self._before_first, local), KEY_SEED)
            else:
                self.last_key = local
            keys.append(self.last_key)
        return keys
