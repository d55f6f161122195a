"""Hints about blocks in DRAM: they are held for a time, evicted first, or put there for a later use.

Used through `store.directory` alone. A hint holds blocks for an owner, (tenant, session). The hints of a
tenant are followed while `Trust` lets it. Explained in docs/explain/hints.md.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from store.allocator import Extent, padded_size
from store.books.general import GeneralVerbs
from store.books.ledger import visible_copies
from store.books.segment import Segment
from store.books.segment_order import Target
from store.books.trust import Trust
from store.errors import PoolFull
from store.objects import NO_CLASS, Found, ObjectState, PoolObject, Wanted
from store.policies.contract import BlockFacts
from store.policies.hinted import Hinted
from store.policies.lru import LRU
from store.ranking import Ranking

Owner = tuple[str, str]
"""Tenant and session of a hint; session "" where it named keys."""


NEW = -1
"""The number of a copy that is allocated now, and has none yet."""

MOST_OWNERS = 64
"""That hold or pin one block. Each change of it looks at all of them, so further ones are not noted."""

LATER_S = 1e-6
"""By which a block counts as needed later than the one before it: on all segments the last ones go first."""


class HintVerbs(GeneralVerbs):
    """The verbs of hints. Before the first hint, everything is as if there were none.

    trust      the accounts of tenants; None before the first hint
    held       tenant -> number of keys that it holds
    _holds     key -> owner -> end, of held keys; all are visible
    _ends      the holds by their ends
    _demoted   visible key -> tenant that demoted it
    expected   key of an object that is written for a hint -> its tenant
    _copied    object ids of copies for hints: without these, LRU would have space for as many further keys
    _demotions   so far
    _for       tenant for whose hint space is allocated now
    _ended     tenants whose hints were ended, until `take_ended` tells of them
    """

    trust: Trust | None = None
    _for: str | None = None
    _demotions = 0
    _ended: Sequence[str] = ()

    def takes_hints(self) -> bool:
        """Tell whether hints can be followed: blocks are evicted by LRU. Begin to do so."""
        segments = self._segments.values()
        if self.layout is None or not all(isinstance(segment.policy, LRU) for segment in segments):
            return False
        if self.trust is None:
            self.held = Counter[str]()
            self._holds: dict[int, dict[Owner, float]] = {}
            self._ends = Ranking[tuple[int, Owner]]()
            self._demoted: dict[int, str] = {}
            self.expected: dict[int, str] = {}
            self._copied: set[int] = set()
            coldest_first = sorted(self._visible, key=lambda key: self._visible[key].last_use_s)
            self.trust = Trust(OrderedDict.fromkeys(coldest_first), self._visible.__contains__, self._holder)
        for segment in segments:
            if not isinstance(segment.policy, Hinted):
                uses = {key: self._copy_in(segment, key).last_use_s for key in segment.policy}
                segment.policy = Hinted(segment.policy, uses)  # type: ignore[arg-type]
        self.trust.blocks = self._order.total.capacity // padded_size(self.layout.nbytes)
        return True

    def hold(self, owner: Owner, blocks: Sequence[PoolObject], end: float, most: int) -> int:
        """Evict visible blocks after all others until this time; return how many, the first ones.

        A later end of the same owner stays. most: keys that the tenant may hold, those of now among them.
        """
        tenant, taken = owner[0], list[PoolObject]()
        for obj in blocks:
            assert obj.key is not None
            held_by = self._holds.get(obj.key, {})
            if len(held_by) >= MOST_OWNERS and owner not in held_by:
                taken.append(obj)
                continue
            if not self._holds_of(obj.key, tenant):
                if self.held[tenant] >= most:
                    break
                self.held[tenant] += 1
            self._demoted.pop(obj.key, None)
            ends = self._holds.setdefault(obj.key, {})
            if end > ends.get(owner, 0.0):
                ends[owner] = end
                self._ends.rank((obj.key, owner), end)
            taken.append(obj)
        for obj in reversed(taken):  # the last blocks of a prefix are evicted first
            self._rank(obj.key or 0)
        return len(taken)

    def demote(self, owner: Owner, blocks: Sequence[PoolObject], most: int) -> int:
        """Evict visible blocks of a prefix before all others, the last ones first; return how many.

        Blocks stay that were used after the last one, which others share; that others hold; or are pinned.
        The owner holds none of them any longer. most: blocks that may be demoted.
        """
        demoted = 0
        for obj in reversed(blocks):
            assert obj.key is not None
            self._drop(obj.key, owner)
            is_shared = obj.last_use_s > blocks[-1].last_use_s or obj.key in self._holds
            if is_shared or obj.hard_pinned() or demoted >= most:
                continue
            self._demoted[obj.key] = owner[0]
            self._rank(obj.key)
            demoted += 1
        return demoted

    def waiting(self, tenant: str) -> int:
        """Return how many blocks that this tenant demoted wait for their eviction."""
        return sum(one == tenant for one in self._demoted.values())

    def end_hold(self, owner: Owner, keys: Iterable[int]) -> None:
        """End what an owner holds of these keys."""
        for key in keys:
            self._drop(key, owner)

    def allocate_for(
        self, tenant: str, owner: str, wanted: Sequence[Wanted], now: float, rank: int
    ) -> list[PoolObject]:
        """Allocate objects near the tier of a rank for a hint: they count as used once a request reads them.

        Otherwise as `Directory.allocate_many`.
        """
        keys = [item.key for item in wanted if item.key is not None]
        self.expected.update(dict.fromkeys(keys, tenant))
        self._for = tenant
        try:
            return self._allocate(owner, wanted, Target(None, rank), True, now)
        except PoolFull:
            for key in keys:
                self.expected.pop(key, None)
            raise
        finally:
            self._for = None

    def replicate_for(
        self, tenant: str, copy: Callable[[], tuple[PoolObject, PoolObject]]
    ) -> tuple[PoolObject, PoolObject]:
        """Allocate a copy for a hint, as `replicate` does: what is evicted for it is charged."""
        self._for = tenant
        self._copied.add(NEW)
        try:
            pair = copy()
            self._copied.add(pair[1].object_id)
            return pair
        finally:
            self._copied.discard(NEW)
            self._for = None

    def leading(self, keys: Sequence[int], digests: Sequence[int]) -> list[PoolObject]:
        """Return the leading blocks that are in DRAM. Touches nothing."""
        found: list[PoolObject] = []
        for key, digest in zip(keys, digests):
            obj = self._visible.get(key)
            if obj is None or obj.digest != digest:
                break
            found.append(obj)
        return found

    # ------------------------------------------------------------------------------ holds

    def _holder(self, key: int) -> str | None:
        """Return a tenant that holds a key."""
        return next((tenant for tenant, _ in self._holds.get(key, ())), None)

    def _holds_of(self, key: int, tenant: str) -> bool:
        return any(one == tenant for one, _ in self._holds.get(key, ()))

    def _drop(self, key: int, owner: Owner) -> None:
        """End the hold of an owner."""
        if self._holds.get(key, {}).pop(owner, None) is not None:
            self._ends.remove((key, owner))
            self.held[owner[0]] -= not self._holds_of(key, owner[0])
            if not self._holds[key]:
                del self._holds[key]
            self._rank(key)

    def _rank(self, key: int) -> None:
        """Have the segments of a key evict it as its hints say."""
        for obj in visible_copies(self._visible[key]):
            segment = self._segments[obj.rank]
            policy = segment.policy
            assert isinstance(policy, Hinted)
            if key in self._holds:
                policy.hold(key, min(self._holds[key].values()) + LATER_S * obj.position)
            elif key in self._demoted:
                self._demotions += 1
                policy.demote(key, self._demotions)
            else:
                policy.release(key)
            segment.note_change()

    def end_holds(self, now: float) -> None:
        """End the holds whose time is over, and all hints of tenants that may not have any."""
        if self.trust is None:
            return
        while self._ends and self._ends.key(first := self._ends.first()) <= now:
            self._drop(*first)
        while self.trust.broke:
            tenant, _ = self.trust.broke.popitem()
            self._ended = (*self._ended, tenant)
            for key, owner in [(key, owner) for key, ends in self._holds.items() for owner in ends]:
                if owner[0] == tenant:
                    self._drop(key, owner)
            for key in [key for key, one in self._demoted.items() if one == tenant]:
                del self._demoted[key]
                self._rank(key)

    def take_ended(self) -> Sequence[str]:
        """Return the tenants whose hints were ended since the last call: their pins are to end, too."""
        ended, self._ended = self._ended, ()
        return ended

    # ------------------------------------------------------------------------------ what happens to blocks

    def _place(
        self, nbytes: int, padded: int, target: Target, contiguous: bool, class_id: int, now: float
    ) -> tuple[Segment, list[tuple[Extent, ...]]]:
        self.end_holds(now)
        return super()._place(nbytes, padded, target, contiguous, class_id, now)

    def _publish(self, obj: PoolObject, key: int, facts: BlockFacts, now: float) -> None:
        is_new = key not in self._visible
        super()._publish(obj, key, facts, now)
        if self.trust is not None and is_new:
            self._copied.discard(obj.object_id)  # its original has gone
            tenant = self.expected.pop(key, None)
            if tenant is None:
                self.trust.inserted(key, self._size)
            else:
                self.trust.expected(key, tenant)

    def _touch(self, found: Sequence[Found], now: float, class_id: int = NO_CLASS) -> None:
        super()._touch(found, now, class_id)
        if self.trust is not None:
            for obj in found:
                self._demoted.pop(obj.key or 0, None)

    def judge(self, keys: Sequence[int], found: Sequence[Found]) -> None:
        """Note what a request has found of its prompt, and compare that with LRU."""
        if self.trust is not None:
            in_dram = next((place for place, hit in enumerate(found) if hit.object_id is None), len(found))
            self.trust.judge(keys, in_dram, self._size)

    @property
    def _size(self) -> int:
        """Return the number of keys that the pool has, or would have without what hints take from others."""
        return len(self._visible) + len(self.expected) + len(self._copied)

    def _revoke(self, obj: PoolObject, now: float, writer_may_live: bool, writer: int | None) -> None:
        self._expect_no_more(obj)
        super()._revoke(obj, now, writer_may_live, writer)

    def _expect_no_more(self, obj: PoolObject) -> None:
        if self.trust is not None and obj.state is ObjectState.WRITING and obj.owner.startswith("hint/"):
            self.expected.pop(obj.key or 0, None)

    def _remove(self, obj: PoolObject, *, evicted: bool = False) -> None:
        self._expect_no_more(obj)
        super()._remove(obj, evicted=evicted)
        if self.trust is not None:
            self._copied.discard(obj.object_id)

    def _hide(self, obj: PoolObject, *, evicted: bool = False) -> None:
        super()._hide(obj, evicted=evicted)
        key = obj.key
        if self.trust is None or key is None:
            return
        if key in self._visible:
            left = visible_copies(self._visible[key])
            if len(left) == 1:  # it takes no space besides that of its key
                self._copied.discard(left[0].object_id)
            return
        owners = self._holds.pop(key, {})
        for owner in owners:
            self._ends.remove((key, owner))
        for tenant in dict.fromkeys(tenant for tenant, _ in owners):
            self.held[tenant] -= 1
        tenant_of = self._demoted.pop(key, None)
        if evicted:
            self.trust.evicted(key, self._size, self._for if tenant_of is None else tenant_of)
        else:
            self.trust.removed(key)

    def check(self) -> None:
        """Assert every invariant (tests)."""
        super().check()
        if self.trust is not None:
            self.trust.check()
            copied = [self._objects[number] for number in self._copied]
            assert all(len(visible_copies(obj)) > 1 for obj in copied if obj.state is ObjectState.VISIBLE)
            assert self._holds.keys() | self._demoted.keys() <= self._visible.keys()
            assert self._holds.keys().isdisjoint(self._demoted)
            assert len(self._ends) == sum(map(len, self._holds.values()))
            of_keys = [dict.fromkeys(tenant for tenant, _ in ends) for ends in self._holds.values()]
            tenants = Counter(tenant for of_key in of_keys for tenant in of_key)
            assert tenants == +self.held
