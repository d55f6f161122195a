        if chain.salt is None:
            return ()
        size = self.block_tokens // self.pages.page_tokens
        first, end = len(known) // size, most_tokens // self.block_tokens
        before = self._by_end[known[-1]].key if known else chain.salt
        pages = []
        for index, tokens in enumerate(units_of(token_ids, self.block_tokens, first, end), first):
            if index >= len(chain.keys):
                break
            key = chain.keys[index]
            block = self._blocks.get(key)
            if block is None or block.token_ids != tokens or block.before != before:
                break
            pages.extend(block.pages)
            before = key
        return tuple(pages)
