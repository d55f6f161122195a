"""Drafts of the running batch: they change no token, take no page, and leave nothing behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.instance import DECODE, PREFILL, JobId, Limits, next_step
from scheduler.instance.drafts import TRIAL, accepted, cost, expected
from scheduler.instance.job import Job
from scheduler.instance.limits import ROW_COSTS
from scheduler.instance.outcomes import Failed, Iterated, Preempted, Saved, Token
from scheduler.instance.sequence import Sequence as TokenSequence
from scheduler.instance.step import NO_TOKEN, Chunk, Draw, Step
from tests.conftest import examples
from tests.scheduler.instance.model_runner import PAGE, choose, kv_of
from tests.scheduler.instance.rank import Rank, job

pytestmark = pytest.mark.quick

FREE = ((1, 1.0), (32, 1.001))
"""Rows cost next to nothing: drafts are as long as they may be."""


class Wrong:
    """Drafts what comes, but each `every`-th token of the answer is another one; 0: none is."""

    def __init__(self, every: int, job: Job, branch: int) -> None:
        self.every, self.branch, self.predicted = every, branch, bool(job.predicted)

    def after(self, sequence: TokenSequence, most: int) -> tuple[list[int], bool]:
        ids, drafts = list(sequence.token_ids), list[int]()
        for index in range(sequence.answered, sequence.answered + most):
            right = choose(kv_of(ids)[-1], self.branch)
            drafts.append(right if not self.every or index % self.every else right + 1)
            ids.append(drafts[-1])
        return drafts, self.predicted


def drafting(every: int = 0, *duties: str, page: int = PAGE, **more: Any) -> Rank:
    limits = more.pop("limits", Limits(8, row_costs=FREE))
    rank = Rank(*(duties or (PREFILL, DECODE)), limits=limits, **more)
    rank.state.new_drafter = partial(Wrong, every)
    return rank


def large_pages(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let pages and blocks of the model runner have so many tokens."""
    for module in ("tests.scheduler.instance.model_runner", "tests.scheduler.instance.rank"):
        monkeypatch.setattr(f"{module}.PAGE", size)
        monkeypatch.setattr(f"{module}.BLOCK", 2 * size)


def drafts_of(step: Step) -> list[int]:
    return [len(chunk.token_ids) - 1 for chunk in step.chunks if not chunk.prompt]


@pytest.mark.parametrize("every", [0, 1, 2, 3])
@pytest.mark.parametrize("sharing", ["off", "hash", "radix"])
def test_answers_are_the_same_with_right_and_wrong_drafts_and_so_is_what_later_prompts_find(
    every: int, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_pages(monkeypatch, 4)
    said = []
    for rank in (Rank(PREFILL, DECODE, sharing=sharing), drafting(every, sharing=sharing)):
        rank.arrive(job("a", [PREFILL, DECODE], range(6), max_tokens=21, salt=b"s"))
        rank.settle()
        answer = rank.said_tokens("a")
        rank.arrive(job("b", [PREFILL, DECODE], [*range(6), *answer, 1], max_tokens=9, salt=b"s"))
        rank.arrive(job("c", [PREFILL, DECODE], [*range(6), *answer[:11], 2], max_tokens=9, salt=b"s"))
        rank.settle()
        rank.assert_idle()
        said.append([rank.said_tokens(name) for name in "abc"])
    assert said[0] == said[1]
    iterations = sum(isinstance(one, Iterated) for one in rank.said)
    assert iterations < 39 if every != 1 else iterations >= 20


@settings(max_examples=examples(10))
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 12)), max_size=6),
    st.integers(0, 4), st.integers(12, 40),
)  # fmt: skip
def test_whatever_the_prompts_and_the_pages_answers_are_those_without_drafts(
    asked: list[tuple[list[int], int]], every: int, num_pages: int
) -> None:
    said = []
    for rank in (Rank(PREFILL, DECODE, num_pages=200), drafting(every, num_pages=num_pages)):
        for number, (prompt, most) in enumerate(asked):
            rank.arrive(job(f"r{number}", [PREFILL, DECODE], prompt, max_tokens=most, n=1 + number % 2))
        rank.settle()
        rank.assert_idle()
        said.append({(one.job, one.index): one.token for one in rank.said if isinstance(one, Token)})
    preempted = {one.job for one in rank.said if isinstance(one, Preempted)}
    assert said[0].items() >= said[1].items()
    assert {key for key in said[0] if key[0] not in preempted} <= said[1].keys()


def test_drafts_take_free_slots_of_the_last_page_and_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    large_pages(monkeypatch, 8)
    rank = drafting()
    rank.arrive(job("a", [PREFILL, DECODE], range(3), max_tokens=40))
    rank.until(Token)
    seen = []
    while rank.state.busy:
        step, _ = rank.step()
        for chunk in step.chunks:
            drafts = chunk.token_ids[1:]
            ahead = [(draw.ahead, draw.answered) for draw in chunk.draws]
            assert ahead == [(drafts[:row], ahead[0][1] + row) for row in range(len(drafts) + 1)]
            assert chunk.end <= 8 * len(chunk.pages)
            assert len(chunk.pages) == -(-(chunk.start + 1) // 8), "a page was taken for a draft"
            seen.append((chunk.start % 8, len(chunk.token_ids) - 1))
    assert seen[:3] == [(3, 4), (0, 7), (0, 7)]


@pytest.mark.parametrize(("most", "length"), [(4, 1000), (40, 8)])
def test_drafts_end_with_the_answer_and_the_context(
    most: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting()
    rank.arrive(job("a", [PREFILL, DECODE], range(3), max_tokens=most, max_len=length))
    rank.until(Token)
    step, said = rank.step()
    left = min(most, length - 3) - 1  # tokens after the first
    assert drafts_of(step) == [left - 1]
    tokens = [one for one in said if isinstance(one, Token)]
    assert [one.finish for one in tokens] == [None] * (left - 1) + ["length"]
    assert [one.index for one in tokens] == list(range(1, 1 + left))


def test_nothing_follows_an_end_token_that_was_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    large_pages(monkeypatch, 16)
    plain = Rank(PREFILL, DECODE)
    plain.arrive(job("a", [PREFILL, DECODE], range(3), max_tokens=8))
    plain.settle()
    answer = plain.said_tokens("a")
    stop = answer[3]
    assert stop not in answer[:3]
    rank = drafting()
    rank.arrive(job("a", [PREFILL, DECODE], range(3), stop_ids=frozenset({stop})))
    rank.settle()
    assert rank.said_tokens("a") == answer[:4]
    (end,) = [one for one in rank.said if isinstance(one, Token) and one.finish]
    assert (end.finish, end.index) == ("stop", 3)
    passes = [(one.tokens, one.drafted, one.accepted) for one in rank.said if isinstance(one, Iterated)]
    assert passes == [(3, 6, 2)], "of the drafts two are in the answer, the end token is not"
    rank.assert_idle()


def test_a_pass_has_at_most_as_many_rows_as_the_costs_say_and_none_are_drafts_beside_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting(limits=Limits(64, row_costs=FREE, prefills=9), num_pages=200)
    for number in range(9):
        rank.arrive(job(f"r{number}", [PREFILL, DECODE], [number], max_tokens=30))
    most = 0
    while rank.state.busy:
        step, _ = rank.step()
        rows = sum(len(chunk.token_ids) for chunk in step.chunks)
        if any(chunk.prompt for chunk in step.chunks):
            assert not any(drafts_of(step))
        else:
            most = max(most, rows)
    assert most == 32


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_drafts_are_as_long_as_they_pay(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs as measured: right drafts are long, wrong ones soon stop but for rare trials.

    In a large batch drafts are not worth a trial.
    """
    large_pages(monkeypatch, 512)
    found = {}
    for every in (0, 1):
        rank = drafting(every, limits=Limits(64, prefills=99), num_pages=99)
        for number in range(rows):
            rank.arrive(job(f"r{number}", [PREFILL, DECODE], [number], max_tokens=400))
        rank.until(Token)
        drafts = []
        while rank.state.busy:
            step, _ = rank.step(unchanged=False)
            drafts.append(sum(drafts_of(step)) if len(step.chunks) == rows else 0)
        found[every] = drafts
    assert max(found[0]) == {1: 7, 4: 14, 16: 0}[rows]
    tried = [number for number, count in enumerate(found[1]) if count]
    assert sum(found[1]) <= 3 * rows * (2 + 400 // TRIAL)
    assert tried[-1] > 300 if rows < 16 else not tried, "no trial so late"


def test_a_request_that_does_not_want_drafts_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting()
    rank.arrive(job("a", [PREFILL, DECODE], [1], speculates=False))
    rank.until(Token)
    while rank.state.busy:
        assert not any(drafts_of(rank.step()[0]))


def test_tokens_of_accepted_predictions_are_told_and_steps_count_apart_from_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting(4)
    rank.arrive(job("a", [PREFILL, DECODE], [1], max_tokens=9, predicted=[1]))
    rank.until(Token)
    step, said = rank.step()
    assert drafts_of(step) == [7]
    assert [one.predicted for one in said if isinstance(one, Token)] == [True, True, True, False]
    (iterated,) = [one for one in said if isinstance(one, Iterated)]
    assert (iterated.tokens, iterated.rows) == (4, 8)
    assert (list(iterated.compute_s), list(iterated.seconds)) == ([0.5], [1.0])
    assert (iterated.drafts, iterated.drafted, iterated.accepted) == (1, 7, 3)
    assert iterated.context_tokens == sum(range(2, 10))
    assert iterated.alone


def test_a_token_after_a_draft_that_cannot_be_drawn_fails_its_job_only_where_it_is_reached_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting(lacks=lambda chunk, draw: draw is not None and draw.answered == 4)
    rank.runner.spoils = False
    rank.arrive(job("a", [PREFILL, DECODE], [1]))
    failed = rank.until(Failed)
    assert failed.code == "logits_not_finite"
    assert len(rank.said_tokens("a")) == 4
    rank.assert_idle()


def test_a_branch_copies_its_page_before_drafts_are_written_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting()
    rank.arrive(job("a", [PREFILL, DECODE], range(5), n=3))
    while not any(drafts_of(step := rank.step()[0])):
        pass
    copies = [growth.copies for growth in step.grow]
    assert len(copies) == 2
    assert None not in copies
    assert len({chunk.pages[-1] for chunk in step.chunks}) == 3


def test_each_branch_has_drafts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting()
    rank.arrive(job("a", [PREFILL, DECODE], range(4), n=3, max_tokens=12))
    rank.settle()
    assert sum(one.drafted - one.accepted for one in rank.said if isinstance(one, Iterated)) == 0


@pytest.mark.parametrize("every", [0, 2, 3])
@pytest.mark.parametrize("most", [18, 21, 24])
def test_blocks_that_drafts_fill_are_offered_with_the_kv_that_they_have_without(
    every: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_pages(monkeypatch, 4)
    offers = []
    for rank in (Rank(PREFILL, DECODE, num_slots=20), drafting(every, num_slots=20)):
        rank.arrive(job("a", [PREFILL, DECODE], range(6), max_tokens=most, salt=b"s", offers=True))
        rank.settle()
        saved = [one for one in rank.said if isinstance(one, Saved)]
        blocks = [
            (block.index, block.key, block.parent, block.token_ids) for one in saved for block in one.blocks
        ]
        offers.append((blocks, [sums for one in saved for sums in rank.state.puts[one.put].sums]))
    assert offers[0] == offers[1]
    assert len(offers[0][0]) == (6 + most - 1) // 8


def test_a_rank_with_drafts_does_not_leap() -> None:
    for rank, steps in ((Rank(PREFILL, DECODE), 5), (drafting(), 1)):
        rank.arrive(job("a", [PREFILL, DECODE], range(3), max_tokens=6))
        rank.until(Token)
        assert next_step(rank.state, rank.now, 99).steps == steps


@pytest.mark.parametrize(("predicted", "count"), [([], 3), ([1], 7)])
def test_more_is_expected_of_a_prediction(
    predicted: list[int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_pages(monkeypatch, 16)
    rank = drafting(limits=Limits(8))
    rank.arrive(job("a", [PREFILL, DECODE], range(3), max_tokens=40, predicted=predicted))
    rank.until(Token)
    assert drafts_of(rank.step()[0]) == [count]


def test_accepted_stops_at_the_first_difference() -> None:
    draw = Draw(None, (), 0, frozenset())
    chunk = Chunk(JobId("a", 0), (1, 5, 6, 7), 0, (0,), (draw,) * 4, False)
    assert accepted(chunk, [5, 6, 7, 8]) == 3
    assert accepted(chunk, [5, 6, 9, 8]) == 2
    assert accepted(chunk, [9, 6, 7, 8]) == 0
    assert accepted(chunk, [5, NO_TOKEN, 7, 8]) == 0
    assert accepted(chunk, [5, 6, 7, NO_TOKEN]) == 2


def test_costs_are_read_between_the_measured_ones() -> None:
    limits = Limits(1, row_costs=((1, 1.0), (2, 3.0), (4, 4.0)))
    assert [cost(limits, rows) for rows in (1, 2, 3, 4, 8)] == [1.0, 3.0, 3.5, 4.0, 8.0]
    assert expected(0.5, 3) == 0.5 + 0.25 + 0.125
    costs = [cost(Limits(1), rows) for rows in range(1, ROW_COSTS[-1][0] + 1)]
    assert costs == sorted(costs)
