"""Learned: follow predictions of the next use as long as they serve better than LRU does, provably.

Two caches of the same size are simulated, names only: LRU, and BlindOracle, which evicts the block whose
predicted use is last. The one with fewer misses so far leads, and the victim is a block that the leader does
not hold. There always is one after an insertion: we hold one block more than the leader does.

              we hold          | neither | only the follower | only the leader | both |
    order of eviction               1              2         (only when the first two may not be evicted)

    misses <= 2 * min(misses of LRU, misses of BlindOracle)                     for every sequence

Proof. Let D be how many blocks a player holds and we do not. A miss of ours is a miss of that player too, or
it lowers D by one; evicting raises D by at most one, and only the follower's. So after N misses N <= a + F,
for LRU's misses a and the F evictions made while LRU followed, and N <= b + G in the same way; F + G <= N. At
the last of those F evictions BlindOracle led, so b <= a, and F <= N - G <= b: F <= a, and N <= 2a. In the
same way N <= 2b.

LRU is k-competitive for k blocks, so this is 2k-competitive whatever the predictions; with perfect ones it
misses at most twice as often as Belady's oracle. The combination: A. Fiat et al., "Competitive Paging
Algorithms", Journal of Algorithms, 1991; with predictions: A. Wei, "Better and Simpler Learning-Augmented
Online Caching", APPROX 2020. The bound holds if eviction follows insertion and every block may be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from store.policies.contract import BlockFacts, Policy
from store.policies.predictor import Predictor, ReusePredictor
from store.ranking import Ranking

IN_LRU, IN_BLIND = 1, 2


class Bound(NamedTuple):
    """Misses so far, of this policy and of the two that it simulates; most: the bound on its own."""

    misses: int
    lru: int
    predicted: int
    most: int


class Learned(Policy):
    """Our items, grouped by the simulated caches that hold them too, and the two caches.

    _ours     item -> IN_LRU | IN_BLIND
    _groups   the same by value: groups[0] neither, 1 only LRU, 2 only BlindOracle, 3 both
    _lru      the names LRU would hold, coldest first
    _blind    the names BlindOracle would hold, the one predicted last first
    _due      the same, the one predicted next first
    _last     the same -> its last reference
    """

    def __init__(self, capacity: int, predictor: Predictor | None = None):
        """Begin empty. predictor: ReusePredictor(capacity) by default."""
        super().__init__(capacity)
        self._predictor = predictor or ReusePredictor(capacity)
        self._ours: dict[int, int] = {}
        self._groups: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(4))
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._blind, self._due = Ranking[int](), Ranking[int]()
        self._last: dict[int, int] = {}
        self._references = self._misses = self._lru_misses = self._blind_misses = 0

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Count a miss of ours and a reference."""
        self._misses += 1
        self._ours[item] = 0
        self._groups[0][item] = None
        self._refer(item)

    def on_access(self, item: int, now: float) -> None:
        """Count a reference."""
        self._refer(item)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Remove an item of ours; remove a deleted one from the simulated caches too."""
        del self._groups[self._ours.pop(item)][item]
        if not evicted:
            self._lru.pop(item, None)
            if item in self._blind:
                self._forget(item)

    def victims(self, now: float) -> Iterator[int]:
        """Yield items in no simulated cache, then those of the follower alone, then those of the leader."""
        neither, only_lru, only_blind, both = self._groups
        if self._lru_misses <= self._blind_misses:
            return chain(neither, only_blind, only_lru, both)
        return chain(neither, only_lru, only_blind, both)

    def bound(self) -> Bound:
        """Return the guarantee with the numbers of this run."""
        most = 2 * min(self._lru_misses, self._blind_misses)
        return Bound(self._misses, self._lru_misses, self._blind_misses, most)

    # ------------------------------------------------------------------------------ the two players

    def _refer(self, item: int) -> None:
        """Pass one reference to both simulated caches."""
        self._references += 1
        self._play_lru(item)
        self._play_blind(item)
        self._regroup(item)

    def _play_lru(self, item: int) -> None:
        if item not in self._lru:
            self._lru_misses += 1
        self._lru[item] = None
        self._lru.move_to_end(item)
        if len(self._lru) > self.capacity:
            self._regroup(self._lru.popitem(last=False)[0])

    def _play_blind(self, item: int) -> None:
        if item not in self._blind:
            self._blind_misses += 1
            if len(self._blind) == self.capacity:
                gone = self._blind.first()
                self._forget(gone)
                self._regroup(gone)
        self._last[item] = self._references
        self._expect(item, self._predictor.next_use(item, self._references))
        self._postpone()

    def _expect(self, item: int, predicted: float) -> None:
        self._blind.rank(item, -predicted)
        self._due.rank(item, predicted)

    def _forget(self, item: int) -> None:
        self._blind.remove(item)
        self._due.remove(item)
        del self._last[item]

    def _postpone(self) -> None:
        """Postpone items whose predicted use has not come: by as much time again as they have waited."""
        while self._due.key(item := self._due.first()) < self._references:
            waited = self._references - self._last[item]
            self._expect(item, self._references + max(1, waited))

    def _regroup(self, item: int) -> None:
        """Note which simulated caches hold one of our items."""
        before = self._ours.get(item)
        if before is None:
            return
        after = IN_LRU * (item in self._lru) + IN_BLIND * (item in self._blind)
        if after != before:
            del self._groups[before][item]
            self._groups[after][item] = None
            self._ours[item] = after

    def __len__(self) -> int:
        return len(self._ours)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ours)

    def check(self) -> None:
        """Assert that the groups agree with the simulated caches, which keep to the capacity."""
        self._blind.check()
        self._due.check()
        assert len(self._lru) <= self.capacity
        assert len(self._blind) <= self.capacity
        assert set(self._blind) == set(self._due) == self._last.keys()
        assert sum(map(len, self._groups)) == len(self._ours)
        for item, group in self._ours.items():
            assert group == IN_LRU * (item in self._lru) + IN_BLIND * (item in self._blind)
            assert item in self._groups[group]
