"""The first rank of a pipeline: tokens come late, and its prompts wait for them in a stage of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.instance import (
    PREFILL,
    JobId,
    Late,
    Limits,
    Moved,
    Result,
    Step,
    TransferEnded,
    begin,
    next_step,
    on,
)
from scheduler.instance.chunked import even_budget
from scheduler.instance.outcomes import Computed, Ended, Failed, Outcome, Prefilled, Scored, Token
from scheduler.instance.step import NO_TOKEN
from tests.scheduler.instance.model_runner import ModelRunner, choose, kv_of
from tests.scheduler.instance.rank import job
from tests.scheduler.instance.test_loads_and_stores import Line

pytestmark = pytest.mark.quick

LIMITS = Limits(8, late=True)
A, B = JobId("a", 0), JobId("b", 0)


class LastStage(ModelRunner):
    """A runner whose tokens and scores are drawn later.

    drawing   what is to come, in order; comes: it comes with the results of steps

    KV counts as computed before anything is drawn, and is right.
    """

    drawing: deque[Late]
    comes = spoils = False

    def run(self, step: Step, moved: Any = None) -> Result:
        done = super().run(step, moved)
        tokens, scores = iter(done.tokens), iter(done.scores)
        for chunk in step.chunks:
            drawn = [next(tokens) for _ in chunk.draws]
            scored = next(scores) if chunk.score is not None else ()
            if chunk.score is not None and len(scored) < len(chunk.score.targets):
                drawn = [NO_TOKEN] * max(1, len(drawn))  # as pipeline.reports_of
            self.drawing.append(Late(chunk.job, drawn, [f"of {token}" for token in drawn], scored))
        late = self.come() if self.comes else ()
        return Result(step, (), done.saved, done.halves, done.puts, done.compute_s, late=late)

    def come(self) -> list[Late]:
        """All that is to come."""
        late, self.drawing = list(self.drawing), deque()
        return late


class First:
    """A first rank, and the transport of its blocks. comes: tokens come with the results of steps."""

    def __init__(self, comes: bool = False, limits: Limits = LIMITS, **more: Any) -> None:
        self.line = Line()
        self.line.open = True
        self.rank = self.line.rank(PREFILL, limits=limits, **more)
        self.last = LastStage(self.rank.pool, 64, **vars_of(self.rank.runner))
        self.last.drawing, self.last.comes = deque(), comes
        self.rank.runner = self.last

    def until_drawing(self, name: str) -> None:
        """Go on until a prompt is computed, and its token is still to come."""
        while self.rank.until(Computed).job != JobId(name, 0):
            pass
        assert JobId(name, 0) in [task.id for task in self.rank.state.drawing]

    def moved(self, ended: Sequence[Any] = (), late: Sequence[Late] = ()) -> list[Outcome]:
        """Tell of ends while a step is under way."""
        said = on(self.rank.state, Moved(ended, late), self.rank.now)
        self.rank.state.check()
        self.rank.said += said
        return said


def vars_of(runner: ModelRunner) -> dict[str, Any]:
    return {name: getattr(runner, name) for name in ("ends", "breaks", "late", "raises", "lacks")}


def token_of(tokens: Sequence[int], branch: int = 0) -> int:
    """The token that a prompt is answered with."""
    return choose(kv_of(tokens)[-1], branch)


# ------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("store", [[], [1], [1, 2, 3, 4, 5]])
def test_a_prompt_ends_once_with_the_token_and_the_blocks_that_it_would_have_had(store: list[int]) -> None:
    first = First(comes=True)
    first.rank.arrive(job("a", [PREFILL], range(18), store=store))
    said = first.rank.settle()
    kinds = [type(one) for one in said]
    assert [kinds.count(kind) for kind in (Computed, Token, Prefilled)] == [1, 1, 1]
    (token,) = (one for one in said if isinstance(one, Token))
    assert (token.token, token.index) == (token_of(range(18)), 0)
    assert token.logprobs == f"of {token.token}"
    kv = kv_of(range(18))
    assert [first.rank.pool[place] for place in store[:4]] == [kv[4 * n : 4 * n + 4] for n in range(4)][
        : len(store)
    ]
    assert isinstance(said[-1], Prefilled)
    assert list(said[-1].first_tokens) == [token.token]
    first.rank.assert_idle()


def test_a_prompt_that_is_computed_waits_for_its_token_and_its_pages_stay_its_own() -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(18)))
    first.until_drawing("a")
    assert not first.rank.step()[0].chunks
    assert first.rank.state.busy
    assert len(first.rank.state.pages.free) == 64 - 9
    assert not [one for one in first.rank.said if isinstance(one, Token | Prefilled)]
    first.last.comes = True
    first.rank.settle()
    first.rank.assert_idle()


def test_the_next_prompt_is_computed_while_the_token_of_the_first_is_drawn() -> None:
    first = First()
    for name in ("a", "b"):
        first.rank.arrive(job(name, [PREFILL], range(18)))
    first.until_drawing("a")
    first.until_drawing("b")
    assert [task.id for task in first.rank.state.drawing] == [A, B]
    assert not first.rank.said_tokens("a")
    first.last.comes = True
    first.rank.settle()
    assert [one.job for one in first.rank.said if isinstance(one, Prefilled)] == [A, B]
    first.rank.assert_idle()


def test_a_token_that_comes_while_a_step_is_under_way_is_told_at_once() -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(18)))
    first.rank.arrive(job("b", [PREFILL], range(18)))
    first.until_drawing("a")
    first.rank.step()
    step = next_step(first.rank.state, first.rank.now)
    begin(first.rank.state, step)
    assert [chunk.job for chunk in step.chunks] == [B]
    said = first.moved(late=first.last.come())
    assert [type(one) for one in said] == [Token, Prefilled]
    assert said[0].token == token_of(range(18))  # type: ignore[union-attr]
    on(first.rank.state, first.last.run(step), first.rank.now)
    first.last.comes = True
    first.rank.settle()
    first.rank.assert_idle()


def test_each_branch_gets_its_token() -> None:
    first = First(comes=True)
    first.rank.arrive(job("a", [PREFILL], range(10), n=3, store=[1, 2, 3], stop_ids=frozenset()))
    said = first.rank.settle()
    expected = [token_of(range(10), branch) for branch in range(3)]
    tokens = [one for one in said if isinstance(one, Token)]
    assert [(one.job.branch, one.token) for one in tokens] == list(enumerate(expected))
    (done,) = (one for one in said if isinstance(one, Prefilled))
    assert list(done.first_tokens) == expected
    first.rank.assert_idle()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_scores_come_late_too_and_are_told_before_the_token(chunk: int) -> None:
    tokens = [*range(40, 61)]
    first = First(comes=True, limits=Limits(chunk, late=True))
    first.rank.arrive(job("a", [PREFILL], tokens, scored=True))
    first.rank.arrive(job("b", [PREFILL], tokens))
    said = first.rank.settle()
    (scored,) = (one for one in said if isinstance(one, Scored))
    assert (scored.job, list(scored.scores)) == (A, list(zip(kv_of(tokens)[:-1], tokens[1:])))
    told = [type(one) for one in said if one.job == A and isinstance(one, Scored | Token)]  # type: ignore[union-attr]
    assert told == [Scored, Token]
    first.rank.assert_idle()


# ------------------------------------------------------------------------------- blocks


def test_blocks_are_written_while_the_token_is_drawn() -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(18), store=[1, 2, 3, 4, 5]))
    first.until_drawing("a")
    for _ in range(6):
        first.rank.step()
    assert set(first.rank.pool) == {1, 2, 3, 4, 5}
    assert not [one for one in first.rank.said if isinstance(one, Prefilled)]
    said = first.rank.tell(Moved((), first.last.come()))
    assert [type(one) for one in said] == [Token, Prefilled]
    assert len(said[1].checksums) == 5  # type: ignore[union-attr]
    first.rank.assert_idle()


def test_a_token_that_comes_before_the_last_block_is_written_is_told_and_the_job_ends_after_it() -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    first.line.open = False
    first.until_drawing("a")
    assert first.rank.step()[0].writes
    assert [type(one) for one in first.rank.tell(Moved((), first.last.come()))] == [Token]
    first.line.open = True
    assert [type(one) for one in first.rank.settle()] == [Prefilled]
    first.rank.assert_idle()


@pytest.mark.parametrize("under_way", [False, True])
def test_a_failed_write_fails_the_job_once_and_its_token_changes_nothing_more(under_way: bool) -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    first.rank.arrive(job("b", [PREFILL], range(18)))
    first.line.open = False
    first.until_drawing("a")
    first.rank.step()
    first.line.open, first.line.problem = True, "cut"
    if under_way:
        step = next_step(first.rank.state, first.rank.now)
        begin(first.rank.state, step)
        result = first.last.run(step)
        said = first.moved(result.halves)
        on(first.rank.state, Result(step), first.rank.now)
    else:
        _, said = first.rank.step()
    (failed,) = (one for one in said if isinstance(one, Failed))
    assert (failed.job, failed.may_still_write) == (A, True)
    assert "cut" in failed.reason
    first.line.problem, first.last.comes = "", True
    said = first.rank.settle()
    assert not [one for one in said if one.job == A]  # type: ignore[union-attr]
    assert first.rank.said_tokens("b")
    first.rank.assert_idle()


def test_a_token_that_comes_between_a_failed_write_and_the_end_of_another_is_told_and_the_job_fails() -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(16), store=[1, 2, 3, 4]))
    first.line.open = False
    first.until_drawing("a")
    first.rank.step()
    assert set(first.last.flying_halves) == {0, 1}
    del first.last.flying_halves[0]
    assert first.rank.tell(Moved([TransferEnded(0, "cut")])) == []
    assert [type(one) for one in first.rank.tell(Moved((), first.last.come()))] == [Token]
    first.line.open = True
    (failed,) = first.rank.settle()
    assert failed == Failed(A, "KV could not be moved: cut")
    first.rank.assert_idle()


# ------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("flies", [False, True])
def test_a_cancel_does_not_stop_a_prompt_that_is_computed_and_it_ends_once(flies: bool) -> None:
    """As where tokens come at once: its blocks are of use to others."""
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(14), store=[1, 2, 3, 4]))
    first.line.open = not flies
    first.until_drawing("a")
    first.rank.step()
    assert bool(first.last.flying_halves) is flies
    assert first.rank.cancel("a") == []
    assert first.rank.cancel("a") == []
    first.line.open = first.last.comes = True
    assert [type(one) for one in first.rank.settle()] == [Token, Prefilled]
    assert set(first.rank.pool) == {1, 2, 3, 4}
    first.rank.assert_idle()


@pytest.mark.parametrize("flies", [False, True])
def test_a_prompt_that_is_cancelled_between_its_chunks_needs_no_token_any_more(flies: bool) -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(40), store=[*range(10)]))
    first.line.open = not flies
    while len(first.last.drawing) < 3:
        first.rank.step()
    assert bool(first.last.flying_halves) is flies
    assert bool(first.rank.cancel("a")) is not flies
    first.line.open = first.last.comes = True
    (ended,) = (one for one in [*first.rank.said, *first.rank.settle()] if isinstance(one, Ended | Failed))
    assert ended.job == A
    assert first.rank.said_tokens("a") == []
    first.rank.assert_idle()


def test_what_comes_late_of_a_job_that_has_left_or_was_never_here_changes_nothing() -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(6)))
    first.until_drawing("a")
    (late,) = first.last.come()
    first.rank.tell(Moved((), [late]))
    assert first.rank.tell(Moved((), [late])) == []
    assert first.rank.tell(Moved((), [Late(B, [3], [None], [1.0])])) == []
    first.rank.assert_idle()


# ------------------------------------------------------------------------------- chunks of even time


@given(
    st.integers(1, 4096), st.integers(1, 10_000), st.lists(st.integers(0, 200_000), min_size=2, max_size=9)
)
def test_chunks_shrink_as_their_context_grows_and_never_vanish(
    budget: int, even: int, contexts: list[int]
) -> None:
    sizes = [even_budget(budget, context, even) for context in sorted(contexts)]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= 1
    assert even_budget(budget, 0, even) == budget
    assert even_budget(2 * budget, even, even) == budget


def test_the_chunks_of_a_prompt_shrink_and_it_is_computed_whole() -> None:
    first = First(comes=True, limits=Limits(8, late=True, even=16))
    first.rank.arrive(job("a", [PREFILL], range(100)))
    done = []
    while first.rank.state.busy:
        assert len(done) < 100
        done += [len(chunk.token_ids) for chunk in first.rank.step()[0].chunks]
    assert done[:4] == [8, 5, 4, 3]
    assert done[:-1] == sorted(done[:-1], reverse=True)
    assert done[-2:] != done[:2]
    assert sum(done) == 100
    assert first.rank.said_tokens("a") == [token_of(range(100))]
