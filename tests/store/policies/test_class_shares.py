"""Shares of service classes: what no class takes from another, and what it may borrow."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from store.policies import BlockFacts, Policy, policy_factory
from store.policies.class_shares import ClassShares
from tests.conftest import examples

HIGH, MIDDLE, LOW = range(3)


def shared(shares: tuple[float, ...], capacity: int = 10, inner: str = "lru") -> Policy:
    return policy_factory(inner, shares=shares)(capacity)


def fill(policy: Policy, class_id: int, items: range) -> None:
    for item in items:
        policy.on_insert(item, BlockFacts(class_id=class_id), 0.0)


@pytest.mark.quick
def test_without_a_share_there_is_no_wrapper() -> None:
    assert not isinstance(shared((0.0, 0.0)), ClassShares)


@pytest.mark.quick
def test_the_lowest_class_above_its_share_goes_first_each_in_the_inner_order() -> None:
    policy = shared((0.2, 0.2, 0.2))
    fill(policy, HIGH, range(0, 3))
    fill(policy, MIDDLE, range(10, 13))
    fill(policy, LOW, range(20, 24))
    policy.on_access(20, 1.0)

    assert list(policy.victims_for(HIGH, 1.0)) == [21, 22, 23, 20, 10, 11, 12, 0, 1, 2]
    for item in (21, 22):
        policy.on_remove(item, evicted=True)
    assert list(policy.victims_for(HIGH, 1.0)) == [10, 11, 12, 0, 1, 2]
    assert list(policy.victims_for(LOW, 1.0)) == [10, 11, 12, 0, 1, 2, 23, 20]
    assert list(policy.victims(1.0)) == [10, 11, 12, 0, 1, 2, 23, 20]
    assert policy.spared(HIGH) == 4


@pytest.mark.quick
def test_a_class_borrows_what_others_do_not_use_and_they_take_it_back() -> None:
    policy = shared((0.5, 0.0))
    fill(policy, MIDDLE, range(10, 20))  # the whole segment
    for item in range(5):
        victim = next(policy.victims_for(HIGH, 1.0))
        assert victim >= 10
        policy.on_remove(victim, evicted=True)
        fill(policy, HIGH, range(item, item + 1))

    assert all(item >= 10 for item in policy.victims_for(MIDDLE, 1.0))
    assert policy.spared(MIDDLE) == 5
    assert policy.spared(MIDDLE, [0, 1]) == 3
    assert policy.spared(HIGH) == 0


@pytest.mark.quick
def test_a_block_that_a_higher_class_uses_moves_there_and_is_new() -> None:
    policy = shared((0.5, 0.0))
    fill(policy, MIDDLE, range(3))
    policy.on_class(1, BlockFacts(class_id=HIGH), 1.0)
    policy.on_access_all([1, 0], 1.0)

    policy.check()
    assert list(policy.victims_for(MIDDLE, 2.0)) == [2, 0]
    assert sorted(policy) == [0, 1, 2]


@pytest.mark.quick
def test_shares_are_whole_blocks_and_at_most_the_segment() -> None:
    assert shared((0.29, 0.0), 100).capacity == 100
    policy = shared((0.29, 0.0), 100)
    fill(policy, HIGH, range(29))
    assert not list(policy.victims_for(MIDDLE, 0.0))
    fill(policy, HIGH, range(29, 30))
    assert next(policy.victims_for(MIDDLE, 0.0)) == 0
    for wrong in ((0.7, 0.4), (-0.1, 0.2)):
        with pytest.raises(ValueError, match="the sum may be 1 at most"):
            shared(wrong)


class Shares(RuleBasedStateMachine):
    """A segment that evicts like the directory: for one class, the first victim that is not leased."""

    @initialize(
        inner=st.sampled_from(["lru", "s3fifo", "sieve", "arc", "leaves-first", "wtinylfu"]),
        shares=st.sampled_from([(0.5, 0.0, 0.0), (0.4, 0.3, 0.3), (0.3, 0.0, 0.2), (0.0, 0.0, 1.0)]),
    )
    def begin(self, inner: str, shares: tuple[float, ...]) -> None:
        self.policy = shared(shares, inner=inner)
        self.limits = [round(share * 10) for share in shares]
        self.classes: dict[int, int] = {}
        self.leased: set[int] = set()
        self.fresh = 0

    def held(self, class_id: int) -> int:
        return list(self.classes.values()).count(class_id)

    @rule(class_id=st.integers(0, 2))
    def insert(self, class_id: int) -> None:
        if len(self.classes) == 10 and not self.evict_for(class_id):
            return
        self.policy.on_insert(self.fresh, BlockFacts(class_id=class_id, parent=self.fresh - 1), 0.0)
        self.classes[self.fresh] = class_id
        self.fresh += 1

    def evict_for(self, class_id: int) -> bool:
        offered = list(self.policy.victims_for(class_id, 0.0))
        spared = self.policy.spared(class_id)
        victim = next((item for item in offered if item not in self.leased), None)
        if victim is None:
            return False
        owner = self.classes[victim]
        assert owner == class_id or self.held(owner) > self.limits[owner], "evicted below its share"
        self.policy.on_remove(victim, evicted=True)
        del self.classes[victim]
        assert self.policy.spared(class_id) == spared
        return True

    @precondition(lambda self: self.classes)
    @rule(data=st.data(), class_id=st.integers(0, 2))
    def use(self, data: st.DataObject, class_id: int) -> None:
        item = data.draw(st.sampled_from(sorted(self.classes)))
        if class_id < self.classes[item]:
            self.policy.on_class(item, BlockFacts(class_id=class_id, parent=item - 1), 0.0)
            self.classes[item] = class_id
        self.policy.on_access(item, 0.0)

    @precondition(lambda self: self.classes)
    @rule(data=st.data())
    def lease_or_release(self, data: st.DataObject) -> None:
        self.leased ^= {data.draw(st.sampled_from(sorted(self.classes)))}

    @precondition(lambda self: self.classes.keys() - self.leased)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.classes.keys() - self.leased)))
        self.policy.on_remove(item, evicted=False)
        del self.classes[item]

    @rule(class_id=st.integers(0, 2))
    def may_take_all_that_is_not_spared(self, class_id: int) -> None:
        """What evicting one after the other can take is everything but `spared`: no one waits for more."""
        least = sum(min(self.held(c), self.limits[c]) for c in range(3) if c != class_id)
        assert self.policy.spared(class_id) == least
        offered = {self.classes[item] for item in self.policy.victims_for(class_id, 0.0)}
        over = {c for c in range(3) if self.held(c) > (0 if c == class_id else self.limits[c])}
        assert offered == over

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "policy"):
            self.policy.check()
            assert sorted(self.policy) == sorted(self.classes) == sorted(self.policy.victims(0.0))


Shares.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=40)
TestShares = Shares.TestCase
