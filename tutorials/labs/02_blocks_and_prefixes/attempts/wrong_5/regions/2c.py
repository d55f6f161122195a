        if chain.salt is None:
            return ()
        end = min(most_tokens // self.block_tokens, len(chain.keys))
        before = chain.salt
        pages = []
        for key, tokens in zip(chain.keys, units_of(token_ids, self.block_tokens, 0, end)):
            if key not in self._blocks:
                break
            if self._blocks[key].token_ids != tokens or self._blocks[key].before != before:
                break
            pages.extend(self._blocks[key].pages)
            before = key
        return tuple(pages)
