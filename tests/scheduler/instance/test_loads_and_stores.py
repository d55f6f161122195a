"""Loads, computing and stores: what begins when, and what a failure or a cancel leaves behind."""

from __future__ import annotations

import pytest

from scheduler.instance import (
    DECODE,
    PREFILL,
    JobId,
    Limits,
    Moved,
    Step,
    TransferEnded,
    begin,
    next_step,
    on,
)
from scheduler.instance.outcomes import Computed, Ended, Failed, Loaded, Prefilled, Stored, Token
from tests.scheduler.instance.model_runner import BLOCK, kv_of
from tests.scheduler.instance.rank import Rank, job

pytestmark = pytest.mark.quick


ONE_AFTER_THE_OTHER = Limits(8, overlaps=False)


class Line:
    """A transport that ends transfers when a test says so."""

    def __init__(self) -> None:
        self.open = False
        self.problem = ""

    def rank(self, *duties: str, **more: object) -> Rank:
        return Rank(*duties, ends=lambda: self.open, breaks=lambda: self.problem, **more)  # type: ignore[arg-type]


def in_pool(rank: Rank, tokens: range) -> list[int]:
    """Put the blocks of these tokens into the pool; their places."""
    kv = kv_of(tokens)
    places = []
    for start in range(0, len(tokens), BLOCK):
        places.append(1000 + len(rank.pool))
        block = kv[start : start + BLOCK]
        rank.pool[places[-1]] = block + [None] * (BLOCK - len(block))
    return places


def test_a_prompt_is_computed_in_chunks_stored_in_groups_and_ends_once() -> None:
    rank = Rank(PREFILL, half_blocks=2)
    rank.arrive(job("a", [PREFILL], range(18), store=[1, 2, 3, 4, 5]))
    said = rank.settle()
    assert [type(outcome) for outcome in said] == [Loaded, Stored, Computed, Token, Prefilled]
    kv = kv_of(range(18))
    assert [rank.pool[place] for place in (1, 2, 3, 4)] == [kv[n * 4 : n * 4 + 4] for n in range(4)]
    assert rank.pool[5][:2] == kv[16:]
    assert said[4].checksums[0] == tuple(kv[:4])  # type: ignore[union-attr]
    rank.assert_idle()


def test_the_first_token_is_told_before_the_first_block_is_copied() -> None:
    rank = Rank(PREFILL)
    rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    rank.until(Token)
    step, _ = rank.step()
    assert step.writes
    assert not step.chunks


def test_of_a_full_hit_the_last_token_is_computed_all_the_same() -> None:
    rank = Rank(PREFILL)
    rank.arrive(job("a", [PREFILL], range(8), load=in_pool(rank, range(8))))
    computed = rank.until(Computed)
    assert (computed.tokens, computed.loaded) == (1, 7)
    (done,) = [outcome for outcome in rank.said if isinstance(outcome, Prefilled)]
    assert done.checksums == ()


def test_times_of_load_compute_and_store_are_told_apart() -> None:
    rank = Rank(PREFILL, limits=Limits(4), half_blocks=1)
    rank.arrive(job("a", [PREFILL], range(20), load=in_pool(rank, range(8)), store=[1, 2, 3]))
    done = rank.until(Prefilled)
    assert done.compute_s == 3 * 0.5
    assert done.load_s > 0
    assert done.store_s > 0


def test_while_one_group_flies_the_one_before_it_is_put_into_pages() -> None:
    rank = Rank(PREFILL, half_blocks=1)
    rank.arrive(job("a", [PREFILL], range(13), load=in_pool(rank, range(12)), store=[9]))
    first, _ = rank.step()
    second, _ = rank.step()
    assert ([read.half for read in first.reads], first.lands) == ([0], ())
    assert ([read.half for read in second.reads], [land.half for land in second.lands]) == ([1], [0])
    rank.until(Prefilled)


def test_only_one_job_loads_and_is_computed_at_a_time_in_the_order_of_their_arrival() -> None:
    rank = Rank(PREFILL)
    for name in ("a", "b", "c"):
        rank.arrive(job(name, [PREFILL], range(9), store=[name + str(n) for n in range(3)]))
    while rank.state.busy:
        rank.step()
        assert not (rank.state.loading and rank.state.prefilling)
    assert [outcome.job[0] for outcome in rank.said if isinstance(outcome, Computed)] == ["a", "b", "c"]


def test_a_load_begins_beside_a_store_as_soon_as_a_half_is_free() -> None:
    line = Line()
    rank = line.rank(PREFILL, half_blocks=1, limits=ONE_AFTER_THE_OTHER)
    rank.arrive(job("a", [PREFILL], range(12), store=[1, 2, 3]))
    rank.until(Token)
    rank.arrive(job("b", [PREFILL], range(12), load=in_pool(rank, range(8)), store=[4]))
    step, _ = rank.step()
    assert ([write.half for write in step.writes], step.reads) == ([0, 1], ())
    line.open = True
    rank.step()
    line.open = False
    step, _ = rank.step()
    assert [write.half for write in step.writes] == [0]
    assert [read.half for read in step.reads] == [1]
    line.open = True
    rank.settle()
    rank.assert_idle()


def test_without_overlap_no_chunk_begins_while_blocks_are_on_their_way_to_the_pool() -> None:
    line = Line()
    rank = line.rank(PREFILL, limits=ONE_AFTER_THE_OTHER)
    rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    rank.until(Token)
    rank.arrive(job("b", [PREFILL], range(6)))
    assert not any(step.chunks for step, _ in [rank.step() for _ in range(5)])
    assert rank.state.prefilling
    line.open = True
    assert rank.until(Prefilled).job == JobId("a", 0)
    assert rank.until(Computed).job == JobId("b", 0)


def until_it_writes(rank: Rank) -> Step:
    """The step that begins the first writes."""
    return next(step for step, _ in (rank.step() for _ in range(10)) if step.writes)


def test_full_blocks_are_written_while_the_next_chunk_is_computed_and_the_tail_at_the_end() -> None:
    line = Line()
    rank = line.rank(PREFILL, limits=Limits(8))
    rank.arrive(job("a", [PREFILL], range(22), store=[1, 2, 3, 4, 5, 6]))
    first = until_it_writes(rank)
    assert [list(write.places) for write in first.writes] == [[1, 2]]
    assert [chunk.start for chunk in first.chunks] == [8]
    line.open = True
    said = rank.settle()
    assert [type(outcome) for outcome in said[-3:]] == [Computed, Token, Prefilled]
    kv = kv_of(range(22))
    assert [rank.pool[place] for place in (1, 2, 3, 4, 5)] == [kv[n * 4 : n * 4 + 4] for n in range(5)]
    assert rank.pool[6][:2] == kv[20:]
    rank.assert_idle()


def flying(rank: Rank, problem: str = "") -> Moved:
    """End the transfers in flight now, while the step under way goes on."""
    ended = []
    for half in list(rank.runner.flying_halves):
        write = rank.runner.flying_halves.pop(half)
        blocks = rank.runner.halves[half][: len(write.places)]
        rank.pool.update(zip(write.places, blocks))
        ended.append(TransferEnded(half, problem, sums=[] if problem else list(map(tuple, blocks))))
    return Moved(ended)


def test_the_next_prompt_is_computed_while_the_last_blocks_leave_and_their_end_is_told_meanwhile() -> None:
    line = Line()
    rank = line.rank(PREFILL)
    rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    rank.arrive(job("b", [PREFILL], range(6, 12), store=[3, 4]))
    rank.until(Token)
    rank.step()
    step = next_step(rank.state, rank.now)
    assert [chunk.job for chunk in step.chunks] == [JobId("b", 0)]
    begin(rank.state, step)
    (done,) = rank.tell(flying(rank))
    assert isinstance(done, Prefilled)
    assert done.job == JobId("a", 0)
    rank.said += on(rank.state, rank.runner.run(step), rank.now)
    line.open = True
    rank.settle()
    assert [outcome.job[0] for outcome in rank.said if isinstance(outcome, Prefilled)] == ["a", "b"]
    rank.assert_idle()


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_write_is_told_during_a_chunk_unless_it_ends_the_prompt(fails: bool) -> None:
    line = Line()
    rank = line.rank(PREFILL, limits=Limits(4))
    rank.arrive(job("a", [PREFILL], range(9), store=[1, 2, 3]))
    until_it_writes(rank)
    step = next_step(rank.state, rank.now)
    assert step.chunks
    begin(rank.state, step)
    said = rank.tell(flying(rank, "gone" * fails))
    assert said == ([] if fails else [Stored(JobId("a", 0), 0, (tuple(kv_of(range(4))),))])
    rank.said += on(rank.state, rank.runner.run(step), rank.now)
    line.open = True
    rank.settle()
    assert isinstance(rank.said[-1], Failed if fails else Prefilled)
    rank.assert_idle()


def test_a_cancelled_prompt_keeps_its_places_until_what_flies_has_landed() -> None:
    line = Line()
    rank = line.rank(PREFILL, limits=Limits(4))
    rank.arrive(job("a", [PREFILL], range(12), store=[1, 2, 3]))
    until_it_writes(rank)
    assert rank.cancel("a") == []
    assert rank.cancel("a") == []
    for _ in range(3):
        assert not rank.step()[0].chunks
    line.open = True
    rank.settle()
    failed = rank.said[-1]
    assert isinstance(failed, Failed)
    assert failed.reason == "KV could not be moved: cancelled"
    rank.assert_idle()


@pytest.mark.parametrize("duty", [PREFILL, DECODE])
def test_a_cancelled_load_ends_at_once_drops_its_groups_and_frees_its_half_with_the_batch(duty: str) -> None:
    line = Line()
    rank = line.rank(duty, half_blocks=1)
    rank.arrive(job("a", [duty], range(17), load=in_pool(rank, range(16))))
    rank.step()
    assert rank.cancel("a") == [Ended(JobId("a", 0), "cancelled", 0)]
    assert len(rank.state.pages.free) == rank.state.pages.num_pages
    assert rank.state.staging.free_halves(rank.now) == [1]
    assert not any(step.reads for step, _ in [rank.step() for _ in range(3)])
    assert rank.state.staging.free_halves(rank.now) == [1]
    line.open = True
    rank.settle()
    rank.assert_idle()


def test_a_cancelled_load_does_not_hold_up_the_running_batch_nor_the_next_load() -> None:
    line = Line()
    rank = line.rank(DECODE, half_blocks=1)
    line.open = True
    rank.arrive(job("old", [DECODE], range(5), load=in_pool(rank, range(4)), max_tokens=100))
    rank.until(Token)
    line.open = False
    rank.arrive(job("a", [DECODE], range(17), load=in_pool(rank, range(16))))
    rank.step()
    rank.cancel("a")
    rank.arrive(job("b", [DECODE], range(9), load=in_pool(rank, range(8))))
    step, said = rank.step()
    assert [read.half for read in step.reads] == [1]
    assert any(isinstance(outcome, Token) for outcome in said)
    line.open = True
    rank.until(Loaded)
    answered = len(rank.said_tokens("old"))
    assert rank.cancel("old") == [Ended(JobId("old", 0), "cancelled", answered)]
    rank.settle()
    rank.assert_idle()


def test_a_prefill_that_is_cancelled_stops_within_a_chunk() -> None:
    rank = Rank(PREFILL, limits=Limits(2))
    rank.arrive(job("a", [PREFILL], range(20), store=[1, 2, 3, 4, 5]))
    while not rank.state.prefilling or rank.state.prefilling[0].computed < 4:
        rank.step()
    assert rank.cancel("a") == [Ended(JobId("a", 0), "cancelled", 0)]
    rank.assert_idle()
    assert rank.pool == {}


def test_a_cancel_does_not_stop_a_store_and_its_blocks_reach_the_pool() -> None:
    rank = Rank(PREFILL)
    rank.arrive(job("a", [PREFILL], range(8), store=[1, 2]))
    rank.until(Token)
    assert rank.cancel("a") == []
    assert rank.until(Prefilled).job == JobId("a", 0)
    assert set(rank.pool) == {1, 2}


def test_a_cancel_for_another_attempt_changes_nothing() -> None:
    rank = Rank(PREFILL)
    rank.arrive(job("a", [PREFILL], range(8), attempt=2, store=[1, 2]))
    assert rank.cancel("a", 1) == []
    assert rank.cancel("a", 3) == []
    assert rank.until(Prefilled).job == JobId("a", 2)


def test_a_load_that_fails_ends_its_job_alone_and_writes_nothing() -> None:
    line = Line()
    rank = line.rank(DECODE, half_blocks=1)
    line.open, line.problem = True, "the line is cut"
    rank.arrive(job("a", [DECODE], range(9), load=in_pool(rank, range(8))))
    assert rank.until(Failed) == Failed(JobId("a", 0), "KV could not be moved: the line is cut", False)
    line.problem = ""
    rank.arrive(job("b", [DECODE], range(9), load=in_pool(rank, range(8))))
    rank.until(Ended)
    rank.assert_idle()


def test_a_half_into_which_late_bytes_may_come_is_not_used_for_two_minutes() -> None:
    line = Line()
    rank = line.rank(DECODE, late=lambda: True)
    line.open, line.problem = True, "the line is cut"
    rank.arrive(job("a", [DECODE], range(9), load=in_pool(rank, range(8))))
    while not rank.state.staging.free_from[0]:
        rank.step()
    failed_at, line.problem = rank.now, ""
    for name in ("b", "c"):
        rank.arrive(job(name, [DECODE], range(9), load=in_pool(rank, range(8))))
    used = []
    while rank.state.busy:
        used += [(rank.now, read.half) for read in rank.step()[0].reads]
    assert {half for _, half in used} == {1}
    rank.now = failed_at + 120.0
    rank.arrive(job("d", [DECODE], range(9), load=in_pool(rank, range(8))))
    assert [read.half for read in rank.step()[0].reads] == [0]


def test_a_store_that_fails_is_told_when_none_of_its_groups_flies_any_more() -> None:
    line = Line()
    rank = line.rank(PREFILL, half_blocks=1)
    rank.arrive(job("a", [PREFILL], range(16), store=[1, 2, 3, 4]))
    rank.until(Token)
    rank.step()
    assert len(rank.runner.flying_halves) == 2
    line.open, line.problem = True, "the line is cut"
    ends = iter([True, False])
    rank.runner.ends = lambda: next(ends)
    assert rank.step()[1] == []
    rank.runner.ends = lambda: True
    step, said = rank.step()
    assert step.writes == ()
    assert said == [Failed(JobId("a", 0), "KV could not be moved: the line is cut", True)]
    rank.assert_idle()


def test_a_job_that_can_never_have_enough_pages_fails_at_once_with_the_numbers() -> None:
    rank = Rank(PREFILL, num_pages=4)
    (failed,) = rank.arrive(job("a", [PREFILL], range(9)))
    assert failed == Failed(JobId("a", 0), "5 KV pages are needed, the rank has 4", for_good=True)
    rank.assert_idle()


def test_the_same_request_can_come_again_while_its_earlier_attempt_still_stores() -> None:
    line = Line()
    rank = line.rank(PREFILL)
    rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    rank.until(Token)
    rank.arrive(job("a", [PREFILL], range(6), attempt=1, store=[3, 4]))
    line.open = True
    assert [rank.until(Prefilled).job, rank.until(Prefilled).job] == [JobId("a", 0), JobId("a", 1)]
    rank.assert_idle()
