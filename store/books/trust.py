"""Trust: hints are followed while they cost at most a little more misses than LRU has without them.

Used by `store.books.hints` alone. Pure; knows keys and names of tenants. The keys that LRU would hold without
hints are kept beside those that the pool holds, names only. Explained in docs/explain/hints.md.

    debt of a tenant  =  misses on keys that were evicted for its hints and that LRU would hold
                      -  hits on keys that are there for its hints and that LRU would have evicted (saved)

While the debt of a tenant and the risk of what it has displaced are below its allowance, its hints are
followed. A displaced key was evicted for a hint, and not missed yet. Its risk is what earlier ones have
cost, as part of the time that they spent displaced (1: until LRU would have evicted them). It begins at
FIRST_RISK, falls while they cost nothing, and stays above LEAST_RISK. So a tenant displaces little before
it has a record, and with the best one no more than allowance / LEAST_RISK. What was followed is ended once
the debt alone reaches the allowance: sooner, that would waste what keys were displaced for. The misses of
LRU pay part of a debt off: otherwise one mistake would shut a tenant out forever.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Holder = Callable[[int], str | None]
"""Returns the tenant that holds a key; None: none does."""

ALLOWANCE, LEAST_ALLOWANCE = 0.005, 2.0
"""The debt up to which hints are followed: a part of the pool's blocks, and blocks of a small pool."""

FIRST_RISK, LEAST_RISK = 0.5, 0.03
"""Of a displaced key, as part of a miss: without a record, and with the best one."""

RECORD = 0.003
"""Part of the pool's blocks: a displaced key for each of these weighs as much as FIRST_RISK does."""

PAID_OFF = 0.005
"""Blocks of a debt that each miss of LRU pays off: in the long run, wrong hints add so many misses."""


@dataclass(slots=True)
class _Account:
    """Of a tenant, as it was after `then` misses of LRU.

    debt        in blocks; below zero after hints that were worth something
    displaced   number of keys that are displaced
    spent       time that displaced keys have spent so, and what they have cost
    """

    debt: float = 0.0
    spent: float = 0.0
    then: int = 0
    displaced: int = 0
    cost: float = 0.0


class Trust:
    """The keys that LRU would hold, and the account of each tenant.

    blocks       that the pool can hold
    misses       of LRU
    broke        tenants whose debt has reached the allowance, until their hints are ended
    saved        key outside _shadow that the pool holds for a hint -> tenant of the hint
    _shadow      the keys that LRU would hold, coldest first; at most as many as the pool holds
    _displaced   key of _shadow that was evicted for a hint -> tenant of the hint
    _accounts    tenant -> its account
    """

    def __init__(self, keys: OrderedDict[int, None], has: Callable[[int], bool], holder: Holder) -> None:
        """Begin with what the pool holds, coldest first. has: it holds a key now; holder: of a held key."""
        self.blocks = self.misses = 0
        self.saved: dict[int, str] = {}
        self.broke: dict[str, None] = {}
        self._shadow, self._has, self._holder = keys, has, holder
        self._displaced: dict[int, str] = {}
        self._accounts: dict[str, _Account] = {}

    def debt(self, tenant: str) -> float:
        """Return the debt of a tenant in blocks; below zero after hints that were worth something."""
        return self._settled(tenant).debt

    def risk(self, tenant: str) -> float:
        """Return what a displaced key of a tenant will cost, by its record: a part of a miss."""
        account, weight = self._settled(tenant), max(1.0, RECORD * self.blocks)
        return min(1.0, max(LEAST_RISK, (FIRST_RISK * weight + account.cost) / (weight + account.spent)))

    def may(self, tenant: str) -> int:
        """Return how many more keys the hints of a tenant may displace."""
        account = self._settled(tenant)
        return max(0, int((self._allowance - account.debt) / self.risk(tenant)) - account.displaced)

    @property
    def _allowance(self) -> float:
        return max(LEAST_ALLOWANCE, ALLOWANCE * self.blocks)

    def _settled(self, tenant: str) -> _Account:
        """Return an account as it is after the latest miss of LRU, each of which evicts a key of LRU."""
        account = self._accounts.get(tenant) or _Account()
        since, account.then = self.misses - account.then, self.misses
        account.spent += account.displaced * since / max(1, self.blocks)
        if account.debt > 0:
            account.debt = max(0.0, account.debt - PAID_OFF * since)
        return account

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
            tenant = self._restored(key)
            blamed = blamed or tenant
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
        self._restored(key)
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
                self._restored(key)
                self._displaced[key] = tenant
                self._owe(tenant, 0.0, displaced=1)

    def expected(self, key: int, tenant: str) -> None:
        """Note that the pool holds a key which no request has asked for yet, but the hint of a tenant."""
        if key not in self._shadow:
            self.saved[key] = tenant
        else:
            self._restored(key)

    def removed(self, key: int) -> None:
        """Note that a key was removed, and not evicted."""
        self.saved.pop(key, None)
        self._restored(key)
        self._shadow.pop(key, None)

    def _restored(self, key: int) -> str | None:
        """Note that a key is no longer displaced. Returns the tenant for which it was."""
        tenant = self._displaced.pop(key, None)
        if tenant is not None:
            self._settled(tenant).displaced -= 1
        return tenant

    def _shrink(self, size: int, tenant: str | None) -> str | None:
        """Have LRU evict what it holds beyond this number. Returns whose hints let the pool differ."""
        while len(self._shadow) > size:
            gone, _ = self._shadow.popitem(last=False)
            earlier = self._restored(gone)
            if earlier is not None:
                tenant = earlier if tenant is None else tenant
            elif self._has(gone):
                tenant = self._holder(gone) if tenant is None else tenant
                if tenant is not None:
                    self.saved[gone] = tenant
        return tenant

    def _owe(self, tenant: str, blocks: float, displaced: int = 0) -> None:
        """Change a debt. No credit is larger than the pool: what hints were worth long ago counts no more."""
        self._accounts.setdefault(tenant, _Account())
        account = self._settled(tenant)
        account.debt = max(account.debt + blocks, -float(self.blocks))
        account.cost = max(0.0, account.cost + blocks)
        account.displaced += displaced
        if account.debt >= self._allowance:
            self.broke[tenant] = None

    def check(self) -> None:
        """Assert the invariant (tests)."""
        assert self._displaced.keys() <= self._shadow.keys()
        assert self.saved.keys().isdisjoint(self._shadow)
        counts = Counter(self._displaced.values())
        assert all(account.displaced == counts[name] for name, account in self._accounts.items())
