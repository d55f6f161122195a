"""The largest messages between the stages of a pipeline are below the limit of a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.members import Peers
from mooncake_lite.engine.sampler import sample
from mooncake_lite.engine.telling import UNKNOWN, orders_of, reports_of, step_of
from mooncake_lite.gateway.prompt_work import MAX_ECHOED_LOGPROBS
from mooncake_lite.gateway.sampling import MAX_TOP_LOGPROBS
from mooncake_lite.messages import Logprobs, Sampling
from mooncake_lite.messages.members import MemberMail, MemberStep
from scheduler.instance import JobId, Result, Step
from scheduler.instance.step import Chunk, Draw, Score
from transport.wire import Decoder, encode

LAST_ID = 2**32 - 1
"""The token id and the page number with the longest code."""


def mailed(messages: Iterable[Any]) -> tuple[list[Any], int]:
    """Send messages from one stage to another. Returns what arrives, and the bytes of the largest one."""
    sent = [encode(MemberMail(2**63, message)) for message in messages]
    return [Decoder(MemberMail).decode(data).message for data in sent], max(map(len, sent))


def heard(orders: Iterable[MemberStep]) -> Step:
    """The one step that a stage does which gets these orders."""
    hears: Any = lambda wait_s: mailed(orders)[0]  # noqa: E731
    nothing: Any = None
    near = Peers([1, 2], 1, hears, nothing)
    near.look()
    (step,) = near.steps
    return step_of(step, 0.0)


def chunk_of(name: str, sequence: list[int], start: int, sampling: Sampling, answered: int = 0) -> Chunk:
    """The last chunk of a prompt, after which two tokens are drawn."""
    draws = tuple(Draw(sampling, sequence, answered, frozenset({0}), branch) for branch in range(2))
    pages = [LAST_ID] * -(-len(sequence) // PAGE_TOKENS)
    return Chunk(JobId(name, 1), sequence[start:], start, pages, draws, True)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("how", "tokens"),
    [
        ({}, 0),
        ({"min_tokens": 9, "logit_bias": {3: 1.0}}, 0),
        ({"repetition_penalty": 1.3}, 7),
        ({"frequency_penalty": 0.9}, 3),
        ({"presence_penalty": 0.9}, 3),
        ({"presence_penalty": 0.9, "repetition_penalty": 0.7}, 7),
    ],
)
def test_a_stage_draws_the_same_tokens_from_the_tokens_that_it_is_told(
    how: dict[str, Any], tokens: int
) -> None:
    sequence = [2, 5, 5, 1, 7, 7, 2, 4, 6]
    chunk = chunk_of("a", sequence, 7, Sampling(0.9, seed=3, **how), answered=5)
    (order,) = orders_of(Step(0.0, chunks=(chunk,)))
    assert order.chunks[0].before == sequence[7 - tokens : 7]
    (told,) = heard([order]).chunks
    assert told.draws[0].token_ids == [UNKNOWN] * (7 - tokens) + sequence[7 - tokens :]
    logits = np.random.default_rng(5).normal(0, 0.3, (200, 8)).astype(np.float32)
    for row in logits:
        both = np.stack([row, row])
        assert sample(both, told.draws) == sample(both, chunk.draws)


@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_sixteen_long_prompts_can_end_in_one_pass(penalty: float) -> None:
    prompt, how = [LAST_ID] * 110_000, Sampling(repetition_penalty=penalty)
    chunks = tuple(chunk_of(f"{number}", prompt, len(prompt) - 16, how) for number in range(16))
    orders = orders_of(Step(0.0, chunks=chunks))
    assert [len(one.draws[0].token_ids) for one in heard(orders).chunks] == [len(prompt)] * 16
    if penalty == 1.0:
        assert mailed(orders)[1] < 16 * 50_000, "the tokens before a chunk are not told"
    else:
        assert heard(orders).chunks == chunks


@pytest.mark.parametrize("start", [0, 500_000, 999_999])
def test_a_prompt_of_a_million_tokens_has_room_in_a_message_with_penalties(start: int) -> None:
    chunk = chunk_of("a", [LAST_ID] * 1_000_000, start, Sampling(repetition_penalty=1.1))
    assert heard(orders_of(Step(0.0, chunks=(chunk,)))).chunks == (chunk,)


@pytest.mark.parametrize("top", [0, 1, MAX_TOP_LOGPROBS])
def test_several_prompts_can_have_all_the_logprobs_in_one_pass_that_a_request_may_want(top: int) -> None:
    tokens = MAX_ECHOED_LOGPROBS // (1 + top)
    how = Sampling(logprobs=top, prompt_logprobs=top)
    prompt, one = [LAST_ID] * tokens, Logprobs(-1.5, [(LAST_ID, -1.5)] * top)
    score = Score(how, prompt[1:])
    chunks = tuple(
        Chunk(JobId(name, 1), prompt, 0, [LAST_ID] * (tokens // PAGE_TOKENS), draws, True, score)
        for name, draws in (("a", chunk_of("a", prompt, 0, how).draws[:1]), ("b", ()))
    )
    step = heard(orders_of(Step(0.0, chunks=chunks)))
    assert step.chunks == chunks
    scores = [[one] * (tokens - 1)] * 2
    reports = reports_of(1, Result(step, [7], logprobs=[one], scores=scores))
    found, _ = mailed(reports)
    assert [(late.tokens, late.logprobs) for late in found] == [([7], [one]), ([], [])]
    assert [late.scores for late in found] == scores
