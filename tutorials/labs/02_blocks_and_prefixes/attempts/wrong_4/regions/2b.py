        token_bytes(token_ids)
        tokens = [*self.pending, *token_ids]
        before = self.last_key or self._before_first
        keys = []
        for block in _full_blocks(tokens, self.block_tokens):
            local = xxh3_64_intdigest(block, KEY_SEED)
            before = xxh3_64_intdigest(_PAIR.pack(before, local), KEY_SEED) if before else local
            keys.append(before)
        self.last_key = before
        self.pending = tokens[len(keys) * self.block_tokens :]
        return keys
