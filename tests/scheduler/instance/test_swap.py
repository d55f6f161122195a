"""Preemption by swap: a sequence keeps its pages until the pool has its KV, and goes on where it was."""

from __future__ import annotations

import pytest

from scheduler.instance import DECODE, JobId, SwapAnswered
from scheduler.instance.outcomes import Ended, Failed, Iterated, Preempted, Swapped, SwapWanted, Token
from scheduler.instance.state import ANSWER_S
from tests.scheduler.instance.model_runner import BLOCK, choose, kv_of
from tests.scheduler.instance.rank import Rank, job
from tests.scheduler.instance.test_loads_and_stores import Line
from tests.scheduler.instance.test_running_batch import decode, running

pytestmark = pytest.mark.quick


def full() -> tuple[Line, Rank, SwapWanted]:
    """A rank whose two sequences decode until pages run out, with its line, and what it then asks for."""
    line = Line()
    line.open = True
    rank = line.rank(DECODE, num_pages=6, preemption="swap")
    decode(rank, "old", 5, max_tokens=100, salt=b"s")
    decode(rank, "young", 5, max_tokens=100, salt=b"s")
    wanted = rank.until(SwapWanted)
    assert isinstance(wanted, SwapWanted)
    return line, rank, wanted


def places(wanted: SwapWanted) -> list[str]:
    return [f"swap-{number}" for number in range(-(-len(wanted.token_ids) // BLOCK))]


def test_a_swapped_sequence_goes_on_elsewhere_without_computing_a_token_again() -> None:
    _, rank, wanted = full()
    assert wanted.job == JobId("young", 0)
    assert len(wanted.keys) == len(wanted.token_ids) // BLOCK
    rank.tell(SwapAnswered(wanted.job, places(wanted)))
    swapped = rank.until(Swapped)
    assert swapped.token_ids[:-1] == wanted.token_ids
    other = Rank(DECODE, pool=rank.pool)
    more = {"attempt": 1, "answered": swapped.answered, "max_tokens": 9, "load": places(wanted)}
    other.arrive(job("young", [DECODE], swapped.token_ids, **more))
    said = other.settle()
    assert sum(outcome.tokens for outcome in said if isinstance(outcome, Iterated)) == 9 - swapped.answered
    tokens = [*range(5)]
    while len(tokens) < 14:
        tokens.append(choose(kv_of(tokens)[-1]))
    assert [*swapped.token_ids, *other.said_tokens("young")] == tokens
    other.assert_idle()


def test_blocks_that_the_pool_has_are_not_written_again() -> None:
    _, rank, wanted = full()
    (first, *rest) = places(wanted)
    rank.tell(SwapAnswered(wanted.job, [None, *rest]))
    rank.until(Swapped)
    assert first not in rank.pool
    assert set(rest) <= rank.pool.keys()


def test_a_sequence_of_which_the_pool_has_everything_leaves_at_once() -> None:
    _, rank, wanted = full()
    (swapped,) = rank.tell(SwapAnswered(wanted.job, [None for _ in places(wanted)]))
    assert isinstance(swapped, Swapped)
    assert [task.job.request_id for task in rank.state.tasks.values()] == ["old"]


def test_the_rest_of_the_batch_runs_as_far_as_its_pages_go_and_then_waits() -> None:
    _, rank, wanted = full()
    for _ in range(6):
        rank.step()
    assert rank.step()[0].chunks == ()
    assert running(rank) == ["old"]
    rank.tell(SwapAnswered(wanted.job, places(wanted)))
    rank.until(Swapped)
    assert [chunk.job[0] for chunk in rank.step()[0].chunks] == ["old"]


def test_a_sequence_for_which_the_pool_has_no_space_is_computed_again_later() -> None:
    _, rank, wanted = full()
    (preempted,) = rank.tell(SwapAnswered(wanted.job, None))
    assert isinstance(preempted, Preempted)
    assert preempted.token_ids[:-1] == wanted.token_ids
    assert not preempted.may_still_write


def test_a_swap_whose_transfer_fails_gives_the_kv_up_and_not_the_request() -> None:
    line, rank, wanted = full()
    line.problem = "the line is cut"
    rank.tell(SwapAnswered(wanted.job, places(wanted)))
    preempted = rank.until(Preempted)
    assert (preempted.job, preempted.may_still_write) == (wanted.job, True)
    assert not any(isinstance(outcome, Failed) for outcome in rank.said)


def test_a_cancel_ends_a_swap_that_has_not_begun_and_lets_one_end_that_has() -> None:
    _, rank, wanted = full()
    assert rank.cancel("young") == [Ended(wanted.job, "cancelled", len(wanted.token_ids) + 1 - 5)]
    assert rank.tell(SwapAnswered(wanted.job, places(wanted))) == []
    decode(rank, "young", 5, attempt=1, max_tokens=100)
    wanted = rank.until(SwapWanted)
    rank.tell(SwapAnswered(wanted.job, places(wanted)))
    assert rank.cancel(wanted.job.request_id, wanted.job.attempt) == []
    assert rank.until(Swapped).job == wanted.job


def test_a_sequence_of_a_batch_that_recomputes_leaves_without_asking() -> None:
    rank = Rank(DECODE, num_pages=6)
    decode(rank, "old", 5, max_tokens=100)
    decode(rank, "young", 5, max_tokens=100)
    rank.until(Preempted)
    assert not any(isinstance(outcome, SwapWanted) for outcome in rank.said)
    assert rank.until(Token).job == JobId("old", 0)


def test_a_swap_without_an_answer_for_a_minute_gives_the_kv_up_and_a_late_answer_changes_nothing() -> None:
    _, rank, wanted = full()
    asked_at = rank.now
    assert rank.state.next_deadline(rank.now) == asked_at + ANSWER_S
    preempted = rank.until(Preempted)
    assert rank.now == asked_at + ANSWER_S
    assert (preempted.job, preempted.token_ids[:-1]) == (wanted.job, wanted.token_ids)
    assert rank.tell(SwapAnswered(wanted.job, places(wanted))) == []
    assert "young" not in {task.job.request_id for task in rank.state.tasks.values()}


def test_a_swap_that_was_answered_may_take_longer_than_a_minute() -> None:
    line, rank, wanted = full()
    line.open = False
    rank.tell(SwapAnswered(wanted.job, places(wanted)))
    until = rank.now + 2 * ANSWER_S
    while rank.now < until:
        rank.step()
    assert not any(isinstance(outcome, Preempted) for outcome in rank.said)
    line.open = True
    assert rank.until(Swapped).job == wanted.job
