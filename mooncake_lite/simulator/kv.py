"""What the pages of a simulated rank hold, and what blocks in the pool hold.

Used by `runner.py`. `ExactKV` has the emulated KV of every token, for runs with faults; `NoKV` has none. Both
do what the emulated engine does, without its arrays. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from mooncake_lite.engine.emulated import FIRST, emulated_token
from mooncake_lite.simulator.tokens import VOCABULARY, digest_after
from scheduler.instance.step import Chunk


class Content(NamedTuple):
    """The bytes of one block. digests: the emulated KV of its tokens; what follows them is of no meaning.

    rotten   the bytes are not those that were put, and nothing has found that yet
    """

    digests: tuple[int, ...]
    rotten: bool = False

    @property
    def key(self) -> int:
        """Return the key of the block, if it is full."""
        return self.digests[-1] if self.digests else 0

    def sums(self, layers: int) -> list[int]:
        """Return the checksums of these bytes, by layer."""
        if not self.digests:
            return [0] * layers
        return [(hash(self.digests) + layer) % 2**63 ^ self.rotten for layer in range(layers)]


NOTHING = Content(())


class KV(Protocol):
    """The pages of one rank. is_exact: tokens depend on what they hold."""

    is_exact: bool

    def compute(self, chunks: Iterable[Chunk]) -> list[int]:
        """Write the KV of all chunks. Returns a token for each draw, in their order."""

    def copy(self, source: int, target: int) -> None:
        """Copy a page to another one."""

    def put(self, pages: Sequence[int], blocks: Sequence[Content]) -> None:
        """Copy blocks into pages; the last block may have fewer pages."""

    def block(self, pages: Sequence[int]) -> Content:
        """Return what a block in these pages holds; it may have fewer pages than a whole one."""


class NoKV:
    """Pages that hold nothing: every token is 0, and an answer ends with its length."""

    is_exact = False

    def compute(self, chunks: Iterable[Chunk]) -> list[int]:
        """Return 0 for each draw."""
        return [0 for chunk in chunks for _ in chunk.draws]

    def copy(self, source: int, target: int) -> None:
        """Do nothing."""

    def put(self, pages: Sequence[int], blocks: Sequence[Content]) -> None:
        """Do nothing."""

    def block(self, pages: Sequence[int]) -> Content:
        """Return NOTHING."""
        return NOTHING


class ExactKV:
    """Pages with the digests of their tokens, as in engine.EmulatedEngine.

    page_tokens, block_tokens   tokens per page, and per block of the pool
    """

    is_exact = True

    def __init__(self, num_pages: int, page_tokens: int, block_tokens: int) -> None:
        self._page_tokens, self._per_block = page_tokens, block_tokens // page_tokens
        self._pages = [[0] * page_tokens for _ in range(num_pages)]

    def compute(self, chunks: Iterable[Chunk]) -> list[int]:
        """Write the digests of all chunks. Returns a token for each draw, in their order."""
        tokens = []
        for chunk in chunks:
            size, pages = self._page_tokens, chunk.pages
            last = FIRST
            if chunk.start:
                page, offset = divmod(chunk.start - 1, size)
                last = self._pages[pages[page]][offset]
            for position, token in enumerate(chunk.token_ids, chunk.start):
                last = digest_after(last, token)
                self._pages[pages[position // size]][position % size] = last
            tokens += [emulated_token(last, draw, VOCABULARY) for draw in chunk.draws]
        return tokens

    def copy(self, source: int, target: int) -> None:
        """Copy the digests of a page."""
        self._pages[target] = self._pages[source].copy()

    def put(self, pages: Sequence[int], blocks: Sequence[Content]) -> None:
        """Copy the digests of blocks into pages."""
        size = self._page_tokens
        for index, page in enumerate(pages):
            block, part = divmod(index, self._per_block)
            digests = list(blocks[block].digests[part * size : (part + 1) * size])
            self._pages[page] = digests + [0] * (size - len(digests))

    def block(self, pages: Sequence[int]) -> Content:
        """Return the digests of a block."""
        return Content(tuple(digest for page in pages for digest in self._pages[page]))
