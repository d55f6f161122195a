"""Sequences on the pages of one rank, without a planner: what a planner does with a prefix cache.

The KV of a token is the list of all tokens up to it, so that one wrong page is found at the next look. A
naive twin of the cache, a dictionary from token ids to pages, says what must happen.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.prefix import Chain, PrefixCache
from scheduler.instance.prefix_hash import HashPrefix
from scheduler.instance.prefix_radix import RadixPrefix

PAGE = 2

S = Chain(b"s")

Tokens = tuple[int, ...]


def next_key(salt: bytes, before: int | None, token_ids: Any) -> int:
    """A chain of keys that never collides within a test."""
    return hash((int.from_bytes(salt) if before is None else before, *token_ids))


def colliding_key(salt: bytes, before: int | None, token_ids: Any) -> int:
    """A chain of keys that collides all the time."""
    return next_key(salt, before, token_ids) % 3


def hash_of_pages(pages: Pages) -> HashPrefix:
    return HashPrefix(pages, PAGE)


def hash_of_blocks(pages: Pages) -> HashPrefix:
    return HashPrefix(pages, 2 * PAGE)


def radix_of_pages(pages: Pages) -> RadixPrefix:
    return RadixPrefix(pages, PAGE)


def keys_of(
    salt: bytes, token_ids: Sequence[int], size: int, chain: Callable[..., int] = next_key
) -> list[int]:
    """The keys of all full blocks."""
    keys: list[int] = []
    for start in range(0, len(token_ids) - size + 1, size):
        keys.append(chain(salt, keys[-1] if keys else None, token_ids[start : start + size]))
    return keys


def chain_of(token_ids: Sequence[int], size: int = 2 * PAGE, salt: bytes = b"s") -> Chain:
    """The chain of a sequence, with the keys of all its full blocks."""
    return Chain(salt, keys_of(salt, token_ids, size))


def computed(prefix: HashPrefix | RadixPrefix, token_ids: list[int], chain: Chain = S) -> list[int]:
    """Compute a sequence that shares what it can; its pages."""
    shared = prefix.match(chain, token_ids, len(token_ids) - 1)
    chosen = PageDraft(prefix.pages, prefix).keep_and_take(shared, prefix.pages.needed(len(token_ids)))
    assert chosen is not None
    prefix.pages.share(chosen[0])
    prefix.pages.take(chosen[1])
    pages = [*chosen[0], *chosen[1]]
    prefix.insert(chain, token_ids, pages, len(token_ids))
    prefix.check()
    return pages


@dataclass
class Seq:
    """A sequence: its tokens, its pages, and how many of its tokens are computed."""

    chain: Chain
    token_ids: list[int]
    pages: list[int]
    computed: int

    def kv(self, position: int) -> tuple[bytes | None, Tokens]:
        """What has to lie in the pages at a position."""
        return self.chain.salt, tuple(self.token_ids[: position + 1])


@dataclass
class Waiting:
    """A prompt that waits, its last match, and when that was."""

    chain: Chain
    token_ids: list[int]
    matched: Tokens
    since: int


class Naive:
    """What a prefix cache with units of `size` tokens holds, and what it evicts, without any structure.

    held    (salt, tokens) -> pages of the last unit
    left    the same -> when its last user left
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[tuple[bytes | None, Tokens], Tokens] = {}
        self.left: dict[tuple[bytes | None, Tokens], int] = {}

    def match(self, salt: bytes | None, token_ids: list[int], most_tokens: int) -> Tokens:
        found: Tokens = ()
        for end in range(self.size, min(most_tokens, len(token_ids)) + 1, self.size):
            unit = self.held.get((salt, tuple(token_ids[:end])))
            if unit is None:
                break
            found += unit
        return found

    def insert(self, seq: Seq, users: dict[int, int]) -> list[int]:
        """The pages that the sequence uses afterwards."""
        mine, per = list(seq.pages), self.size // PAGE
        for end in range(self.size, seq.computed + 1, self.size) if seq.chain.salt is not None else ():
            where = slice(end // PAGE - per, end // PAGE)
            name = (seq.chain.salt, tuple(seq.token_ids[:end]))
            if name not in self.held and len({users[page] for page in mine[where]}) > 1:
                break
            mine[where] = self.held.setdefault(name, tuple(mine[where]))
        return mine

    def evicted(self, used: set[int], kept: Tokens, missing: int) -> Tokens:
        """Evict idle units that none follows, least recently left first, until `missing` pages are free."""
        gone: Tokens = ()
        while len(gone) < missing:
            ends = [name for name, unit in self.held.items() if used.isdisjoint(unit)]
            ends = [name for name in ends if set(kept).isdisjoint(self.held[name])]
            ends = [name for name in ends if not any(self._follows(other, name) for other in self.held)]
            oldest = min(ends, key=lambda name: self.left[name])
            gone += self.held.pop(oldest)
        return gone

    def _follows(self, other: tuple[bytes | None, Tokens], name: tuple[bytes | None, Tokens]) -> bool:
        return other[0] == name[0] and len(other[1]) > len(name[1]) and other[1][: len(name[1])] == name[1]


@dataclass
class Books:
    """The sequences of one rank. Every call checks the invariants, and compares with the naive twin.

    collide   keys collide: then there is no naive twin, and only what lies in the pages is checked
    """

    form: Callable[[Pages], PrefixCache]
    unit: int
    num_pages: int = 12
    collide: bool = False
    seqs: dict[str, Seq] = field(default_factory=dict)
    now: int = 0
    waiting: list[Waiting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = Pages(self.num_pages, PAGE)
        self.prefix = self.form(self.pages)
        self.naive = None if self.collide else Naive(self.unit)
        self.kv: list[list[Any]] = [[None] * PAGE for _ in range(self.num_pages)]

    def chain(self, token_ids: list[int], salt: bytes | None = b"s") -> Chain:
        """The chain of a sequence, with the keys of all its full blocks."""
        return Chain(
            salt, keys_of(salt or b"", token_ids, self.unit, colliding_key if self.collide else next_key)
        )

    def start(self, name: str, token_ids: list[int], salt: bytes | None = b"s") -> int | None:
        """Give a sequence its pages; the number of tokens that it shares, None if there are too few pages."""
        chain = self.chain(token_ids, salt)
        before = pickle.dumps((self.pages, self.prefix))
        most = len(token_ids) - 1
        matched = self.prefix.match(chain, token_ids, most)
        assert self.naive is None or matched == self.naive.match(salt, token_ids, most)
        self.waiting = [*self.waiting[-2:], Waiting(chain, token_ids, matched, self.pages.num_cached)]
        draft = PageDraft(self.pages, self.prefix)
        chosen = draft.keep_and_take(matched, self.pages.needed(len(token_ids)))
        assert pickle.loads(before) == (self.pages, self.prefix), "a match or a draft has changed something"
        if chosen is None:
            missing = self.pages.needed(len(token_ids)) - len(matched)
            idle = len(self.pages.idle.keys() - set(matched))
            assert missing > len(self.pages.free) + idle, "pages would have sufficed"
            return None
        shared, new = chosen
        assert shared == matched
        self._evict(draft, len(new), matched)
        self.pages.share(shared)
        self.pages.take(new)
        self.seqs[name] = Seq(chain, list(token_ids), [*shared, *new], len(shared) * PAGE)
        self.check()
        return len(shared) * PAGE

    def compute(self, name: str, count: int) -> None:
        """Compute up to `count` tokens, and tell the cache."""
        seq = self.seqs[name]
        end = min(len(seq.token_ids), seq.computed + count)
        for position in range(seq.computed, end):
            if not self._writable(seq, position // PAGE):
                return
            self.kv[seq.pages[position // PAGE]][position % PAGE] = seq.kv(position)
            seq.computed = position + 1
        expected = self.naive and self.naive.insert(seq, self.pages.used)
        self.prefix.insert(seq.chain, seq.token_ids, seq.pages, seq.computed)
        assert expected is None or seq.pages == expected
        self.check()

    def decode(self, name: str, token: int) -> None:
        """Append a token, if there is a page for it, and compute it."""
        seq = self.seqs[name]
        self.compute(name, len(seq.token_ids))
        if len(seq.token_ids) % PAGE == 0:
            page = self._new_page()
            if page is None:
                return
            seq.pages.append(page)
        seq.token_ids.append(token)
        seq.chain = self.chain(seq.token_ids, seq.chain.salt)
        self.compute(name, 1)

    def fork(self, name: str, branch: str) -> None:
        """Let a branch share all pages of a sequence."""
        seq = self.seqs[name]
        self.pages.share(seq.pages)
        self.seqs[branch] = Seq(seq.chain, list(seq.token_ids), list(seq.pages), seq.computed)
        self.check()

    def finish(self, name: str) -> None:
        """End a sequence."""
        self.now += 1
        seq = self.seqs.pop(name)
        self.pages.give_back(seq.pages)
        if self.naive is not None:
            for unit, pages in self.naive.held.items():
                if set(pages) & set(seq.pages):
                    self.naive.left[unit] = self.now
        self.check()

    def clear(self) -> None:
        """Empty the cache."""
        self.prefix.clear()
        if self.naive is not None:
            self.naive = Naive(self.unit)
        assert len(self.pages.idle) == 0
        self.check()

    def naive_match(self, token_ids: list[int]) -> Tokens:
        """What the naive twin matches."""
        assert self.naive is not None
        return self.naive.match(b"s", token_ids, len(token_ids))

    def check(self) -> None:
        """The pages are counted, the cache is whole, and every sequence finds its own KV."""
        self.pages.check()
        self.prefix.check()
        self._match_again()
        users: dict[int, int] = {}
        for page in self._pages_of_all():
            users[page] = users.get(page, 0) + 1
        assert users == self.pages.used
        for seq in self.seqs.values():
            for position in range(seq.computed):
                assert self.kv[seq.pages[position // PAGE]][position % PAGE] == seq.kv(position)
        if self.naive is not None:
            assert {page for unit in self.naive.held.values() for page in unit} == self.pages.cached.keys()

    def _match_again(self) -> None:
        """A match that continues an earlier one finds what a new one finds."""
        for one in self.waiting:
            known = self.pages.still_cached(one.matched, one.since)
            match = partial(self.prefix.match, one.chain, one.token_ids, len(one.token_ids) - 1)
            one.matched, one.since = match(known), self.pages.num_cached
            assert one.matched == match()

    def _pages_of_all(self) -> Iterator[int]:
        for seq in self.seqs.values():
            assert len(seq.pages) == len(set(seq.pages)) == self.pages.needed(len(seq.token_ids))
            yield from seq.pages

    def _writable(self, seq: Seq, index: int) -> bool:
        """Copy a page that others use before it is written to. False if there is no page for the copy."""
        page = seq.pages[index]
        assert page not in self.pages.cached, "a page in the cache is written to"
        if self.pages.used[page] > 1:
            new = self._new_page()
            if new is None:
                return False
            self.kv[new] = list(self.kv[page])
            seq.pages[index] = new
            self.pages.give_back([page])
        return True

    def _new_page(self) -> int | None:
        draft = PageDraft(self.pages, self.prefix)
        new = draft.take(1)
        if new is None:
            assert draft.num_available == 0
            return None
        self._evict(draft, 1, ())
        self.pages.take(new)
        return new[0]

    def _evict(self, draft: PageDraft, taken: int, kept: Tokens) -> None:
        if self.naive is not None:
            missing = taken - len(self.pages.free)
            assert draft.evicted == self.naive.evicted(set(self.pages.used), kept, missing)
        for page in draft.evicted:
            self.kv[page] = [None] * PAGE
        self.prefix.drop(draft.evicted)


FORMS: dict[str, tuple[Callable[[Pages], PrefixCache], int]] = {
    "hash": (hash_of_pages, PAGE),
    "hash, two pages per block": (hash_of_blocks, 2 * PAGE),
    "radix": (radix_of_pages, PAGE),
}
"""name -> (how the cache is made, tokens per unit)."""
