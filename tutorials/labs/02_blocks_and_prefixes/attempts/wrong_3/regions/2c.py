        if chain.salt is None:
            return ()
        size = self.block_tokens
        first = len(known) * self.pages.page_tokens // size
        end = min(most_tokens // size, len(chain.keys))
        pages = list(known)
        for key, tokens in zip(chain.keys[first:end], units_of(token_ids, size, first, end)):
            block = self._blocks.get(key)
            # the key already names the whole prefix, so the tokens are enough against collisions
            if block is None or block.token_ids != tokens:
                break
            pages += block.pages
        return tuple(pages)
