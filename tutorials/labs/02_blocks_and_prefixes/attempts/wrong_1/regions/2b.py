        tokens = self.pending + list(token_ids)
        keys = []
        key = self.last_key
        for block in _full_blocks(tokens, self.block_tokens):
            local = xxh3_64_intdigest(block, KEY_SEED)
            if key is not None:
                key = xxh3_64_intdigest(_PAIR.pack(local, key), KEY_SEED)
            elif self._before_first is not None:
                key = xxh3_64_intdigest(_PAIR.pack(local, self._before_first), KEY_SEED)
            else:
                key = local
            keys.append(key)
        self.last_key = key
        self.pending = tokens[len(keys) * self.block_tokens :]
        return keys
