"""A pool around a policy, as small as can be, and streams of references to play."""

from __future__ import annotations

import random
from collections.abc import Sequence

from store.policies import NAMES, BlockFacts, Policy, policy_factory

EVERY = (*NAMES, "lru+second-hit", "arc+size")


def facts_of(item: int) -> BlockFacts:
    """Items form a binary tree: 0, its children 1 and 2, theirs 3 to 6, and so on. Deeper ones cost more."""
    depth = (item + 1).bit_length() - 1
    parent = (item - 1) // 2 if item else None
    return BlockFacts(1, 1.0 + depth / 2, 0, parent, depth)


def make(name: str, capacity: int, future: Sequence[int] = ()) -> Policy:
    return policy_factory(name, future)(capacity)


class Pool:
    """Blocks of one size.

    room_first  make room before inserting, as the directory does, instead of after, as the replay does
    log         what was decided, in order
    """

    def __init__(self, policy: Policy, blocks: int, *, room_first: bool = False, asks: int = 1):
        self.policy, self.blocks, self.room_first, self.asks = policy, blocks, room_first, asks
        self.present: set[int] = set()
        self.pinned: set[int] = set()
        self.log: list[tuple[str, int]] = []
        self.now = 0.0

    def refer(self, item: int) -> bool:
        """One reference; whether it was a hit."""
        self.now += 1
        if item in self.present:
            self.policy.on_access(item, self.now)
            return True
        if not self.policy.admits(item, facts_of(item), self.now):
            self.log.append(("kept out", item))
        elif not self.room_first:
            self.insert(item)
            if len(self.present) > self.blocks and not self.evict():
                self.delete(item)
        elif len(self.present) < self.blocks or self.evict():
            self.insert(item)
        return False

    def insert(self, item: int) -> None:
        self.policy.on_insert(item, facts_of(item), self.now)
        self.present.add(item)

    def victim(self) -> int | None:
        return next((item for item in self.policy.victims(self.now) if item not in self.pinned), None)

    def evict(self) -> bool:
        """One that may go, if there is any."""
        victims = {self.victim() for _ in range(self.asks)}
        assert len(victims) == 1, "asked again, it names another one"
        (victim,) = victims
        if victim is None:
            return False
        self.log.append(("evicted", victim))
        self.policy.on_remove(victim, evicted=True)
        self.present.remove(victim)
        return True

    def delete(self, item: int) -> None:
        if item in self.present:
            self.policy.on_remove(item, evicted=False)
            self.present.remove(item)

    def check(self) -> None:
        self.policy.check()
        assert len(self.policy) == len(self.present) <= self.blocks
        assert sorted(self.policy) == sorted(self.present)


def stream(seed: int, length: int, items: int) -> list[int]:
    """Skewed references with scans of things never seen again in between."""
    draw = random.Random(seed)
    made: list[int] = []
    fresh = items
    while len(made) < length:
        if draw.random() < 0.02:
            made += range(fresh, fresh + items // 2)
            fresh += items // 2
        made.append(min(int(draw.paretovariate(0.7)) - 1, items - 1))
    return made[:length]


def hits(name: str, references: Sequence[int], blocks: int, *, room_first: bool = False) -> list[bool]:
    """Which references are hits."""
    pool = Pool(make(name, blocks, references), blocks, room_first=room_first)
    return [pool.refer(item) for item in references]


def evictions(name: str, references: Sequence[int], blocks: int) -> list[int]:
    """Who goes, in order; room is made after inserting."""
    pool = Pool(make(name, blocks, references), blocks)
    for item in references:
        pool.refer(item)
    return [item for what, item in pool.log if what == "evicted"]
