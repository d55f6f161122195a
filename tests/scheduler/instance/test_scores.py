"""Logprobs of a prompt: collected chunk by chunk, and told when the prompt is computed."""

from __future__ import annotations

import pytest

from scheduler.instance import DECODE, PREFILL, Limits
from scheduler.instance.outcomes import Scored, Token
from tests.scheduler.instance.model_runner import kv_of
from tests.scheduler.instance.rank import Rank, job

pytestmark = pytest.mark.quick

TOKENS = [*range(40, 61)]


@pytest.mark.parametrize("chunk", [1, 5, 7, 20, 21, 64])
@pytest.mark.parametrize("n", [1, 3])
def test_each_token_of_a_scored_prompt_but_the_first_has_a_score_however_it_is_cut(
    chunk: int, n: int
) -> None:
    rank = Rank(PREFILL, DECODE, limits=Limits(chunk))
    rank.arrive(job("a", [PREFILL, DECODE], TOKENS, scored=True, max_tokens=2, n=n))
    said = rank.settle()
    (scored,) = [one for one in said if isinstance(one, Scored)]

    assert list(scored.scores) == list(zip(kv_of(TOKENS)[:-1], TOKENS[1:]))
    assert [one.index for one in said if isinstance(one, Token)] == [0] * n + [1] * n
    rank.assert_idle()


def test_no_more_rows_than_those_of_one_chunk_are_scored_at_once() -> None:
    rank = Rank(PREFILL, limits=Limits(8))
    rank.arrive(job("a", [PREFILL], TOKENS, scored=True))
    while (step := rank.step()[0]).chunks or step.admit:
        for chunk in step.chunks:
            assert chunk.score is not None
            assert len(chunk.score.targets) <= len(chunk.token_ids) <= 8


def test_prompts_of_one_pass_get_their_own_scores_and_others_none() -> None:
    rank = Rank(PREFILL, limits=Limits(64, prefills=3))
    rank.arrive(job("a", [PREFILL], TOKENS, scored=True))
    rank.arrive(job("b", [PREFILL], TOKENS[5:]))
    rank.arrive(job("c", [PREFILL], TOKENS[9:], scored=True))
    found = {one.job.request_id: one.scores for one in rank.settle() if isinstance(one, Scored)}

    assert list(found["a"]) == list(zip(kv_of(TOKENS)[:-1], TOKENS[1:]))
    assert "b" not in found
    assert list(found["c"]) == list(zip(kv_of(TOKENS[9:])[:-1], TOKENS[10:]))
