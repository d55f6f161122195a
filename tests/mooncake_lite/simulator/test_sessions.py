"""The requests of the experiments: equal for equal seeds, and each turn continues the one before it."""

from __future__ import annotations

from statistics import mean

import pytest

from mooncake_lite.simulator.sessions import SessionMix, Sessions
from mooncake_lite.simulator.tokens import Opaque
from mooncake_lite.simulator.workload import Request

pytestmark = pytest.mark.quick

BLOCK = 512


def made(seed: int, rate: float, count: int = 600, **mix: object) -> list[Request]:
    sessions = Sessions(seed, count, rate, SessionMix(**mix), BLOCK)  # type: ignore[arg-type]
    return [sessions.next() for _ in range(count)]


def text_of(request: Request) -> Opaque:
    """The tokens of a request, with the keys of prompt and answer."""
    assert isinstance(request.token_ids, Opaque)
    return request.token_ids


def test_the_keys_of_a_prompt_are_those_of_its_full_blocks_and_those_of_its_answer_follow() -> None:
    for one in made(7, 5.0):
        text, num_tokens = text_of(one), len(one.token_ids)
        assert text.keys[: num_tokens // BLOCK] == one.keys
        assert len(text.keys) == (num_tokens + one.most_tokens) // BLOCK


def test_equal_seeds_give_equal_requests_and_others_do_not() -> None:
    def shape(requests: list[Request]) -> list[tuple[float, int, list[int]]]:
        return [(one.after_s, one.most_tokens, one.keys) for one in requests]

    assert shape(made(1, 2.0)) == shape(made(1, 2.0)) != shape(made(2, 2.0))


def test_conversations_have_equal_texts_at_every_rate() -> None:
    slow, fast = made(1, 1.0, turns=1.0), made(1, 20.0, turns=1.0)
    assert [one.keys for one in slow] == [one.keys for one in fast]


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_requests_come_at_the_rate_that_was_asked_for(rate: float) -> None:
    gaps = [one.after_s for one in made(3, rate, 4000, pause_s=1.0)]
    assert min(gaps) >= 0
    assert 1 / mean(gaps[1000:]) == pytest.approx(rate, rel=0.1)


def test_a_turn_begins_with_the_turn_before_it_and_its_answer() -> None:
    requests = made(4, 5.0, documents=10_000, turns=5.0)
    continued = 0
    for number, one in enumerate(requests):
        whole = text_of(one).keys
        begins = [other for other in requests[number + 1 :] if other.keys[: len(whole)] == whole]
        continued += bool(begins)
    assert continued > len(requests) / 4


def test_conversations_about_a_document_share_its_blocks_alone() -> None:
    requests = made(5, 5.0, documents=1, turns=1.0, document_tokens=(10 * BLOCK, 10 * BLOCK))
    assert len({tuple(one.keys[:10]) for one in requests}) == 1
    own = [tuple(one.keys[10:]) for one in requests if len(one.keys) > 10]
    assert len(own) > 100
    assert len(set(own)) == len(own)


def test_answers_are_no_longer_than_the_limit_that_the_request_names() -> None:
    requests = made(6, 5.0, answer_tokens=400, spread=2.0, most_answer_tokens=500)
    assert max(one.most_tokens for one in requests) == 500
    assert {one.max_tokens for one in requests} == {500}


def test_a_conversation_ends_with_the_question_after_which_its_text_is_too_long() -> None:
    mix = {"turns": 1e9, "pause_s": 0.1, "spread": 0.0, "question_tokens": 100, "document_tokens": (512, 512)}
    lengths = [len(one.token_ids) for one in made(8, 5.0, most_tokens=2_000, **mix)]
    assert 2_000 < max(lengths) <= 2_100
