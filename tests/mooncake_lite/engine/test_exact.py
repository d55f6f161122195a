"""What the comparison with an oracle excuses, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncake_lite.messages import Sampling
from tests.mooncake_lite.engine.exact import Case, assert_answers, choice

pytestmark = pytest.mark.quick

WORDS = 10
LONG = 2000


def oracle(gap: float) -> Any:
    """After token t comes t + 1, modulo WORDS; after token 5 the token 8 is `gap` less likely."""

    def read(ids: torch.Tensor) -> Any:
        logits = torch.zeros(*ids.shape, WORDS, dtype=torch.float64)
        logits.scatter_(2, ((ids + 1) % WORDS)[..., None], 1.0)
        logits[..., 8][ids == 5] = 1.0 - gap
        return SimpleNamespace(logits=logits)

    return read


def answer(first: int, length: int) -> tuple[int, ...]:
    return tuple((first + i) % WORDS for i in range(length))


def go_on(cases: Sequence[Case]) -> list[tuple[int, ...]]:
    return [
        (*case.answer[: case.agreed], *answer(case.answer[case.agreed - 1] + 1, LONG - case.agreed))
        for case in cases
    ]


GREEDY = Sampling(0.0)
RIGHT = Case((0,), GREEDY, answer(1, LONG))
OTHER = Case((0,), GREEDY, (1, 2, 3, 4, 5, 8, *answer(9, LONG - 6)))


def test_right_answers_need_no_excuse() -> None:
    assert assert_answers(oracle(0.5), [RIGHT], go_on) == 0


def test_a_token_that_is_almost_as_good_is_excused_and_the_rest_is_compared_after_the_oracles() -> None:
    assert assert_answers(oracle(0.9e-4), [OTHER], go_on) == 1
    with pytest.raises(AssertionError, match="token 6 of the answer to 1 tokens is 9, not 7"):
        assert_answers(oracle(0.9e-4), [OTHER], lambda cases: [(1, 2, 3, 4, 5, 6, *OTHER.answer[6:])])


def test_a_token_that_is_less_good_is_not_excused() -> None:
    with pytest.raises(AssertionError, match=r"is 8, not 6; 1\.1 times"):
        assert_answers(oracle(1.1e-4), [OTHER], go_on)


def test_one_token_in_a_thousand_may_be_excused() -> None:
    short = Case((0,), GREEDY, OTHER.answer[:6])
    assert assert_answers(oracle(0.9e-4), [short], go_on) == 1
    with pytest.raises(AssertionError, match="2 of 12 tokens differ by rounding"):
        assert_answers(oracle(0.9e-4), [short, short], go_on)


@pytest.mark.parametrize(("top_k", "excused"), [(0, False), (3, True)])
def test_tokens_that_are_drawn_in_their_order_may_change_places_where_they_are_equal(
    top_k: int, excused: bool
) -> None:
    sampling = Sampling(0.1, top_k=top_k)
    found = [
        choice(oracle(0.9e-4)(torch.tensor([[5]])).logits[0, 0].numpy(), Case((5,), sampling, ()), position)
        for position in range(1, 40)
    ]
    assert {one.token for one in found} == {6, 8}
    assert all((one.twins >= {6, 8}) == excused for one in found)


@pytest.mark.parametrize("how", [{}, {"top_k": 4}, {"top_p": 0.9}], ids=str)
def test_the_draws_are_those_of_the_engine(how: dict[str, Any]) -> None:
    from mooncake_lite.engine.sampler import sample
    from scheduler.instance.step import Draw

    sampling = Sampling(0.7, seed=4, **how)
    ids = [0]
    for _ in range(50):
        row = oracle(0.5)(torch.tensor([ids])).logits[0, -1:].float().numpy()
        ids.append(sample(row, [Draw(sampling, list(ids), len(ids) - 1, frozenset(), 2)])[0].token)
    assert len(set(ids)) > 3
    assert assert_answers(oracle(0.5), [Case((0,), sampling, tuple(ids[1:]), 2)], go_on) == 0
