"""Page accounting: the pages of one rank's KV cache that are free, in use, or kept for later sequences.

Used by the planner, which owns page numbers; the runner owns the bytes. It knows no requests. Reference
counts as in vLLM (Kwon et al. 2023, section 4.4). Explained in docs/explain/prefix-sharing.md.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from itertools import islice

from scheduler.instance.prefix import PrefixCache


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Return the number of pages that hold the KV of num_tokens tokens."""
    return -(-num_tokens // page_tokens)


@dataclass(slots=True)
class Pages:
    """The pages of one KV cache, and the number of sequences that use each.

        num_pages     pages of the cache, numbered from 0
        page_tokens   tokens per page
        free          numbers of the free pages; the last one is taken first
        used          page -> number of sequences that use it, at least 1
        idle          cached pages that no sequence uses, in the order in which their last users left
        cached        page whose KV is in the prefix cache, used or idle -> when it came in, as a number
        retained      cached page that is evicted after all others -> until when, in seconds
        num_cached    pages that have come into the cache so far, which numbers the next one

            free --take--> used by 1 --share--> used by 2 --share--> ...     give_back: one user less
            used by 1 --give_back--> free                                    a page that is not cached
            used by 1 --give_back--> idle --share--> used by 1               a cached page
                                     idle --uncache--> free
            used by 2 --grow--> used by 1                                    the writer gets a copy

    Invariant: free, used and idle are disjoint, and together they are all pages. A cached page is not free.
    An idle page is cached.
    """

    num_pages: int
    page_tokens: int
    free: deque[int] = field(init=False)
    used: dict[int, int] = field(init=False, default_factory=dict)
    idle: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)
    cached: dict[int, int] = field(init=False, default_factory=dict)
    retained: dict[int, float] = field(init=False, default_factory=dict)
    num_cached: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.free = deque(range(self.num_pages - 1, -1, -1))

    @property
    def held(self) -> KeysView[int]:
        """Return the numbers of the pages that sequences use."""
        return self.used.keys()

    def needed(self, num_tokens: int) -> int:
        """Return the number of pages that hold the KV of num_tokens tokens."""
        return pages_for(num_tokens, self.page_tokens)

    def index(self, token: int) -> int:
        """Return which page of a sequence holds a token."""
        return token // self.page_tokens

    def of_blocks(self, held: Sequence[int], first: int, count: int, block_tokens: int) -> Sequence[int]:
        """Return the pages of some blocks, one block after the other; the last block may have fewer."""
        size = block_tokens // self.page_tokens
        return held[first * size : (first + count) * size]

    def take(self, pages: Sequence[int]) -> None:
        """Take free pages for one sequence: those that a PageDraft chose, in its order."""
        for page in pages:
            assert page == (self.free[-1] if self.free else None), f"page {page} is not the next free page"
            self.used[self.free.pop()] = 1

    def share(self, pages: Sequence[int]) -> None:
        """Let one more sequence use pages that are used or idle."""
        for page in pages:
            if page in self.idle:
                del self.idle[page]
                self.used[page] = 1
            else:
                assert page in self.used, f"page {page} is shared but is free"
                self.used[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """End one sequence's use of pages, the last page first.

        The prefix cache evicts in this order: the end of a prefix before its beginning.
        """
        for page in reversed(pages):
            assert page in self.used, f"page {page} is given back but was not taken"
            self.used[page] -= 1
            if self.used[page]:
                continue
            del self.used[page]
            if page in self.cached:
                self.idle[page] = None
            else:
                self.free.append(page)

    def grow(self, held: list[int], num_tokens: int, new: Sequence[int]) -> int | None:
        """Prepare the pages of one sequence for the KV of its last token.

            held         pages of the sequence, in order; changed in place
            num_tokens   tokens of the sequence, the last one included
            new          free pages for it, in the order of `take`; empty when it needs none

        When the last token begins a page, the new pages follow those that the sequence holds. Otherwise the
        token is written into the last page. If other sequences use that page too, it is copied first (copy
        on write): the new page replaces it in `held`, and the page has one user less. A sole user writes
        into its page and needs no copy.

        Returns the page whose KV must be copied into the new page, or None.
        """
        # labs:begin 2a
        self.take(new)
        if self.needed(num_tokens) > len(held):
            held += new
            return None
        last = held[-1]
        if self.used[last] == 1:
            return None
        self.used[last] -= 1
        held[-1] = new[0]
        return last
        # labs:end 2a

    def cache(self, pages: Sequence[int]) -> None:
        """Note that used pages are in the prefix cache now: they become idle when their last user leaves."""
        for page in pages:
            assert page in self.used, f"page {page} is cached but nothing was written to it"
            assert page not in self.cached, f"page {page} is cached twice"
            self.cached[page] = self.num_cached
            self.num_cached += 1

    def uncache(self, pages: Sequence[int]) -> None:
        """Note that pages have left the prefix cache. Idle ones become free, to be taken after the others."""
        for page in pages:
            del self.cached[page]
            self.retained.pop(page, None)
            if page in self.idle:
                del self.idle[page]
                self.free.appendleft(page)

    def retain(self, pages: Sequence[int], until_s: float) -> None:
        """Evict the first pages of a prefix after all others, until this time or a later one."""
        for page in pages:
            self.retained[page] = max(until_s, self.retained.get(page, until_s))

    def forget_retained(self, now: float) -> None:
        """Evict pages whose time is over as any other."""
        self.retained = {page: until_s for page, until_s in self.retained.items() if until_s > now}

    def still_cached(self, pages: Sequence[int], since: int) -> Sequence[int]:
        """Return the leading pages of a match that have stayed in the cache since num_cached was `since`.

        Only the end of a match can have left, because a prefix is evicted from its end.
        """
        end = len(pages)
        while end and self.cached.get(pages[end - 1], since) >= since:
            end -= 1
        return pages[:end]

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds. Changes nothing."""
        # labs:begin 2d
        assert sorted([*self.free, *self.used, *self.idle]) == list(range(self.num_pages))
        assert all(users >= 1 for users in self.used.values()), "a used page has no user"
        assert self.cached.keys().isdisjoint(self.free), "a cached page is free"
        assert self.cached.keys() >= self.idle.keys(), "an idle page is not cached"
        # labs:end 2d


class PageDraft:
    """Choose pages for one step without changing anything.

        num_available   pages that `take` can still give

    The caller carries the choice out in this order: `PrefixCache.drop(evicted)`, then `Pages.share` of the
    kept pages and `Pages.take` in the order of the draft's takes, and only then `Pages.give_back`. The draft
    may not be used after the first of these changes.
    """

    def __init__(self, pages: Pages, prefix: PrefixCache) -> None:
        self._idle = pages.idle
        self._kept: set[int] = set()
        self._evicted: dict[int, None] = {}
        self._source = _chosen(pages, prefix, self._kept, self._evicted)
        self.num_available = len(pages.free) + len(pages.idle)

    @property
    def evicted(self) -> tuple[int, ...]:
        """Return the pages to be dropped from the prefix cache before the step begins, in order."""
        return tuple(self._evicted)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Choose `count` pages: free ones, then idle ones, which are evicted. None when there are too few."""
        if count > self.num_available:
            return None
        self.num_available -= count
        return tuple(islice(self._source, count))

    def keep_and_take(
        self, matched: Sequence[int], total: int, leave: int = 0
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Choose the `total` pages of a new sequence, the first of which are a match.

        leave   pages that must remain available

        Returns (pages to share, pages to take), or None when there are too few. The pages to share are kept
        from being evicted.
        """
        shared = self.not_evicted(matched)
        missing = total - len(shared) + leave
        if missing > self.num_available:
            return None
        idle = [page for page in shared if page in self._idle and page not in self._kept]
        if missing > self.num_available - len(idle):
            return None
        self._kept.update(idle)
        self.num_available -= len(idle)
        taken = self.take(total - len(shared))
        assert taken is not None
        return shared, taken

    def not_evicted(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Return the pages of a match up to the first that this draft evicts already."""
        if not self._evicted:
            return tuple(pages)
        end = next((index for index, page in enumerate(pages) if page in self._evicted), len(pages))
        return tuple(pages[:end])


def _chosen(pages: Pages, prefix: PrefixCache, kept: set[int], evicted: dict[int, None]) -> Iterator[int]:
    """Yield the pages to take. Evicts a unit when its first page is asked for, and skips kept units.

    Retained units come last. All units before a retained one are retained too, so ends still come first.
    """
    yield from reversed(pages.free)
    for is_last in (False, True) if pages.retained else (False,):
        for unit in prefix.victims():
            if kept.isdisjoint(unit) and pages.retained.keys().isdisjoint(unit) != is_last:
                evicted.update(dict.fromkeys(unit))
                yield from unit
