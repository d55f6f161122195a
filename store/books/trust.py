"""Trust: hints are followed while they cost at most a little more misses than LRU has without them.

Used by `store.books.hints` alone. Pure; knows keys and names of tenants. The keys that LRU would hold without
hints are kept beside those that the pool holds, names only. Explained in docs/explain/hints.md.

    debt of a tenant  =  misses on keys that were evicted for its hints and that LRU would hold
                      +  RISK * such keys that were not missed yet (displaced)
                      -  hits on keys that are there for its hints and that LRU would have evicted (saved)

The hints of a tenant are followed while its debt is below its allowance. So they never cause more misses than
allowance / RISK, whatever they say: with the numbers below, a third of the pool, once. Where displaced keys
are missed soon, it is a hundredth. The misses of LRU pay part of a debt off: otherwise one mistake would shut
a tenant out forever.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

Holder = Callable[[int], str | None]
"""Returns the tenant that holds a key; None: none does."""

ALLOWANCE = 0.01
"""Part of the pool's blocks: the debt up to which hints are followed. It is enough for some prompts."""

RISK = 0.03
"""Of a displaced key, as part of a miss: most of what clients call dead is dead, and never missed."""

PAID_OFF = 0.005
"""Blocks of a debt that each miss of LRU pays off: in the long run, wrong hints add so many misses."""


class Trust:
    """The keys that LRU would hold, and the account of each tenant.

    blocks       that the pool can hold
    misses       of LRU
    broke        tenants whose debt has reached the allowance, until their hints are ended
    saved        key outside _shadow that the pool holds for a hint -> tenant of the hint
    _shadow      the keys that LRU would hold, coldest first; at most as many as the pool holds
    _displaced   key of _shadow that was evicted for a hint -> tenant of the hint
    _debt        tenant -> (debt, misses of LRU when it was counted)
    """

    def __init__(self, keys: OrderedDict[int, None], has: Callable[[int], bool], holder: Holder) -> None:
        """Begin with what the pool holds, coldest first. has: it holds a key now; holder: of a held key."""
        self.blocks = self.misses = 0
        self.saved: dict[int, str] = {}
        self.broke: dict[str, None] = {}
        self._shadow, self._has, self._holder = keys, has, holder
        self._displaced: dict[int, str] = {}
        self._debt: dict[str, tuple[float, int]] = {}

    def debt(self, tenant: str) -> float:
        """Return the debt of a tenant in blocks; below zero after hints that were worth something."""
        debt, then = self._debt.get(tenant, (0.0, 0))
        return max(0.0, debt - PAID_OFF * (self.misses - then)) if debt > 0 else debt

    def may(self, tenant: str) -> int:
        """Return how many more keys the hints of a tenant may displace."""
        return max(0, int((max(1.0, ALLOWANCE * self.blocks) - self.debt(tenant)) / RISK))

    def coldest(self) -> int | None:
        """Return the key that LRU would evict next."""
        return next(iter(self._shadow), None)

    def judge(self, keys: Sequence[int], found: int, size: int) -> None:
        """Compare a request with LRU. keys: of its prompt; found: the first ones, which the pool holds.

        size   number of keys that the pool holds, as in all that follows
        """
        shadow, lost = self._shadow, defaultdict[str, float](float)
        under_lru = next((place for place, key in enumerate(keys) if key not in shadow), len(keys))
        blamed = None
        for key in keys[found:under_lru]:
            tenant = self._displaced.pop(key, None)
            blamed = blamed or tenant
            if tenant is not None:
                lost[tenant] -= RISK
            if blamed is not None:
                lost[blamed] += 1
        for key in reversed(keys[:found]):
            tenant = self.saved.pop(key, None)
            if tenant is not None and key not in shadow:
                lost[tenant] -= 1
            self.misses += key not in shadow
            shadow[key] = None
            shadow.move_to_end(key)
        for tenant, blocks in lost.items():
            self._owe(tenant, blocks)
        self._shrink(size, blamed)

    def inserted(self, key: int, size: int) -> None:
        """Note that the pool holds a key now that a request has computed. LRU may have held it before."""
        self.misses += key not in self._shadow
        self._displaced.pop(key, None)
        self._shadow[key] = None
        self._shadow.move_to_end(key)
        self._shrink(size, None)

    def evicted(self, key: int, size: int, tenant: str | None) -> None:
        """Note that the pool has evicted a key. tenant: whose hint chose it, None: no hint."""
        self.saved.pop(key, None)
        tenant = self._shrink(size, tenant)
        if key in self._shadow:
            tenant = next(reversed(self.saved.values()), None) if tenant is None else tenant
            if tenant is not None:
                self._displaced[key] = tenant
                self._owe(tenant, RISK)

    def expected(self, key: int, tenant: str) -> None:
        """Note that the pool holds a key which no request has asked for yet, but the hint of a tenant."""
        if key not in self._shadow:
            self.saved[key] = tenant
        elif (earlier := self._displaced.pop(key, None)) is not None:
            self._owe(earlier, -RISK)

    def removed(self, key: int) -> None:
        """Note that a key was removed, and not evicted."""
        self.saved.pop(key, None)
        self._displaced.pop(key, None)
        self._shadow.pop(key, None)

    def _shrink(self, size: int, tenant: str | None) -> str | None:
        """Have LRU evict what it holds beyond this number. Returns whose hints let the pool differ."""
        while len(self._shadow) > size:
            gone, _ = self._shadow.popitem(last=False)
            earlier = self._displaced.pop(gone, None)
            if earlier is not None:
                self._owe(earlier, -RISK)
                tenant = earlier if tenant is None else tenant
            elif self._has(gone):
                tenant = self._holder(gone) if tenant is None else tenant
                if tenant is not None:
                    self.saved[gone] = tenant
        return tenant

    def _owe(self, tenant: str, blocks: float) -> None:
        """Change a debt. No credit is larger than the pool: what hints were worth long ago counts no more."""
        self._debt[tenant] = max(self.debt(tenant) + blocks, -float(self.blocks)), self.misses
        if not self.may(tenant):
            self.broke[tenant] = None

    def check(self) -> None:
        """Assert the invariant (tests)."""
        assert self._displaced.keys() <= self._shadow.keys()
        assert self.saved.keys().isdisjoint(self._shadow)
