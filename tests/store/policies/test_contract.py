"""What `store.policies.contract` promises, for every policy there is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.errors import UnknownPolicy
from store.policies import NAMES, POLICIES, BlockFacts, policy_factory
from store.policies.lru import LRU
from store.ranking import Ranking
from tests.conftest import examples
from tests.store.policies.pools import EVERY, Pool, facts_of, make, stream

items = st.integers(0, 14)
events = st.lists(
    st.one_of(
        st.tuples(st.just("refer"), items),
        st.tuples(st.just("refer"), items),
        st.tuples(st.sampled_from(["pin", "unpin", "delete"]), items),
    ),
    max_size=80,
)


def play(pool: Pool, event: tuple[str, int]) -> None:
    what, item = event
    if what == "refer":
        pool.refer(item)
    elif what == "pin" and item in pool.present:
        pool.pinned.add(item)
    elif what == "unpin":
        pool.pinned.discard(item)
    elif what == "delete" and item not in pool.pinned:
        pool.delete(item)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=examples(60))
@given(life=events, blocks=st.integers(1, 7), room_first=st.booleans())
def test_the_pool_never_overflows_no_pin_is_broken_and_equal_events_mean_equal_decisions(
    name: str, life: list[tuple[str, int]], blocks: int, room_first: bool
) -> None:
    """The second pool asks three times before each eviction: asking is no event."""
    future = [item for what, item in life if what == "refer"]
    one = Pool(make(name, blocks, future), blocks, room_first=room_first)
    two = Pool(make(name, blocks, future), blocks, room_first=room_first, asks=3)
    if name == "belady" and room_first:
        return  # a reference that finds no room is never told, and the oracle wants to hear of every one
    for event in life:
        pinned = one.pinned & one.present
        play(one, event)
        one.check()
        play(two, event)
        assert pinned <= one.present | {event[1]}
        assert one.log == two.log
        assert one.present == two.present


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=examples(30))
@given(references=st.lists(items, max_size=40), blocks=st.integers(1, 7))
def test_all_items_are_offered_once(name: str, references: list[int], blocks: int) -> None:
    pool = Pool(make(name, blocks, references), blocks)
    for item in references:
        pool.refer(item)
    offered = list(pool.policy.victims(pool.now))
    assert len(set(offered)) == len(offered)
    assert set(offered) == pool.present
    pool.check()


@pytest.mark.quick
@pytest.mark.parametrize("name", EVERY)
def test_items_told_together_count_like_items_told_one_by_one(name: str) -> None:
    hits = [4, 2, 4, 0, 5, 1]
    one, two = (make(name, 6, [*range(6), *hits]) for _ in range(2))
    for item in range(6):
        for policy in (one, two):
            policy.on_insert(item, facts_of(item), 1.0)
    for item in hits:
        one.on_access(item, 2.0)
    two.on_access_all(hits, 2.0)
    assert list(one.victims(3.0)) == list(two.victims(3.0))
    two.check()


@pytest.mark.quick
def test_a_policy_made_from_another_hears_of_items_told_together_one_by_one() -> None:
    heard: list[int] = []

    class Listening(LRU):
        def on_access(self, item: int, now: float) -> None:
            heard.append(item)

    policy = Listening(3)
    for item in range(3):
        policy.on_insert(item, facts_of(item), 1.0)
    policy.on_access_all([0, 2], 2.0)
    assert heard == [0, 2]
    assert list(policy.victims(3.0)) == [0, 1, 2]


@pytest.mark.quick
@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_known_cannot_be_removed(name: str) -> None:
    with pytest.raises(KeyError):
        make(name, 3).on_remove(1, evicted=True)


@pytest.mark.quick
@pytest.mark.parametrize("name", EVERY)
def test_a_policy_for_no_blocks_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="for 0 blocks"):
        make(name, 0)


@pytest.mark.quick
def test_an_unknown_name_is_refused_with_all_known_ones() -> None:
    with pytest.raises(UnknownPolicy) as caught:
        policy_factory("mru")
    assert all(name in str(caught.value) for name in (*NAMES, "+second-hit", "+size"))
    assert "\n" not in str(caught.value)
    with pytest.raises(UnknownPolicy, match=r"'lru\+luck'"):
        policy_factory("lru+luck")


@pytest.mark.quick
def test_the_oracle_is_refused_where_there_is_no_future_and_behind_a_filter() -> None:
    with pytest.raises(UnknownPolicy, match="belady needs the future"):
        policy_factory("belady")
    with pytest.raises(UnknownPolicy, match="must see every reference"):
        policy_factory("belady+size", [1])
    with pytest.raises(ValueError, match="not what the future said"):
        policy_factory("belady", [1, 2])(3).on_insert(2, BlockFacts(), 0.0)


@pytest.mark.quick
def test_names_are_in_the_order_in_which_they_are_told() -> None:
    assert [*POLICIES, "belady"] == list(NAMES)
    assert NAMES[0] == "lru"


@pytest.mark.parametrize("name", EVERY)
def test_a_hundred_thousand_blocks_cost_as_much_each_as_a_thousand(name: str) -> None:
    """A copy or a scan of all items per eviction would make the large pool a hundred times slower."""
    costs = {}
    for blocks in (1_000, 100_000):
        churn = stream(1, 3_000, 2_000)
        filled = range(10**6, 10**6 + blocks)
        policy = make(name, blocks, [*filled, *churn])
        for item in filled:
            policy.on_insert(item, BlockFacts(position=item % 7, cost_s=1.0), 0.0)
        known = set(filled)
        best = float("inf")
        for begin in range(0, len(churn), 500):
            started = time.process_time()
            for item in churn[begin : begin + 500]:
                if item in known:
                    policy.on_access(item, 1.0)
                    continue
                policy.on_insert(item, BlockFacts(), 1.0)
                known.add(item)
                victim = next(policy.victims(1.0))
                policy.on_remove(victim, evicted=True)
                known.remove(victim)
            best = min(best, time.process_time() - started)
        costs[blocks] = best
    assert costs[100_000] < 15 * costs[1_000], costs


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(items, st.integers(0, 5) | st.none()), max_size=300))
def test_a_ranking_is_always_in_the_order_of_its_keys(changes: list[tuple[int, int | None]]) -> None:
    ranking, model = Ranking(), dict[int, tuple[int, int]]()
    for number, (item, key) in enumerate(changes):
        if key is not None:
            ranking.rank(item, key)
            model[item] = (key, number)
        elif item in model:
            ranking.remove(item)
            del model[item]
        ranking.check()
        expected = sorted(model, key=lambda item: model[item])
        assert list(ranking.ascending()) == expected
        if expected:
            assert ranking.first() == expected[0]
