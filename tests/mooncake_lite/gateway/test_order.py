"""Tokens come out in order and once, in whatever order and how often they come in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lite.gateway.order import InOrder
from mooncake_lite.messages import Logprobs, Tokens

pytestmark = pytest.mark.quick


def passed(order: InOrder, messages: list[Tokens]) -> list[Tokens]:
    turn = []
    for message in messages:
        turn += order.push(message)
        order.check()
    return turn


def test_the_first_token_may_be_overtaken_by_the_decode_rank() -> None:
    order = InOrder(8)
    late = Tokens("r", 0, [10], None, {"dram": 64})

    assert order.push(Tokens("r", 1, [11, 12])) == []
    assert order.push(late) == [late, Tokens("r", 1, [11, 12])]


def test_nothing_comes_after_the_end() -> None:
    order = InOrder(8)
    order.push(Tokens("r", 0, [10], "stop"))

    assert order.push(Tokens("r", 1, [11])) == []


def test_what_reaches_beyond_max_tokens_is_dropped() -> None:
    order = InOrder(2)

    assert order.push(Tokens("r", 0, [1, 2, 3])) == []
    assert order.push(Tokens("r", -1, [1])) == []
    assert order.waiting == {}


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=10),
    repeats=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_any_order_with_any_repetitions_gives_the_answer_once(
    sizes: list[int], repeats: int, seed: int
) -> None:
    total = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    messages = [Tokens("r", start, list(range(start, start + size))) for start, size in zip(starts, sizes)]
    messages.append(Tokens("r", total, [], "length"))
    dice = random.Random(seed)
    messages += dice.choices(messages, k=repeats)
    dice.shuffle(messages)
    order = InOrder(total)

    turn = passed(order, messages)

    assert [token for message in turn for token in message.token_ids] == list(range(total))
    assert [message.finish for message in turn if message.finish] == ["length"]
    assert order.ended


def test_a_message_that_repeats_a_part_keeps_what_is_said_of_the_other_part() -> None:
    order = InOrder(8)
    order.push(Tokens("r", 0, [10, 11], branch=2))
    logprobs = [Logprobs(-float(index), []) for index in range(3)]

    (new,) = order.push(Tokens("r", 1, [11, 12], "stop", logprobs=logprobs, branch=2, end_token=1))

    assert new == Tokens("r", 2, [12], "stop", logprobs=logprobs[1:], branch=2, end_token=1)


def test_what_comes_for_an_answer_that_is_not_wanted_any_more_is_dropped() -> None:
    order = InOrder(8)
    order.push(Tokens("r", 1, [11]))
    order.end()

    assert order.push(Tokens("r", 0, [10])) == []
    assert order.waiting == {}


def test_after_a_recall_older_attempts_are_dropped_and_newer_ones_go_on() -> None:
    order = InOrder(8)
    order.push(Tokens("r", 0, [10, 11], attempt=2))
    order.push(Tokens("r", 4, [14], attempt=2))

    order.recall(2)

    assert (order.token_ids, order.next, order.waiting) == ([10, 11], 2, {}), "what waited is forgotten"
    assert order.push(Tokens("r", 2, [12], attempt=2)) == []
    assert order.push(Tokens("r", 2, [12], attempt=1)) == []
    assert order.waiting == {}
    again = Tokens("r", 2, [92, 93], attempt=3)
    assert order.push(again) == [again]
    assert order.push(Tokens("r", 4, [94], "stop", attempt=4)) == [Tokens("r", 4, [94], "stop", attempt=4)]
    assert (order.token_ids, order.ended) == ([10, 11, 92, 93, 94], True)


def test_an_answer_that_has_ended_stays_so_after_a_recall() -> None:
    order = InOrder(8)
    order.push(Tokens("r", 0, [10], "stop", attempt=1))

    order.recall(1)

    assert order.push(Tokens("r", 1, [11], attempt=2)) == []
    assert (order.token_ids, order.ended) == ([10], True)


@given(
    before=st.integers(0, 6),
    late=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_late_tokens_of_a_recalled_attempt_never_change_an_answer(
    before: int, late: list[tuple[int, int]], seed: int
) -> None:
    order = InOrder(10)
    messages = [Tokens("r", index, [index], attempt=1) for index in range(before)]
    passed(order, messages)
    order.recall(1)
    wrong = [Tokens("r", index, [-1] * size, attempt=1) for index, size in late]
    right = [Tokens("r", index, [100 + index], attempt=2) for index in range(before, 10)]
    both = [*wrong, *right]
    random.Random(seed).shuffle(both)

    passed(order, both)

    assert order.token_ids == [*range(before), *range(100 + before, 110)]
