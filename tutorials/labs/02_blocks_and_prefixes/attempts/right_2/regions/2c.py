        if chain.salt is None:
            return ()
        size = self.block_tokens
        done = len(known) * self.pages.page_tokens // size
        units = units_of(token_ids, size, done, most_tokens // size)
        keys = chain.keys[done:]
        start = self._by_end[known[-1]].key if known else chain.salt

        def continues(step):
            tokens, before, block = step
            return block is not None and block.before == before and block.token_ids == tokens

        cached = map(self._blocks.get, keys)
        steps = zip(units, itertools.chain([start], keys), cached)
        run = itertools.takewhile(continues, steps)
        return (*known, *itertools.chain.from_iterable(block.pages for _, _, block in run))
