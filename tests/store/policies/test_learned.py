"""The learned policy keeps its promise whatever it is told about the future."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.policies.learned import Learned
from store.policies.predictor import ReusePredictor
from tests.conftest import examples
from tests.store.policies import naive
from tests.store.policies.pools import Pool, hits, stream


class Told:
    """Predictions from a list, right or wrong."""

    def __init__(self, answers: list[int]):
        self.answers = answers

    def next_use(self, item: int, reference: int) -> float:
        return reference + self.answers[reference % len(self.answers)]


class Knows:
    """The truth."""

    def __init__(self, references: list[int]):
        self.references = references

    def next_use(self, item: int, reference: int) -> float:
        """reference counts from 1."""
        rest = self.references[reference:]
        return reference + 1 + (rest.index(item) if item in rest else 10**6)


def played(policy: Learned, references: list[int], blocks: int) -> Learned:
    pool = Pool(policy, blocks)
    for item in references:
        pool.refer(item)
    pool.check()
    return policy


@settings(max_examples=examples(150))
@given(
    references=st.lists(st.integers(0, 9), max_size=120),
    answers=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    blocks=st.integers(1, 6),
)
def test_it_never_misses_more_than_twice_as_often_as_the_better_of_lru_and_the_predictions(
    references: list[int], answers: list[int], blocks: int
) -> None:
    """Fiat et al. 1991 and Wei 2020: the combination of two deterministic policies is within 2 of both."""
    bound = played(Learned(blocks, Told(answers)), references, blocks).bound()
    assert bound.misses <= 2 * bound.lru
    assert bound.misses <= 2 * bound.predicted
    assert bound.most == 2 * min(bound.lru, bound.predicted)
    assert bound.lru == naive.lru(references, blocks).count(False)


@pytest.mark.quick
def test_the_worst_advice_costs_at_most_twice_the_misses_of_lru() -> None:
    """Predictions that are exactly wrong: what is used next is said to be used last."""

    class Liar(Knows):
        def next_use(self, item: int, reference: int) -> float:
            return reference + 10**6 / super().next_use(item, reference)

    references = stream(3, 1500, 40)
    bound = played(Learned(10, Liar(references)), references, 10).bound()
    assert bound.predicted > bound.lru
    assert bound.misses <= 2 * bound.lru


@pytest.mark.quick
def test_perfect_advice_costs_at_most_twice_the_misses_of_the_oracle() -> None:
    """With true predictions BlindOracle is Belady's oracle, except that it must take in what is asked for."""
    references = stream(4, 800, 40)
    bound = played(Learned(10, Knows(references)), references, 10).bound()
    best = hits("belady", references, 10).count(False)
    assert bound.predicted < bound.lru
    assert bound.misses <= 2 * best
    assert bound.misses < bound.lru


def least_misses(references: list[int], blocks: int) -> int:
    """Of all choices of victims. What is asked for must be taken in."""
    held: dict[frozenset[int], int] = {frozenset(): 0}
    for item in references:
        after: dict[frozenset[int], int] = {}
        for some, misses in held.items():
            rests = [some - {item}]
            if item not in some and len(some) == blocks:
                rests = [some - {victim} for victim in some]
            for rest in rests:
                one = rest | {item}
                after[one] = min(after.get(one, 10**9), misses + (item not in some))
        held = after
    return min(held.values())


@pytest.mark.quick
@settings(max_examples=examples(100))
@given(
    references=st.lists(st.integers(0, 5), max_size=40),
    answers=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    blocks=st.integers(1, 4),
)
def test_against_the_best_of_all_choices_right_advice_is_within_2_and_any_within_twice_the_blocks(
    references: list[int], answers: list[int], blocks: int
) -> None:
    best = least_misses(references, blocks)
    right = played(Learned(blocks, Knows(references)), references, blocks).bound()
    assert right.misses <= 2 * best
    assert right.predicted == best, "BlindOracle with the truth is Belady's oracle"
    assert played(Learned(blocks, Told(answers)), references, blocks).bound().misses <= 2 * blocks * best


@pytest.mark.quick
def test_the_predictor_learns_how_soon_blocks_like_this_one_come_back() -> None:
    predictor = ReusePredictor(50)
    for number in range(1, 2000, 2):
        predictor.next_use(7, number)  # every second reference
        predictor.next_use(10**6 + number, number + 1)  # never again
    soon = predictor.next_use(7, 2001) - 2001
    never = predictor.next_use(5, 2002) - 2002
    assert 1 <= soon < 5
    assert never > 1000


@pytest.mark.quick
def test_learning_pays_where_lru_is_at_its_worst() -> None:
    """A loop that is one block longer than the pool: LRU misses always, the learned policy does not."""
    references = list(range(11)) * 60
    learned = played(Learned(10), references, 10).bound()
    assert learned.lru == len(references)
    assert learned.misses < 0.5 * learned.lru


@pytest.mark.quick
def test_equal_references_give_an_equal_bound() -> None:
    references = [random.Random(1).randrange(30) for _ in range(500)]
    assert len({played(Learned(8), references, 8).bound() for _ in range(2)}) == 1
