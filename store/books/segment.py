"""One rank's DRAM segment in the books of the directory: ranges, eviction order and accounts.

Used by `store.directory` alone. Pure: no bytes, no clock. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heappop, heappush

from store.allocator import Extent, RangeAllocator
from store.errors import PoolFull
from store.objects import ObjectState, PoolObject
from store.policies import Policy


@dataclass(slots=True)
class Accounts:
    """Accounts of the bytes of one segment, or of several. Sizes are as allocated (padded).

    capacity    all bytes
    free        in no object
    evictable   of objects with `evictable` set
    unsaved     of objects with `unsaved` set
    pinned      of VISIBLE objects that are pinned hard
    states      by the state of the objects
    freed       how often bytes became free or evictable; it counts no bytes, and never falls
    """

    capacity: int = 0
    free: int = 0
    evictable: int = 0
    unsaved: int = 0
    pinned: int = 0
    states: dict[ObjectState, int] = field(default_factory=lambda: dict.fromkeys(ObjectState, 0))
    freed: int = field(default=0, compare=False)

    @property
    def reachable(self) -> int:
        """Return the free and evictable bytes, an upper bound of what can be allocated now."""
        return self.free + self.evictable

    def add(self, other: Accounts, sign: int = 1) -> None:
        """Add the bytes of another account; sign -1 takes them away."""
        self.capacity += sign * other.capacity
        self.free += sign * other.free
        self.evictable += sign * other.evictable
        self.unsaved += sign * other.unsaved
        self.pinned += sign * other.pinned
        for state in self.states:
            self.states[state] += sign * other.states[state]

    def pool_full(self, needed_bytes: int) -> PoolFull:
        """Return the error that says what holds the pool when these bytes do not fit."""
        states = self.states
        kept = states[ObjectState.VISIBLE] - self.evictable - self.unsaved  # leased or pinned
        return PoolFull(
            needed_bytes=needed_bytes,
            capacity_bytes=self.capacity,
            free_bytes=self.free,
            evictable_bytes=self.evictable,
            leased_bytes=kept + states[ObjectState.PRIVATE] + states[ObjectState.UNLISTED],
            writing_bytes=states[ObjectState.WRITING] + states[ObjectState.QUARANTINED],
            unsaved_bytes=self.unsaved,
        )


class Segment:
    """The ranges and accounts of one segment. Each change is booked in `total` too, the accounts of the pool.

        saver        the rank whose tier saves the blocks that become visible here, None without one
        copies       VISIBLE objects here whose key is VISIBLE on another segment too, by id, longest unused
                     first
        is_changed   it stands in the pool's list of segments that have changed since they were ranked

    Invariant: the accounts are the sums over the objects here.
    """

    def __init__(
        self, rank: int, nbytes: int, node: int, policy: Policy, total: Accounts, changed: list[Segment]
    ):
        self.rank = rank
        self.node = node
        self.allocator = RangeAllocator(nbytes)
        self.policy = policy
        self.copies: OrderedDict[int, PoolObject] = OrderedDict()
        self.saver: int | None = None
        self.accounts = Accounts(self.allocator.capacity, self.allocator.capacity)
        self.is_changed = False
        self._total = total
        self._changed = changed
        self._soft_ends: list[float] = []
        total.add(self.accounts)
        total.freed += 1
        self.note_change()

    def note_change(self) -> None:
        """Call after each change of what is free here, or of what would be evicted first."""
        if not self.is_changed:
            self.is_changed = True
            self._changed.append(self)

    def place(self, nbytes: int, contiguous: bool, most: int = 1) -> list[tuple[Extent, ...]]:
        """Allocate up to `most` WRITING objects of nbytes; return the extents of those that fit.

        contiguous   only whole ranges; otherwise only one object is allocated, which may get several extents
        """
        if contiguous:
            places: list[tuple[Extent, ...]] = [
                ((offset, nbytes),) for offset in self.allocator.allocate_run(nbytes, most)
            ]
        else:
            extents = self.allocator.allocate_extents(nbytes)
            places = [extents] if extents else []
        if places:
            self._note_taken()
        return places

    def take_behind(self, offset: int, nbytes: int) -> bool:
        """Take the range of a WRITING object, if it lies behind all others."""
        taken = self.allocator.take_behind(offset, nbytes)
        if taken:
            self._note_taken()
        return taken

    def _note_taken(self) -> None:
        """Count the bytes that the allocator has given out since the last time."""
        taken = self.accounts.free - self.allocator.free_bytes
        for accounts in (self.accounts, self._total):
            accounts.free -= taken
            accounts.states[ObjectState.WRITING] += taken
        self.note_change()

    def clear(self, obj: PoolObject) -> None:
        """Free an object's extents. It must be out of the policy's order."""
        padded = obj.padded
        for accounts in (self.accounts, self._total):
            accounts.free += padded
            accounts.freed += 1
            accounts.states[obj.state] -= padded
            if obj.evictable:
                accounts.evictable -= padded
            if obj.unsaved:
                accounts.unsaved -= padded
            if obj.pins is not None and obj.pins.is_pinned:
                accounts.pinned -= padded
        obj.evictable = obj.unsaved = False
        for offset, _ in obj.extents:
            self.allocator.free(offset)
        self.note_change()

    def set_state(self, obj: PoolObject, state: ObjectState) -> None:
        """Change an object's state, and the bytes by state with it; note the soft pin of a VISIBLE one."""
        padded = obj.padded
        for accounts in (self.accounts, self._total):
            accounts.states[obj.state] -= padded
            accounts.states[state] += padded
        obj.state = state
        if obj.pins is not None and state is ObjectState.VISIBLE:
            self.note_soft_pin(obj.pins.soft_until)
        self.note_evictable(obj)

    def set_unsaved(self, obj: PoolObject, unsaved: bool) -> None:
        """Note whether the tier still has to save an object, which may not be evicted until then."""
        change = obj.padded * (unsaved - obj.unsaved)
        self.accounts.unsaved += change
        self._total.unsaved += change
        obj.unsaved = unsaved
        self.note_evictable(obj)

    def note_evictable(self, obj: PoolObject) -> None:
        """Call after any change of an object's state, leases, pins or unsaved."""
        evictable = obj.state is ObjectState.VISIBLE and not obj.lessees and not obj.unsaved
        if obj.pins is not None:
            evictable = evictable and not obj.pins.hard_pin
            self._note_pins(obj)
        if evictable is not obj.evictable:
            change = obj.padded if evictable else -obj.padded
            for accounts in (self.accounts, self._total):
                accounts.evictable += change
                accounts.freed += evictable
            obj.evictable = evictable
        if not self.is_changed:
            self.note_change()

    def _note_pins(self, obj: PoolObject) -> None:
        assert obj.pins is not None
        is_pinned = obj.state is ObjectState.VISIBLE and obj.pins.hard_pin
        if is_pinned is not obj.pins.is_pinned:
            change = obj.padded if is_pinned else -obj.padded
            self.accounts.pinned += change
            self._total.pinned += change
            obj.pins.is_pinned = is_pinned

    def count_for(self, obj: PoolObject, class_id: int, now: float) -> None:
        """Count a VISIBLE object for a class higher than its own, which has used it."""
        assert obj.key is not None
        obj.class_id = class_id
        self.policy.on_class(obj.key, obj.facts, now)
        self._total.freed += 1  # its old class may now keep fewer blocks from others
        self.accounts.freed += 1
        self.note_change()

    def note_soft_pin(self, until: float) -> None:
        """Call for each soft pin of an object that is VISIBLE here."""
        if until:
            heappush(self._soft_ends, until)

    def first_victim_until(self, now: float, copy_cold_s: float) -> float:
        """Return until when the first object to evict stays the same, if nothing else happens.

        Time alone changes it when a soft pin ends or a copy grows cold. The answer may be too early, but
        never too late.
        """
        while self._soft_ends and self._soft_ends[0] <= now:
            heappop(self._soft_ends)
        until = self._soft_ends[0] if self._soft_ends else float("inf")
        for obj in self.copies.values():
            if now - obj.last_use_s < copy_cold_s:
                return min(until, obj.last_use_s + copy_cold_s)
            if obj.evictable and not obj.soft_pinned(now):
                break
        return until
