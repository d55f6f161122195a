"""Continuous batching and chunked prefill: what one forward pass holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.instance import DECODE, PREFILL, Limits
from scheduler.instance.chunked import chunk_sizes, whole_prompts
from scheduler.instance.outcomes import Computed, Ended, Iterated, Loaded, Token
from scheduler.instance.step import Step
from tests.scheduler.instance.rank import Rank, job

pytestmark = pytest.mark.quick

BOTH = (PREFILL, DECODE)


def both(rank: Rank, name: str, length: int, **more: object) -> None:
    """A request that this rank prefills and decodes."""
    rank.arrive(job(name, BOTH, range(length), **more))


def sizes(step: Step) -> dict[str, int]:
    """Tokens of each sequence in a forward pass."""
    return {chunk.job[0]: len(chunk.token_ids) for chunk in step.chunks}


def passes(rank: Rank) -> list[dict[str, int]]:
    """Go on until the rank is idle; the forward passes on the way."""
    done = []
    while rank.state.busy:
        step, _ = rank.step()
        if step.chunks:
            done.append(sizes(step))
    return done


def test_a_chunk_fills_what_the_running_batch_leaves_of_the_budget() -> None:
    rank = Rank(*BOTH, limits=Limits(8))
    both(rank, "old", 3, max_tokens=100)
    rank.until(Token)
    both(rank, "new", 20)
    rank.step()
    step, said = rank.step()
    assert sizes(step) == {"old": 1, "new": 7}
    assert [chunk.job[0] for chunk in step.chunks] == ["old", "new"]
    assert said[0] == Iterated(1, [0.5], [1.0], step.chunks[0].end, False, rows=1)


def test_without_chunks_a_prompt_is_computed_whole_beside_the_running_batch() -> None:
    rank = Rank(*BOTH, limits=Limits(8, chunked=False))
    both(rank, "old", 3, max_tokens=100)
    rank.until(Token)
    both(rank, "new", 20)
    rank.step()
    assert sizes(rank.step()[0]) == {"old": 1, "new": 20}


def test_no_pass_exceeds_the_budget_while_a_long_prompt_is_computed() -> None:
    rank = Rank(*BOTH, limits=Limits(8, prefills=3))
    for number, length in enumerate((50, 3, 20, 7)):
        both(rank, f"r{number}", length, max_tokens=4)
    assert max(sum(batch.values()) for batch in passes(rank)) == 8
    rank.assert_idle()


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    rank = Rank(*BOTH, limits=Limits(8, prefills=2))
    both(rank, "long", 80, max_tokens=1)
    both(rank, "short", 4, max_tokens=1)
    rank.step()
    assert sizes(rank.step()[0]) == {"long": 4, "short": 4}
    ended = [outcome.job[0] for outcome in rank.said if isinstance(outcome, Ended)]
    assert ended == ["short"]


def test_a_sequence_joins_the_batch_with_the_token_that_its_last_chunk_gives() -> None:
    rank = Rank(*BOTH, limits=Limits(8))
    both(rank, "a", 10, max_tokens=3)
    assert passes(rank) == [{"a": 8}, {"a": 2}, {"a": 1}, {"a": 1}]
    assert len(rank.said_tokens("a")) == 3


def test_prompts_that_share_a_pass_share_its_time_by_their_tokens() -> None:
    rank = Rank(*BOTH, limits=Limits(8, prefills=2))
    both(rank, "a", 6, max_tokens=1)
    both(rank, "b", 2, max_tokens=1)
    rank.settle()
    seconds = [outcome.compute_s for outcome in rank.said if isinstance(outcome, Computed)]
    assert sorted(seconds) == [0.5 * 2 / 8, 0.5 * 6 / 8]


def test_as_many_sequences_are_active_as_the_limit_allows() -> None:
    rank = Rank(*BOTH, limits=Limits(8, sequences=2, prefills=2))
    for name in ("a", "b", "c"):
        both(rank, name, 3, max_tokens=3)
    assert [set(batch) for batch in passes(rank)] == [{"a", "b"}] * 3 + [{"c"}] * 3


def test_the_head_of_the_line_is_not_passed_by_a_job_that_would_fit() -> None:
    rank = Rank(*BOTH, num_pages=8, limits=Limits(8, prefills=3))
    both(rank, "a", 8, max_tokens=2)
    both(rank, "large", 12, max_tokens=1)
    both(rank, "small", 2, max_tokens=1)
    rank.settle()
    begun = [outcome.job[0] for outcome in rank.said if isinstance(outcome, Loaded)]
    assert begun == ["a", "large", "small"]


@given(st.integers(1, 300), st.lists(st.integers(1, 200), max_size=8))
def test_chunks_share_the_budget_without_waste_and_by_max_min_fairness(
    budget: int, wanted: list[int]
) -> None:
    got = chunk_sizes(budget, wanted)
    assert all(0 <= size <= want for size, want in zip(got, wanted))
    assert sum(got) == min(budget, sum(wanted))
    unmet = [size for size, want in zip(got, wanted) if size < want]
    for size in unmet:  # no prompt has more than one token more
        assert size >= max(got) - 1


@given(st.integers(1, 300), st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_whole_prompts_are_taken_in_order_and_at_least_one(budget: int, wanted: list[int]) -> None:
    got = whole_prompts(budget, wanted)
    taken = sum(size > 0 for size in got)
    assert got == wanted[:taken] + [0] * (len(wanted) - taken)
    assert taken >= 1
    assert taken == 1 or sum(got) <= budget
    assert taken == len(wanted) or sum(wanted[: taken + 1]) > budget


def test_a_prompt_goes_on_beside_a_running_batch_that_is_as_large_as_the_token_budget() -> None:
    for running in (2, 3, 5):
        rank = Rank(*BOTH, limits=Limits(2))
        for number in range(running):
            both(rank, f"old{number}", 1, max_tokens=100)
            while len(rank.state.running) <= number:
                rank.step()
        both(rank, "new", 10)
        rank.step()
        expected = {f"old{number}": 1 for number in range(running)} | {"new": 1}
        assert sizes(rank.step()[0]) == expected
