"""The order in which the segments of a pool are tried for a new object, kept up to date at each change.

Used by `store.books.allocation` alone. Pure: no bytes, no clock. Explained in docs/explain/lifecycle.md.
Choosing one of n segments takes O(log n): a segment that changes is noted, and ranked again when the next
choice is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from store.books.segment import Accounts, Segment
from store.ranking import Ranking

MAX_SIZES = 16
"""Sizes of objects whose number of places is remembered; one more size makes all be forgotten.

A pool of KV blocks asks for two sizes, that of a block and the alignment. Each one costs a sum at every
change of a segment, so a small number is enough.
"""


_Key = tuple[bool, float, int, int, int]
"""(soft-pinned, last use, preference, number, rank) of a segment; the least key evicts first."""

END: _Key = (True, float("inf"), 0, 0, 0)


class Target(NamedTuple):
    """The segments that an object may be put into, and those of them that are preferred.

    rank      this segment only; None: any
    first     preferred to all others: the segment of this rank
    node      preferred to the rest: segments of this node
    without   ranks whose segments are excluded
    """

    rank: int | None = None
    first: int | None = None
    node: int | None = None
    without: frozenset[int] = frozenset()


class Coldest(NamedTuple):
    """The first object that a segment would evict. until: how long it stays the first if nothing happens."""

    soft_pinned: bool
    last_use_s: float
    until: float


class _Line:
    """The segments of one node, or all, in two orders.

    room   by free bytes, most first
    cold   by the object that they would evict first, the coldest first; without those that have none
    """

    def __init__(self) -> None:
        self.room = Ranking[int]()
        self.cold = Ranking[int]()


class SegmentOrder:
    """All segments of one pool.

        total         the accounts of all together
        _by_rank      rank -> segment
        _numbers      rank -> its number in the order of arrival, which decides among equals
        changed       segments to be ranked anew; they put themselves here
        _lines        node -> its segments; None -> all
        _unasked      rank -> segment whose first victim may have changed since it was asked
        _until        rank -> time at which its first victim may change by itself
        _asked_at     rank -> when it was asked for its first victim
        _ranked_free  rank -> free bytes when it was ranked
        _unpinned     rank -> bytes that are not pinned hard, when it was ranked
        _places       size -> how many objects of this size fit into all segments if only what is pinned
                      hard stays

    Invariant: check().
    """

    def __init__(self, coldest: Callable[[Segment, float], Coldest | None]):
        """Begin without segments. coldest: of a segment, now."""
        self.total = Accounts()
        self._coldest = coldest
        self._by_rank: dict[int, Segment] = {}
        self._numbers: dict[int, int] = {}
        self.changed: list[Segment] = []
        self._lines: dict[int | None, _Line] = {None: _Line()}
        self._unasked: dict[int, Segment] = {}
        self._until = Ranking[int]()
        self._asked_at: dict[int, float] = {}
        self._ranked_free: dict[int, int] = {}
        self._unpinned: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._next_number = 0

    def add(self, segment: Segment) -> None:
        """Add a segment."""
        self._by_rank[segment.rank] = segment
        self._numbers[segment.rank], self._next_number = self._next_number, self._next_number + 1
        self._lines.setdefault(segment.node, _Line())
        self._unpinned[segment.rank] = 0

    def remove(self, segment: Segment) -> None:
        """Remove a segment, after all its objects."""
        self._rank_changed()
        rank = segment.rank
        self._note_unpinned(rank, 0)
        for line in self._lines_of(segment):
            line.room.remove(rank)
            line.cold.discard(rank)
        if not self._lines[segment.node].room:
            del self._lines[segment.node]
        self._until.discard(rank)
        self._unasked.pop(rank, None)
        self._asked_at.pop(rank, None)
        for record in (self._by_rank, self._numbers, self._unpinned, self._ranked_free):
            del record[rank]
        self.total.add(segment.accounts, -1)

    # ------------------------------------------------------------------------------- questions

    def accounts(self, target: Target) -> Accounts:
        """Return the current accounts of all segments that may be chosen; the caller must not change them."""
        if target.rank is not None:
            return self._by_rank[target.rank].accounts
        if not target.without:
            return self.total
        rest = Accounts()
        rest.add(self.total)
        for rank in target.without:
            rest.add(self._by_rank[rank].accounts, -1)
        return rest

    def by_room(self, nbytes: int, target: Target) -> Iterator[Segment]:
        """Yield segments with at least nbytes free: the preferred ones, then those with the most free bytes.

        No segment may change meanwhile.
        """
        if target.rank is not None or len(self._by_rank) == 1:
            yield from self._single(target)
            return
        self._rank_changed()
        if not self._by_rank or self._roomiest(None).accounts.free < nbytes:
            return
        seen = set(target.without)
        if target.first is None and target.node in self._lines:  # nearly always this one is taken
            best = self._roomiest(target.node)
            if best.rank not in seen and best.accounts.free >= nbytes:
                seen.add(best.rank)
                yield best
        for ranks in self._preferred(target, lambda line: line.room):
            for rank in ranks:
                segment = self._by_rank[rank]
                if segment.accounts.free < nbytes:
                    break
                if rank not in seen:
                    seen.add(rank)
                    yield segment

    def by_coldness(self, target: Target, now: float) -> Iterator[Segment]:
        """Yield segments that can evict, the one with the coldest object first and soft-pinned objects last.

        Among equals the preferred segments come first, then the one that joined first.
        """
        if target.rank is not None or len(self._by_rank) == 1:
            yield from self._single(target)
            return
        self._rank_changed()
        self._rank_cold(now)
        orders = self._preferred(target, lambda line: line.cold)
        lines = [self._with_keys(ranks, place) for place, ranks in enumerate(orders)]
        heads = [next(line, END) for line in lines]
        seen = set(target.without)
        while (coldest := min(heads)) is not END:
            preference, rank = coldest[2], coldest[4]
            if rank not in seen:
                seen.add(rank)
                yield self._by_rank[rank]
            heads[preference] = next(lines[preference], END)

    def places(self, nbytes: int, rank: int | None = None) -> int:
        """Count the objects of nbytes (padded) that fit into all segments, or this rank's.

        It is assumed that only hard-pinned objects stay.
        """
        self._rank_changed()
        if rank is not None:
            return self._unpinned[rank] // nbytes
        if nbytes not in self._places:
            if len(self._places) == MAX_SIZES:
                self._places.clear()
            self._places[nbytes] = sum(unpinned // nbytes for unpinned in self._unpinned.values())
        return self._places[nbytes]

    # ------------------------------------------------------------------------------- ranking

    def _single(self, target: Target) -> Iterator[Segment]:
        """Yield the only segment that may be chosen."""
        segment = (
            self._by_rank[target.rank] if target.rank is not None else next(iter(self._by_rank.values()))
        )
        if segment.rank not in target.without:
            yield segment

    def _roomiest(self, node: int | None) -> Segment:
        """Return the segment with the most free bytes, of this node or of all."""
        return self._by_rank[self._lines[node].room.first()]

    def _preferred(self, target: Target, order: Callable[[_Line], Ranking[int]]) -> list[Iterable[int]]:
        """Return ranks in up to three orders, the most preferred first: `first`, those of the node, all."""
        orders: list[Iterable[int]] = []
        if target.first in self._by_rank:
            orders.append([target.first])
        if target.node is not None and target.node in self._lines:
            orders.append(order(self._lines[target.node]).ascending())
        orders.append(order(self._lines[None]).ascending())
        return orders

    def _with_keys(self, ranks: Iterable[int], preference: int) -> Iterator[_Key]:
        """Yield keys by coldness, preference and number, without ranks that have nothing to evict."""
        cold = self._lines[None].cold
        for rank in ranks:
            if rank in cold:
                soft_pinned, last_use_s, number = cold.key(rank)
                yield soft_pinned, last_use_s, preference, number, rank

    def _lines_of(self, segment: Segment) -> tuple[_Line, _Line]:
        return self._lines[None], self._lines[segment.node]

    def _rank_changed(self) -> None:
        """Rank the segments that have changed."""
        for segment in self.changed:
            segment.is_changed = False
            rank, accounts = segment.rank, segment.accounts
            self._unasked[rank] = segment
            if self._ranked_free.get(rank) != accounts.free:
                self._ranked_free[rank] = accounts.free
                key = (-accounts.free, self._numbers[rank])
                for line in self._lines_of(segment):
                    line.room.rank(rank, key)
            if self._unpinned[rank] != accounts.capacity - accounts.pinned:
                self._note_unpinned(rank, accounts.capacity - accounts.pinned)
        self.changed.clear()

    def _note_unpinned(self, rank: int, nbytes: int) -> None:
        before, self._unpinned[rank] = self._unpinned[rank], nbytes
        for size in self._places:
            self._places[size] += nbytes // size - before // size

    def _rank_cold(self, now: float) -> None:
        """Ask the segments whose first victim may have changed."""
        while self._until and self._until.key(rank := self._until.first()) <= now:
            self._until.remove(rank)
            self._unasked[rank] = self._by_rank[rank]
        for rank, segment in self._unasked.items():
            found = self._coldest(segment, now)
            self._asked_at[rank] = now
            self._until.discard(rank)
            for line in self._lines_of(segment):
                if found is None:
                    line.cold.discard(rank)
                else:
                    line.cold.rank(rank, (found.soft_pinned, found.last_use_s, self._numbers[rank]))
            if found is not None and found.until < float("inf"):
                self._until.rank(rank, found.until)
        self._unasked.clear()

    def check(self) -> None:
        """Assert that the totals are the sums, and that unchanged segments are ranked as they are (tests)."""
        total = Accounts()
        for segment in self._by_rank.values():
            total.add(segment.accounts)
            assert segment.is_changed == (segment in self.changed)
        assert total == self.total
        assert len(self.changed) == len({segment.rank for segment in self.changed})
        for rank, segment in self._by_rank.items():
            if not segment.is_changed:
                self._check_ranked(rank, segment)
        for line in self._lines.values():
            line.room.check()
            line.cold.check()
        for size, places in self._places.items():
            assert places == sum(unpinned // size for unpinned in self._unpinned.values())

    def _check_ranked(self, rank: int, segment: Segment) -> None:
        accounts, number = segment.accounts, self._numbers[rank]
        assert self._unpinned[rank] == accounts.capacity - accounts.pinned
        for line in self._lines_of(segment):
            assert line.room.key(rank) == (-accounts.free, number)
            if rank in self._unasked:
                continue
            found = self._coldest(segment, self._asked_at[rank])
            if found is None:
                assert rank not in line.cold, f"segment {rank} has nothing to evict"
            else:
                assert line.cold.key(rank) == (found.soft_pinned, found.last_use_s, number)
        assert len(self._lines[None].room) + len(self.changed) >= len(self._by_rank)
