"""Pages of an instance whose members share each context: page q of the books is page q of every member.

Stands in for `pages.Pages` in the planner of such an instance (context parallel). Tokens are dealt out in
units, in turn. The units of one round, one on each member, are a row, and lie in the same pages of all:

    turns = 2, a unit of 256 tokens, pages of 16     member 0         member 1
    pages 0 .. 15 of a sequence                      0 .. 255         256 .. 511
    pages 16 .. 31                                   512 .. 767       768 .. 1023

So the books stay those of one rank, and all members need as many pages. A sequence wastes less than a unit on
each member. Explained in docs/explain/several-ranks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.instance.pages import Pages, pages_for


def pages_of_rows(num_tokens: int, page_tokens: int, unit_tokens: int, turns: int) -> int:
    """Return the number of pages of each member that hold the KV of num_tokens tokens."""
    rows, rest = divmod(num_tokens, unit_tokens * turns)
    return rows * (unit_tokens // page_tokens) + pages_for(min(rest, unit_tokens), page_tokens)


def tokens_of_rows(pages: int, page_tokens: int, unit_tokens: int, turns: int) -> int:
    """Return the number of tokens whose KV so many pages of each member hold."""
    rows, rest = divmod(pages, unit_tokens // page_tokens)
    return rows * unit_tokens * turns + rest * page_tokens


def place_in_rows(token: int, page_tokens: int, unit_tokens: int, turns: int) -> tuple[int, int]:
    """Return the member that has a token, and which of the sequence's pages holds it there."""
    row, rest = divmod(token, unit_tokens * turns)
    turn, within = divmod(rest, unit_tokens)
    return turn, row * (unit_tokens // page_tokens) + within // page_tokens


@dataclass(slots=True)
class DealtPages(Pages):
    """Pages that stand for one page on each member. They are in no prefix cache.

    unit_tokens   of a unit, a multiple of the page and of the pool's block; turns: members
    """

    unit_tokens: int = 0
    turns: int = 1

    def needed(self, num_tokens: int) -> int:
        """Return the number of pages that hold the KV of num_tokens tokens."""
        return pages_of_rows(num_tokens, self.page_tokens, self.unit_tokens, self.turns)

    def index(self, token: int) -> int:
        """Return which page of a sequence holds a token."""
        return place_in_rows(token, self.page_tokens, self.unit_tokens, self.turns)[1]

    def of_blocks(self, held: Sequence[int], first: int, count: int, block_tokens: int) -> Sequence[int]:
        """Return the pages of some blocks, one block after the other; the last block may have fewer."""
        size, found = block_tokens // self.page_tokens, list[int]()
        for block in range(first, first + count):
            begin = self.index(block * block_tokens)
            found += held[begin : begin + size]
        return found

    def grow(self, held: list[int], num_tokens: int, new: Sequence[int]) -> int | None:
        """Prepare the pages of one sequence for its last token, which is in any page of a row; see Pages."""
        Pages.take(self, new)
        if len(held) < self.needed(num_tokens):
            held.extend(new)
        elif new:
            at = self.index(num_tokens - 1)
            held[at], shared = new[0], held[at]
            self.used[shared] = self.used[shared] - 1
            return shared
        return None
