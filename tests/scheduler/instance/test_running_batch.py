"""The running batch: joining and leaving between iterations, preemption, and blocks offered to the pool."""

from __future__ import annotations

import pytest

from scheduler.instance import DECODE, PREFILL, Granted, JobId, Limits, next_step
from scheduler.instance.outcomes import Decoded, Ended, Iterated, Loaded, Preempted, PutFinished, Saved, Token
from scheduler.instance.state import ANSWER_S
from tests.scheduler.instance.model_runner import kv_of
from tests.scheduler.instance.rank import Rank, job, key_after
from tests.scheduler.instance.test_loads_and_stores import Line, in_pool

pytestmark = pytest.mark.quick


def decode(rank: Rank, name: str, length: int, **more: object) -> None:
    """A request with `length` tokens, the KV of all but the last of which is in the pool."""
    places = in_pool(rank, range(length - 1))
    rank.arrive(job(name, [DECODE], range(length), load=places, **more))


def running(rank: Rank) -> list[str]:
    return [task.job.request_id for task in rank.state.running]


def test_requests_join_and_leave_between_two_iterations() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 5, max_tokens=9)
    rank.until(Token)
    decode(rank, "b", 5, max_tokens=2)
    passed = rank.now
    while "b" not in running(rank):
        step, _ = rank.step()
        passed = rank.now if step.chunks else passed
    rank.now += 0.25  # clients also wait for what the rank does between two passes
    step, said = rank.step()
    assert [chunk.job[0] for chunk in step.chunks] == ["a", "b"]
    seconds = rank.now - passed
    assert said[0] == Iterated(2, [0.5], [seconds], sum(chunk.end for chunk in step.chunks), True, rows=2)
    assert rank.until(Ended).job == JobId("b", 0)
    assert running(rank) == ["a"]


def test_time_without_a_batch_is_no_time_of_a_step() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 5, max_tokens=2)
    assert rank.until(Iterated).seconds == [0.5]  # the pass alone: no batch ran before
    rank.settle()
    rank.now += 100.0
    decode(rank, "b", 5, max_tokens=9)
    assert rank.until(Iterated).seconds == [0.5]
    assert rank.until(Iterated).seconds == [1.0]


def test_the_running_batch_goes_on_while_a_request_is_loaded() -> None:
    line = Line()
    rank = line.rank(DECODE)
    line.open = True
    decode(rank, "a", 5, max_tokens=100)
    rank.until(Token)
    line.open = False
    decode(rank, "b", 9)
    for _ in range(3):
        step, _ = rank.step()
        assert [chunk.job[0] for chunk in step.chunks] == ["a"]
    assert rank.state.loading is not None


def test_a_request_whose_blocks_have_come_is_part_of_the_very_next_iteration() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 5, max_tokens=100)
    rank.until(Token)
    decode(rank, "b", 5)
    while not (step := rank.step()[0]).lands:
        pass
    assert step.chunks == ()
    assert [chunk.job[0] for chunk in rank.step()[0].chunks] == ["a", "b"]


def test_a_request_waits_for_pages_and_later_ones_wait_behind_it() -> None:
    rank = Rank(DECODE, num_pages=10)
    decode(rank, "a", 9, max_tokens=4)
    rank.until(Token)
    decode(rank, "large", 12, max_tokens=4)
    decode(rank, "small", 3, max_tokens=1)
    rank.step()
    assert rank.state.num_waiting == 2
    assert rank.until(Ended).job == JobId("a", 0)
    rank.settle()
    loaded = [outcome.job[0] for outcome in rank.said if isinstance(outcome, Loaded)]
    assert loaded == ["a", "large", "small"]
    rank.assert_idle()


def test_without_a_page_for_each_next_token_the_youngest_goes_back_with_its_answer() -> None:
    rank = Rank(DECODE, num_pages=6)
    decode(rank, "old", 5, max_tokens=100, attempt=4)
    decode(rank, "young", 5, max_tokens=100, attempt=7, answered=2)
    preempted = rank.until(Preempted)
    assert preempted.job == JobId("young", 7)
    assert preempted.token_ids[:5] == [*range(5)]
    assert preempted.answered == 2 + len(preempted.token_ids) - 5
    assert running(rank) == ["old"]


def test_preempted_requests_are_told_of_before_the_others_are_computed() -> None:
    rank = Rank(DECODE, num_pages=6)
    decode(rank, "old", 5, max_tokens=100)
    decode(rank, "young", 5, max_tokens=100)
    while not (step := rank.step()[0]).preempt:
        pass
    assert step.chunks == ()
    assert [chunk.job[0] for chunk in rank.step()[0].chunks] == ["old"]


def test_the_only_running_request_steps_back_for_one_that_is_loading() -> None:
    line = Line()
    rank = line.rank(DECODE, num_pages=7)
    line.open = True
    decode(rank, "a", 5, max_tokens=100)
    rank.until(Token)
    line.open = False
    decode(rank, "b", 8, max_tokens=3)
    assert rank.until(Preempted).job == JobId("a", 0)
    assert running(rank) == []
    line.open = True
    assert rank.until(Ended).job == JobId("b", 0)
    rank.assert_idle()


def test_a_block_that_becomes_full_is_offered_with_its_tokens_and_its_number() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=3)
    saved = rank.until(Saved)
    (block,) = saved.blocks
    tokens = rank.said_tokens("a")
    assert (block.job, block.index) == (JobId("a", 0), 1)
    assert block.token_ids == [4, 5, 6, tokens[0]]
    rank.tell(Granted(saved.put, [77]))
    put = rank.until(PutFinished)
    assert (put.places, put.problem) == ([77], "")
    assert rank.pool[77] == list(put.checksums[0]) == kv_of([*range(7), *tokens])[4:8]
    rank.settle()
    rank.assert_idle()


def test_a_request_that_fills_a_block_with_its_last_token_ends_after_the_block_is_saved() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=2)
    rank.until(Decoded)
    assert rank.state.pages.held
    step, said = rank.step()
    assert step.saves
    assert [type(outcome) for outcome in said] == [Saved, Ended]
    assert not rank.state.pages.held


def test_full_blocks_wait_for_a_free_slot_while_their_request_goes_on() -> None:
    rank = Rank(DECODE, num_slots=1)
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=30)
    first = rank.until(Saved)
    for _ in range(9):
        rank.step()
    rank.tell(Granted(first.put, [None]))
    second = rank.until(Saved)
    rank.tell(Granted(second.put, [None]))
    assert [block.index for block in (*first.blocks, *second.blocks, *rank.until(Saved).blocks)] == [1, 2, 3]


def test_blocks_without_a_free_slot_at_the_end_of_their_request_are_dropped_and_counted() -> None:
    rank = Rank(DECODE, num_slots=1)
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=10)
    rank.until(Saved)
    rank.until(Ended)
    assert rank.state.dropped_puts == 2


def test_a_rank_with_both_duties_offers_the_blocks_of_its_prompts_too() -> None:
    rank = Rank(PREFILL, DECODE, num_slots=4, limits=Limits(8))
    load = in_pool(rank, range(4))
    rank.arrive(job("a", [PREFILL, DECODE], range(13), load=load, offers=True, salt=b"s", max_tokens=4))
    saved = []
    while rank.state.busy:
        said = rank.step()[1]
        saved += [block for outcome in said if isinstance(outcome, Saved) for block in outcome.blocks]
    assert [block.index for block in saved] == [1, 2, 3]
    assert saved[1].parent == saved[0].key == key_after(b"s", key_after(b"s", None, range(4)), range(4, 8))


def test_slots_of_blocks_that_the_pool_does_not_want_are_free_at_once() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=3)
    saved = rank.until(Saved)
    assert rank.tell(Granted(saved.put, [None])) == []
    assert rank.state.puts == {}
    assert sorted(rank.state.staging.free_slots) == [0, 1]


def test_a_rank_whose_offer_is_not_answered_yet_has_nothing_to_do() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=3)
    rank.until(Ended)
    assert rank.state.puts
    assert not rank.state.busy


def test_blocks_that_could_not_be_written_are_named_and_counted() -> None:
    line = Line()
    rank = line.rank(DECODE)
    line.open = True
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=3)
    saved = rank.until(Saved)
    line.problem = "the line is cut"
    rank.tell(Granted(saved.put, [77]))
    put = rank.until(PutFinished)
    assert (put.places, put.problem, put.may_still_write) == ([77], "the line is cut", True)
    assert rank.state.dropped_puts == 1
    rank.settle()
    rank.assert_idle()


def test_a_cancelled_request_of_the_batch_is_gone_before_the_next_iteration() -> None:
    rank = Rank(DECODE)
    decode(rank, "a", 7, offers=True, salt=b"s", max_tokens=30)
    decode(rank, "b", 7, max_tokens=30)
    while len(running(rank)) < 2:
        rank.step()
    (ended,) = rank.cancel("a")
    assert isinstance(ended, Ended)
    assert [chunk.job[0] for chunk in rank.step()[0].chunks] == ["b"]


def test_an_offer_without_an_answer_for_a_minute_frees_its_slots_and_a_late_answer_changes_nothing() -> None:
    rank = Rank(DECODE, num_slots=1)
    decode(rank, "a", 5, max_tokens=200, salt=b"s", offers=True)
    first = rank.until(Saved)
    asked_at = rank.now
    second = rank.until(Saved)
    assert rank.now >= asked_at + ANSWER_S
    assert (second.put, rank.state.puts.keys()) == (first.put + 1, {second.put})
    assert rank.tell(Granted(first.put, [77])) == []
    assert rank.state.puts.keys() == {second.put}


def test_a_batch_leaps_while_a_job_waits_for_pages_which_single_steps_would_not_give_it_either() -> None:
    """Pages that the batch needs next are left to it. It takes them, so that never more are free."""
    rank = Rank(DECODE, num_pages=8)
    decode(rank, "a", 5, max_tokens=100)
    rank.until(Token)
    assert next_step(rank.state, rank.now, 16).steps > 1
    decode(rank, "b", 11, max_tokens=2)
    rank.step()
    steps = next_step(rank.state, rank.now, 16).steps
    assert steps > 1
    for _ in range(steps):
        assert [task.job.request_id for task in rank.state.waiting] == ["b"]
        rank.step()
