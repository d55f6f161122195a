        if chain.salt is None:
            return ()
        size = self.block_tokens
        index = len(known) // (size // self.pages.page_tokens)
        last = min(most_tokens, len(token_ids)) // size
        last = min(last, len(chain.keys))
        previous = self._by_end[known[-1]].key if known else chain.salt
        found = list(known)
        units = units_of(token_ids, size, index, last)
        while index < last:
            block = self._blocks.get(chain.keys[index])
            if block is None:
                break
            if (block.before, block.token_ids) != (previous, next(units)):
                break
            found += block.pages
            previous = block.key
            index += 1
        return tuple(found)
