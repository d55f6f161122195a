"""Prefix sharing by hash: whole blocks, found by the keys that the pool uses for them.

One of the forms of prefix.PrefixCache. The idea is vLLM's: sequences share the blocks of a prefix (Kwon et
al. 2023, section 4.4), and automatic prefix caching finds them by hash. A key names a block and its whole
prefix, so a dictionary from keys to pages is all that is needed. Explained in docs/explain/prefix-sharing.md.

    chain.keys     k0            k1            k2           one per block, each a hash of (key before, tokens)
    blocks[k]      [7 2 9 4]     [1 3 8 5]     not there    the block's pages: k0 and k1 are a match
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler.instance.pages import Pages
from scheduler.instance.prefix import Chain, PrefixCache, units_of


@dataclass(frozen=True, slots=True)
class Block:
    """A block in the cache.

        before      key of the block before it; the salt for the first block
        token_ids   its tokens
        pages       where its KV lies

    Keys have 64 bits, so two prefixes can collide, or can be made to. A block is a hit if its tokens and the
    block before it are those of the sequence, and that block is a hit itself.
    """

    key: int
    before: int | bytes
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(slots=True)
class HashPrefix(PrefixCache):
    """The cached blocks by key.

        pages          of the rank; the cache marks those that it holds
        block_tokens   tokens per block, a multiple of the page

    Invariant: every block's predecessor is cached too, and the pages of a block are all used or all idle.
    """

    pages: Pages
    block_tokens: int
    _blocks: dict[int, Block] = field(init=False, default_factory=dict)
    _by_end: dict[int, Block] = field(init=False, default_factory=dict)  # by the last page of the block

    def __post_init__(self) -> None:
        assert self.block_tokens % self.pages.page_tokens == 0, "a block is not a whole number of pages"

    @property
    def unit_tokens(self) -> int:
        """Return the tokens of a block."""
        return self.block_tokens

    def match(
        self, chain: Chain, token_ids: Sequence[int], most_tokens: int, known: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the pages of the longest leading run of blocks, of at most most_tokens tokens.

        known   pages of an earlier match of these tokens that are still cached: the result begins with them,
                and continues with the pages that are found after them

        A block continues the run if the cache holds it under its key, with its tokens, after the block before
        it. Equal keys alone do not suffice: they can collide, or be forged. Looks up each key after `known`
        once, up to the first one that does not continue the run. A chain without a salt matches nothing.
        """
        # labs:begin 2c
        if chain.salt is None:
            return ()
        found: list[int] = []
        start = len(known) * self.pages.page_tokens // self.block_tokens
        before: int | bytes = self._by_end[known[-1]].key if known else chain.salt
        units = units_of(token_ids, self.block_tokens, start, most_tokens // self.block_tokens)
        for key, tokens in zip(itertools.islice(chain.keys, start, None), units):
            block = self._blocks.get(key)
            if block is None or block.token_ids != tokens or block.before != before:
                break
            found += block.pages
            before = key
        return (*known, *found)
        # labs:end 2c

    def insert(self, chain: Chain, token_ids: Sequence[int], pages: list[int], num_tokens: int) -> None:
        """Note that the first num_tokens tokens are computed and lie in these pages of a sequence.

        A block whose key belongs to other tokens stays out, and so does everything after it. The same holds
        for a block that branches of a request share in part, because they continue in different pages of it.
        It comes in when one branch is left.
        """
        if chain.salt is None:
            return
        size = self.block_tokens // self.pages.page_tokens
        end = num_tokens // self.block_tokens
        known = next((n for n in range(end, 0, -1) if pages[n * size - 1] in self._by_end), 0)
        before = self._by_end[pages[known * size - 1]].key if known else chain.salt
        for index, tokens in enumerate(units_of(token_ids, self.block_tokens, known, end), known):
            key = chain.keys[index]
            own = pages[index * size : (index + 1) * size]
            block = self._blocks.get(key)
            if block is None and len({self.pages.used[page] for page in own}) == 1:
                self._add(Block(key, before, tokens, tuple(own)))
            elif block is not None and block.token_ids == tokens and block.before == before:
                self.pages.share(block.pages)
                self.pages.give_back(own)
                pages[index * size : (index + 1) * size] = block.pages
            else:
                break
            before = key

    def victims(self) -> Iterator[tuple[int, ...]]:
        """Yield the pages of idle blocks, those that were left first in front."""
        return (self._by_end[page].pages for page in self.pages.idle if page in self._by_end)

    def drop(self, pages: Sequence[int]) -> None:
        """Evict whole blocks."""
        blocks = [self._by_end.pop(page) for page in pages if page in self._by_end]
        assert [page for block in blocks for page in block.pages] == list(pages), (
            "a part of a block is dropped"
        )
        for block in blocks:
            del self._blocks[block.key]
            self._note(block.key, came_in=False)
        self.pages.uncache(pages)

    def clear(self) -> None:
        """Forget all blocks."""
        self.drop([page for block in self._blocks.values() for page in block.pages])

    def held(self) -> list[int]:
        """Return the keys of all blocks, and drain."""
        self._came_in.clear()
        return list(self._blocks)

    def check(self) -> None:
        """Assert the invariants."""
        assert list(self._by_end.values()) == list(self._blocks.values())
        held = [page for block in self._blocks.values() for page in block.pages]
        assert len(held) == len(set(held)), "a page belongs to two blocks"
        assert set(held) == self.pages.cached.keys()
        for key, block in self._blocks.items():
            assert block.key == key
            assert len(block.token_ids) == self.block_tokens
            assert len(block.pages) * self.pages.page_tokens == self.block_tokens
            assert len({page in self.pages.idle for page in block.pages}) == 1, "a block is idle in part"
            assert isinstance(block.before, bytes) or block.before in self._blocks, "a block follows none"

    def _add(self, block: Block) -> None:
        self._blocks[block.key] = self._by_end[block.pages[-1]] = block
        self._note(block.key, came_in=True)
        self.pages.cache(block.pages)
