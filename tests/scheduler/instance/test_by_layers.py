"""Blocks that move by layers beside a pass: which ones, what they wait for, what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scheduler.instance import DECODE, PREFILL, JobId, Limits, TransferEnded, begin, next_step, on
from scheduler.instance.outcomes import BadBlocks, Computed, Loaded, Prefilled
from scheduler.instance.progress import LATE_S
from scheduler.instance.step import Result, Step
from tests.scheduler.instance.model_runner import kv_of
from tests.scheduler.instance.rank import Rank, job
from tests.scheduler.instance.test_loads_and_stores import Line, in_pool

pytestmark = pytest.mark.quick

LIMITS = Limits(8, layers=3)


def steps(rank: Rank) -> Iterator[Step]:
    """The steps until nothing is left to do."""
    for _ in range(100):
        if not rank.state.busy:
            return
        yield rank.step()[0]
    raise AssertionError("it does not end")


def test_a_prefix_comes_in_beside_the_first_pass_and_the_last_blocks_leave_behind_the_last_one() -> None:
    rank = Rank(PREFILL, limits=LIMITS)
    rank.arrive(job("a", [PREFILL], range(30), load=in_pool(rank, range(16)), store=[1, 2, 3, 4]))
    done = list(steps(rank))
    first, last = (step for step in done if step.chunks)
    assert not any(step.reads or step.lands for step in done)
    assert first.ahead is not None
    assert (first.ahead.halves, len(first.ahead.places)) == ((0, 1), 4)
    assert first.chunks[0].start == 16
    assert last.ahead is None
    assert [(group.behind, list(group.places)) for group in last.writes] == [(False, [1, 2]), (True, [3, 4])]
    assert isinstance(rank.said[-1], Prefilled)
    assert [rank.pool[place] for place in (1, 2, 3)] == [kv_of(range(30))[n : n + 4] for n in (16, 20, 24)]
    (loaded,) = [said for said in rank.said if isinstance(said, Loaded)]
    assert (loaded.blocks, loaded.beside) == (4, True)
    rank.assert_idle()


@pytest.mark.parametrize(
    ("limits", "blocks"),
    [
        (Limits(8), 2),  # switched off
        (Limits(8, layers=3, least=3), 2),  # so few are as fast as a whole
        (Limits(8, layers=3), 7),  # one layer of them does not fit into a half
    ],
)
def test_other_blocks_come_in_as_a_whole(limits: Limits, blocks: int) -> None:
    rank = Rank(PREFILL, limits=limits)
    tokens = range(4 * blocks + 2)
    rank.arrive(job("a", [PREFILL], tokens, load=in_pool(rank, tokens[:-2]), store=[9]))
    done = list(steps(rank))
    assert sum(len(read.places) for step in done for read in step.reads) == blocks
    assert not any(step.ahead for step in done)
    rank.assert_idle()


def test_a_prompt_whose_prefix_comes_by_layers_waits_for_stores_and_begins_none() -> None:
    line = Line()
    rank = line.rank(PREFILL, limits=LIMITS, half_blocks=4)
    rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    rank.until(Computed)
    rank.arrive(job("b", [PREFILL], range(20, 40), load=in_pool(rank, range(20, 32)), store=[3, 4]))
    assert not any(step.chunks or step.writes for step, _ in [rank.step() for _ in range(4)])
    line.open = True
    assert rank.until(Prefilled).job == JobId("a", 0)
    assert rank.step()[0].ahead is not None
    rank.settle()
    rank.assert_idle()


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_prefix_that_does_not_come_is_computed_and_late_bytes_find_no_half(late: bool, bad: bool) -> None:
    rank = Rank(PREFILL, limits=LIMITS)
    load = in_pool(rank, range(8))
    rank.arrive(job("a", [PREFILL], range(12), load=load, store=[1]))
    rank.step()
    step = next_step(rank.state, rank.now)
    begin(rank.state, step)
    assert step.ahead is not None
    lost = TransferEnded(0, "gone", late, load[:1] if bad else ())
    said = on(rank.state, Result(step, lost=lost), rank.now)
    rank.state.check()
    assert [outcome for outcome in said if isinstance(outcome, BadBlocks)] == [BadBlocks(load[:1])] * bad
    rank.said += said
    failed_at = rank.now
    assert rank.until(Computed).tokens == 12
    assert rank.state.staging.free_halves(failed_at) == ([] if late else [0, 1])
    rank.now += LATE_S
    rank.settle()
    assert rank.pool[1] == kv_of(range(12))[8:]
    rank.assert_idle()


def test_a_half_into_which_late_bytes_may_come_is_done_without() -> None:
    rank = Rank(PREFILL, limits=LIMITS)
    rank.state.staging.free(1, 1000.0)
    rank.arrive(job("a", [PREFILL], range(12), load=in_pool(rank, range(8)), store=[1]))
    ahead = next(step.ahead for step in steps(rank) if step.ahead is not None)
    assert ahead.halves == (0,)
    rank.settle()
    rank.assert_idle()


def test_a_cancelled_prompt_leaves_nothing_before_its_prefix_came() -> None:
    line = Line()
    rank = line.rank(PREFILL, limits=LIMITS)
    rank.arrive(job("a", [PREFILL], range(12), load=in_pool(rank, range(8)), store=[1]))
    rank.step()
    rank.cancel("a")
    assert list(steps(rank)) == []
    rank.assert_idle()


@pytest.mark.parametrize("limits", [Limits(16, prefills=2), Limits(16, prefills=2, layers=3)])
def test_pages_that_are_being_copied_are_given_to_nobody_although_their_prompt_has_left_them(
    limits: Limits,
) -> None:
    line = Line()
    rank = line.rank(PREFILL, limits=limits, sharing="hash", num_pages=12)
    for name, places in (("a", [1, 2]), ("b", [3, 4])):
        rank.arrive(job(name, [PREFILL], range(8), store=places, salt=b"s"))
    for _ in range(4):
        rank.step()
    copied = [set(group.pages) for group in rank.runner.flying_halves.values()]
    left = set.union(*copied) - {page for task in rank.state.storing for page in task.sequence.pages}
    if limits.layers:
        assert left, "both found the same pages in the cache, and one left its own"
    assert not left & set(rank.state.pages.free)
    line.open = True
    rank.settle()
    assert [rank.pool[place] for place in (1, 2, 3, 4)] == [kv_of(range(8))[n : n + 4] for n in (0, 4)] * 2
    rank.assert_idle()


def test_the_blocks_of_a_rank_that_decodes_come_in_as_a_whole() -> None:
    rank = Rank(PREFILL, DECODE, limits=LIMITS)
    rank.arrive(job("a", [PREFILL, DECODE], range(12), load=in_pool(rank, range(8))))
    assert not any(step.ahead for step in steps(rank))
    rank.assert_idle()
