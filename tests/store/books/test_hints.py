"""Hints about blocks: what is evicted when, and that wrong hints cost no more misses than they may."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random

import pytest

from store.books.hints import MOST_OWNERS
from store.books.trust import ALLOWANCE, FIRST_RISK, LEAST_RISK, PAID_OFF
from store.directory import Directory
from store.errors import CopyExists, PoolFull
from store.objects import PoolObject, Wanted
from store.policies import policy_factory
from tests.store.samples import SMALL, digest_of

pytestmark = pytest.mark.quick

SUMS = [1] * SMALL.layers
A, B = ("a", ""), ("b", "")


class Pool:
    """Segments of so many blocks together. References to single blocks are hits, or are computed and put.

    misses   references that were none of the first kind
    """

    def __init__(self, blocks: int, hints: bool = True, policy: str = "lru", segments: int = 1) -> None:
        self.directory = Directory(SMALL, policy=policy_factory(policy))
        for rank in range(1, segments + 1):
            self.directory.add_segment(rank, blocks // segments * SMALL.nbytes, 0)
        self.now, self.misses = 0.0, 0
        if hints:
            assert self.directory.takes_hints()

    def use(self, *keys: int) -> None:
        """Refer to each key in turn."""
        for key in keys:
            self.now += 1.0
            found = self.directory.lookup([key], [digest_of(key)], self.now)
            self.directory.judge([key], found)
            if not found:
                self.misses += 1
                self.put(key)

    def put(self, key: int) -> None:
        obj = self.directory.allocate("r", SMALL.nbytes, now=self.now, key=key, digest=digest_of(key))
        self.directory.put_end(obj.object_id, SUMS, self.now)

    def hold(self, owner: tuple[str, str], keys: list[int], seconds: float, most: int = 99) -> int:
        return self.directory.hold(owner, self.blocks(keys), self.now + seconds, most)

    def demote(self, owner: tuple[str, str], keys: list[int], most: int = 99) -> int:
        return self.directory.demote(owner, self.blocks(keys), most)

    def share(self, tenant: str, key: int) -> None:
        """Copy a block from one of two segments to the other, where something is as old as most of it."""
        for block in self.blocks([key]):
            with suppress(PoolFull, CopyExists):
                _, copy = self.directory.replicate_for(
                    tenant,
                    partial(
                        self.directory.replicate, "copier", key, digest_of(key),
                        rank=3 - block.rank, now=self.now, until=self.now, idle_s=9.0,
                    ),
                )  # fmt: skip
                self.directory.put_end(copy.object_id, SUMS, self.now)
                self.directory.release("copier", self.now)

    def blocks(self, keys: list[int]) -> list[PoolObject]:
        return self.directory.leading(keys, [digest_of(key) for key in keys])

    @property
    def keys(self) -> set[int]:
        return {obj.key or 0 for obj in self.directory.visible_objects()}


def test_held_blocks_are_evicted_last_and_the_one_that_is_held_longest_first_of_them() -> None:
    pool = Pool(4)
    pool.use(1, 2, 3, 4)
    pool.hold(A, [1], 50.0)
    pool.hold(A, [2], 60.0)

    pool.use(5, 6)
    assert pool.keys == {1, 2, 5, 6}
    pool.hold(A, [5], 10.0)
    pool.hold(A, [6], 20.0)
    pool.use(7)
    assert pool.keys == {1, 5, 6, 7}
    pool.directory.check()


def test_a_hold_ends_at_its_time_and_neither_hits_nor_earlier_ends_change_it() -> None:
    pool = Pool(3)
    pool.use(1, 2, 3)
    pool.hold(A, [1], 10.0)
    pool.hold(A, [1], 1.0)
    pool.use(1, 4, 5, 6)
    assert 1 in pool.keys, "an earlier end shortens nothing"

    pool.use(*range(7, 17))
    assert 1 not in pool.keys, "a hit lengthens nothing"
    assert not pool.directory.held["a"]
    pool.directory.check()


def test_a_block_that_is_held_no_longer_is_as_cold_as_its_last_use() -> None:
    pool = Pool(3)
    pool.use(1, 2, 3)
    pool.hold(A, [1], 2.5)
    pool.use(4, 3)
    assert pool.keys == {1, 3, 4}
    pool.use(5)
    assert pool.keys == {3, 4, 5}

    pool.hold(A, [4], 1.5)
    pool.use(3, 6)
    assert pool.keys == {3, 5, 6}
    pool.directory.check()


def test_a_demoted_block_goes_next_unless_it_is_used_shared_held_or_pinned() -> None:
    pool = Pool(4)
    pool.use(1, 2, 3, 4)
    assert pool.demote(A, [4]) == 1
    pool.use(5)
    assert pool.keys == {1, 2, 3, 5}

    assert pool.demote(A, [5]) == 1
    pool.use(5, 6)
    assert pool.keys == {2, 3, 5, 6}, "it was used"

    pool.hold(B, [6], 99.0)
    assert pool.demote(A, [6]) == 0, "another tenant holds it"
    pool.directory.pin(5, digest_of(5), hard=True)
    assert pool.demote(A, [5]) == 0, "it is pinned"
    pool.use(2)
    assert pool.demote(A, [2, 3]) == 1, "2 was used after 3"
    pool.directory.check()


def test_a_demotion_ends_the_holds_of_its_owner_alone() -> None:
    pool = Pool(3)
    pool.use(1, 2, 3)
    pool.hold(A, [1], 99.0)
    assert pool.demote(("a", "other session"), [1]) == 0
    assert pool.demote(A, [1]) == 1
    pool.use(4)
    assert pool.keys == {2, 3, 4}


def test_a_tenant_holds_no_more_keys_than_it_may() -> None:
    pool = Pool(4)
    pool.use(1, 2, 3, 4)
    assert pool.hold(A, [1, 2, 3], 99.0, most=2) == 2
    assert pool.hold(("a", "session"), [2, 3], 99.0, most=2) == 1, "a key counts once"
    assert pool.hold(B, [3, 4], 99.0, most=2) == 2
    pool.directory.remove(1, digest_of(1), pool.now)
    assert pool.hold(A, [4], 99.0, most=2) == 1
    pool.directory.check()


def test_a_block_that_was_read_ahead_counts_once_it_is_used() -> None:
    pool = Pool(3)
    pool.use(1, 2, 3)
    trust = pool.directory.trust
    assert trust is not None
    for key in (4, 5):
        (obj,) = pool.directory.allocate_for(
            "a", "hint/1", [Wanted(SMALL.nbytes, key, digest_of(key))], pool.now, 1
        )
        pool.directory.put_end(obj.object_id, SUMS, pool.now)
    assert (trust.debt("a"), trust.risk("a"), trust.may("a")) == (0, FIRST_RISK, 2), "of four"
    pool.use(4)
    assert trust.debt("a") == -1
    pool.use(2)
    assert trust.debt("a") == 0
    assert trust.risk("a") > FIRST_RISK
    pool.directory.check()


def test_other_policies_and_shares_of_classes_follow_no_hints() -> None:
    assert not Pool(3, hints=False, policy="arc").directory.takes_hints()
    shared = Directory(SMALL, policy=policy_factory("lru", shares=[0.5, 0.1]))
    shared.add_segment(1, 8 * SMALL.nbytes, 0)
    assert not shared.takes_hints()


# ------------------------------------------------------------------------------ trust


def wrong(pool: Pool, key: int, alive: bool) -> None:
    """Demote what returns, and hold what does not."""
    if alive:
        pool.demote(A, [key])
    else:
        pool.hold(A, [key], 1e6)


def never_dead(pool: Pool, key: int, alive: bool) -> None:
    pool.hold(A, [key], 1e6)


def always_dead(pool: Pool, key: int, alive: bool) -> None:
    pool.demote(A, [key])


def share_dead(pool: Pool, key: int, alive: bool) -> None:
    if not alive:
        pool.share("a", key)


def right(pool: Pool, key: int, alive: bool) -> None:
    if alive:
        pool.hold(A, [key], 1e6)
    else:
        pool.demote(A, [key])


def misses(blocks: int, seed: int, hint: Callable[[Pool, int, bool], None] | None) -> int:
    """Of 6,000 references: 60 % to keys of a working set of the size of the pool, the others to new keys."""
    pool, dice = Pool(blocks, hints=hint is not None, segments=2), Random(seed)
    for number in range(6_000):
        alive = dice.random() < 0.6
        key = dice.randrange(blocks) if alive else 10_000 + number
        pool.use(key)
        if hint is not None and pool.directory.trust is not None and pool.directory.trust.may("a"):
            hint(pool, key, alive)
        if number % 100 == 0:
            pool.directory.check()
    return pool.misses


@pytest.mark.parametrize("hint", [wrong, never_dead, always_dead, share_dead])
@pytest.mark.parametrize("seed", [1, 2])
def test_wrong_hints_cost_no_more_misses_than_the_bound(
    hint: Callable[[Pool, int, bool], None], seed: int
) -> None:
    without, blocks = misses(100, seed, None), 100

    found = misses(blocks, seed, hint)
    assert found <= without * (1 + PAID_OFF) + blocks * ALLOWANCE / LEAST_RISK
    assert found <= 1.02 * without


def test_a_copy_for_a_hint_counts_as_long_as_its_original_is_there() -> None:
    pool = Pool(20, segments=2)
    pool.use(*range(40))
    pool.share("a", 39)
    assert len(pool.directory._copied) == 1
    pool.directory.remove_segment(pool.blocks([39])[0].rank)
    assert pool.blocks([39])
    assert not pool.directory._copied


@pytest.mark.parametrize("missed", [False, True])
def test_the_risk_of_displaced_blocks_is_learned_from_earlier_ones(missed: bool) -> None:
    pool = Pool(300)
    pool.use(*range(300))
    trust = pool.directory.trust
    assert trust is not None
    pool.demote(A, [298, 299])
    pool.use(1_000, 1_001)
    pool.use(*range(2_000, 2_250))
    assert LEAST_RISK < trust.risk("a") < 0.75 * FIRST_RISK
    assert trust.may("a") > 3 / FIRST_RISK
    if missed:
        pool.use(298, 299)
        assert trust.risk("a") > FIRST_RISK
        assert trust.may("a") < 3 / FIRST_RISK


def test_right_hints_are_worth_many_misses() -> None:
    assert misses(200, 1, right) < 0.8 * misses(200, 1, None)


def test_a_tenant_with_wrong_hints_loses_what_it_holds_and_another_does_not() -> None:
    pool = Pool(100)
    pool.use(*range(100))
    pool.hold(A, list(range(50)), 1e6)
    pool.hold(B, [99], 1e6)
    for number in range(400):
        pool.use(1000 + number, 50 + number % 49)

    assert not pool.directory.held["a"]
    assert pool.directory.held["b"] == 1


def test_a_hold_that_is_lengthened_again_and_again_takes_no_more_memory() -> None:
    pool = Pool(4)
    pool.use(1, 2)
    for second in range(1, 5_000):
        pool.hold(A, [1, 2], float(second))
    assert len(pool.directory._ends._heap) < 200
    pool.directory.end_holds(pool.now + 5_000.0)
    assert pool.directory.held[A[0]] == 0
    pool.directory.check()


def test_many_sessions_that_share_a_prompt_leave_its_blocks_with_few_owners() -> None:
    pool = Pool(4)
    pool.use(1, 2)
    for number in range(3 * MOST_OWNERS):
        assert pool.hold((f"tenant {number % 2}", f"{number}"), [1, 2], 10.0 + number) == 2
    assert len(pool.directory._holds[1]) == MOST_OWNERS
    pool.directory.check()
    pool.directory.end_holds(pool.now + 10.0 + 3 * MOST_OWNERS)
    assert not pool.directory._holds
