"""Page accounting: which pages of one rank's KV cache are free.

Used by the planner, which owns page numbers; the runner owns the bytes. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Return the number of pages that hold the KV of num_tokens tokens."""
    return -(-num_tokens // page_tokens)


@dataclass(slots=True)
class Pages:
    """The pages of one KV cache.

        num_pages     pages of the cache, numbered from 0
        page_tokens   tokens per page
        free          numbers of the free pages; the last one is taken first
        held          numbers of the pages that were taken

    Invariant: free and held are disjoint, and together they are all pages.
    """

    num_pages: int
    page_tokens: int
    free: list[int] = field(init=False)
    held: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_pages - 1, -1, -1))

    def needed(self, num_tokens: int) -> int:
        """Return the number of pages that hold the KV of num_tokens tokens."""
        return pages_for(num_tokens, self.page_tokens)

    def take(self, pages: Iterable[int]) -> None:
        """Take the pages that a PageDraft chose, in its order."""
        for page in pages:
            assert self.free[-1:] == [page], f"page {page} is not the next free page"
            self.held.add(self.free.pop())

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages that were taken."""
        for page in pages:
            assert page in self.held, f"page {page} is given back but was not taken"
            self.held.remove(page)
            self.free.append(page)

    def check(self) -> None:
        """Assert the invariant."""
        assert sorted([*self.free, *self.held]) == list(range(self.num_pages))


class PageDraft:
    """Choose free pages for a step without taking them."""

    def __init__(self, pages: Pages) -> None:
        self._free = pages.free
        self.num_free = len(pages.free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Choose `count` pages, or None when fewer are free."""
        if count > self.num_free:
            return None
        chosen = self._free[self.num_free - count : self.num_free]
        self.num_free -= count
        return tuple(reversed(chosen))
