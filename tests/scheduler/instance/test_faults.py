"""Jobs that the engine cannot compute: each fails once, in every stage, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.instance import (
    DECODE,
    PREFILL,
    JobId,
    Late,
    Limits,
    Moved,
    SwapAnswered,
    TransferEnded,
    begin,
    next_step,
    on,
)
from scheduler.instance.outcomes import (
    Computed,
    Ended,
    Failed,
    Loaded,
    Outcome,
    Preempted,
    Prefetched,
    Prefilled,
    Saved,
    Scored,
    Stored,
    SwapWanted,
    Token,
)
from scheduler.instance.step import ENGINE_ERROR, LOGITS_NOT_FINITE, NO_TOKEN, Chunk, Draw, Step
from tests.conftest import examples
from tests.scheduler.instance.model_runner import BLOCK, choose, kv_of
from tests.scheduler.instance.rank import Rank, job
from tests.scheduler.instance.test_late_tokens import First
from tests.scheduler.instance.test_loads_and_stores import Line, in_pool
from tests.scheduler.instance.test_prefetch import prefetch

pytestmark = pytest.mark.quick

BOTH = (PREFILL, DECODE)
A, B = JobId("a", 0), JobId("b", 0)
SALT = b"s"


def over(position: int, branch: int | None = None, name: str = "a") -> Callable[[Chunk], bool]:
    """A pass over this token of a job raises, in every branch or in one."""

    def raises(chunk: Chunk) -> bool:
        is_of = chunk.job.request_id == name and branch in (None, chunk.job.branch)
        return is_of and chunk.start <= position < chunk.end

    return raises


def behind(position: int, branch: int | None = None, name: str = "a") -> Callable[[Chunk, Draw | None], bool]:
    """No token can be drawn after this one of a job, in every branch or in one."""

    def lacks(chunk: Chunk, draw: Draw | None) -> bool:
        if draw is None or chunk.job.request_id != name:
            return False
        return chunk.end == position + 1 and branch in (None, draw.branch)

    return lacks


def unscored(position: int) -> Callable[[Chunk, Draw | None], bool]:
    """The chunks with this token have no scores."""
    return lambda chunk, draw: draw is None and chunk.start <= position < chunk.end


def answer_of(tokens: Sequence[int], count: int, branch: int = 0) -> list[int]:
    """The first tokens of the answer to a prompt."""
    ids = list(tokens)
    for _ in range(count):
        ids.append(choose(kv_of(ids)[-1], branch))
    return ids[len(tokens) :]


def ending(first: int, *others: int) -> tuple[range, int]:
    """(a prompt, the token with this number in its first branch). It comes neither before nor in others."""
    for start in range(1000):
        prompt = range(start, start + 9)
        *before, ends = answer_of(prompt, first)
        rest = [token for branch, count in enumerate(others, 1) for token in answer_of(prompt, count, branch)]
        if ends not in before + rest:
            return prompt, ends
    raise AssertionError("every prompt repeats itself")


def told(rank: Rank, name: str, branch: int = 0) -> list[int]:
    """The tokens of one branch of an answer so far."""
    tokens = [one for one in rank.said if isinstance(one, Token)]
    return [one.token for one in tokens if (one.job.request_id, one.job.branch) == (name, branch)]


def failure(rank: Rank, name: str = "a") -> Failed:
    """The one failure of a job, which is for good. Nothing is said of the job after it."""
    of_job = [one for one in rank.said if getattr(one, "job", ("",))[0] == name]
    (failed,) = (one for one in of_job if isinstance(one, Failed))
    assert of_job[-1] is failed
    assert failed.for_good
    return failed


def settled(rank: Rank, name: str = "a") -> Failed:
    """Let a rank become idle, on which a job is at fault; its failure."""
    rank.settle()
    rank.assert_idle()
    assert not [task for task in rank.state.tasks if task.request_id == name]
    return failure(rank, name)


def until_fault(rank: Rank, limit: int = 100) -> list[Outcome]:
    """Go on until a pass lacks a token, or raises; what was said then."""
    for _ in range(limit):
        step, said = rank.step()
        if any(rank.runner.raises(chunk) for chunk in step.chunks) or _lacks(rank, step):
            return said
    raise AssertionError("no pass was at fault")


def _lacks(rank: Rank, step: Step) -> bool:
    lacks = rank.runner.lacks
    return any(lacks(chunk, draw) for chunk in step.chunks for draw in (*chunk.draws, None))


# ------------------------------------------------------------------------------- prompts

LIMITS = {
    "alone": Limits(8),
    "beside another": Limits(8, prefills=2),
    "one after the other": Limits(8, overlaps=False),
    "by layers": Limits(8, layers=3, prefills=2),
    "whole": Limits(8, chunked=False),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("position", [0, 3, 7, 8, 13, 16, 20])
@pytest.mark.parametrize("sharing", ["off", "hash", "radix"])
def test_a_prompt_fails_with_the_chunk_that_raises_and_nothing_of_this_chunk_is_used(
    position: int, limits: str, sharing: str
) -> None:
    rank = Rank(PREFILL, limits=LIMITS[limits], sharing=sharing, raises=over(position))
    for name in ("a", "b", "c"):
        places = [f"{name}{number}" for number in range(6)]
        rank.arrive(job(name, [PREFILL], range(21), store=places, salt=SALT))
        if name == "b":
            rank.settle()  # c comes later, and would find what a has left
    failed = settled(rank)
    assert (failed.code, failed.may_still_write) == (ENGINE_ERROR, False)
    assert told(rank, "a") == []
    assert told(rank, "b") == told(rank, "c") == answer_of(range(21), 1)
    assert [len(one.checksums) for one in rank.said if isinstance(one, Prefilled)] == [6, 6]
    kv = kv_of(range(21))
    for one in rank.said:
        if isinstance(one, Stored):
            first = one.first * BLOCK
            assert [value for sums in one.checksums for value in sums] == kv[first:][: 4 * len(one.checksums)]
            assert one.job != A or first + 4 * len(one.checksums) <= position


@pytest.mark.parametrize("position", [8, 9, 15, 20])
@pytest.mark.parametrize("limits", ["alone", "by layers"])
def test_a_prompt_whose_prefix_was_loaded_fails_and_frees_its_halves(position: int, limits: str) -> None:
    rank = Rank(PREFILL, limits=LIMITS[limits], half_blocks=1, raises=over(position))
    load = in_pool(rank, range(8))
    for name in ("a", "b"):
        rank.arrive(job(name, [PREFILL], range(21), load=load, store=[f"{name}{n}" for n in range(4)]))
    assert settled(rank).code == ENGINE_ERROR
    assert told(rank, "b") == answer_of(range(21), 1)
    assert [one.job for one in rank.said if isinstance(one, Loaded)] == [A, B]


@pytest.mark.parametrize("lacking", [0, 1, 2, None])
@pytest.mark.parametrize("duties", [(PREFILL,), BOTH])
def test_one_branch_without_a_first_token_fails_the_job_and_no_branch_has_one(
    lacking: int | None, duties: tuple[str, ...]
) -> None:
    rank = Rank(*duties, limits=Limits(64, prefills=2), lacks=behind(8, lacking))
    rank.arrive(job("a", duties, range(9), n=3, store=[1, 2, 3] * (duties == (PREFILL,))))
    rank.arrive(job("b", duties, range(9), n=2, max_tokens=3))
    assert settled(rank).code == LOGITS_NOT_FINITE
    assert not [one for one in rank.said if isinstance(one, Computed | Token) and one.job.request_id == "a"]
    assert told(rank, "b", 1) == answer_of(range(9), 3 if duties == BOTH else 1, 1)


def test_branches_that_were_dropped_before_are_not_told_of_again() -> None:
    rank = Rank(*BOTH, limits=Limits(2), lacks=behind(8, 2))
    rank.arrive(job("a", BOTH, range(9), n=3))
    rank.step()
    assert rank.cancel("a", branch=1) == [Ended(JobId("a", 0, 1), "cancelled", 0)]
    settled(rank)
    assert [type(one) for one in rank.said] == [Loaded, Ended, Failed]


@pytest.mark.parametrize("position", range(0, 21, 3))
@pytest.mark.parametrize("chunk", [5, 8, 64])
def test_a_prompt_without_a_score_fails_with_its_chunk_and_the_others_keep_their_own(
    position: int, chunk: int
) -> None:
    tokens = [*range(40, 61)]
    rank = Rank(PREFILL, limits=Limits(chunk, prefills=3))
    rank.runner.lacks = lambda chunk, draw: chunk.job == A and unscored(position)(chunk, draw)
    for name, scored in (("a", True), ("b", True), ("c", False)):
        rank.arrive(job(name, [PREFILL], tokens, scored=scored))
    assert settled(rank).code == LOGITS_NOT_FINITE
    (scored_b,) = (one for one in rank.said if isinstance(one, Scored))
    assert (scored_b.job, list(scored_b.scores)) == (B, list(zip(kv_of(tokens)[:-1], tokens[1:])))
    assert told(rank, "b") == told(rank, "c") == answer_of(tokens, 1)


# ------------------------------------------------------------------------------- blocks on their way


@pytest.mark.parametrize("how", ["a chunk raises", "no token"])
@pytest.mark.parametrize("problem", ["", "the line is cut"])
@pytest.mark.parametrize("event", ["", "cancel", "another step"])
def test_a_prompt_whose_blocks_are_on_their_way_fails_when_they_have_arrived(
    how: str, problem: str, event: str
) -> None:
    line = Line()
    rank = line.rank(PREFILL, half_blocks=1)
    rank.runner.raises = over(20) if how == "a chunk raises" else rank.runner.raises
    rank.runner.lacks = behind(23) if how == "no token" else rank.runner.lacks
    rank.arrive(job("a", [PREFILL], range(24), store=[1, 2, 3, 4, 5, 6]))
    rank.arrive(job("b", [PREFILL], range(9)))
    until_fault(rank)
    assert not [one for one in rank.said if isinstance(one, Failed)]
    flying = dict(rank.runner.flying_halves)
    assert {group.job for group in flying.values()} == {A}
    if event == "cancel":
        assert rank.cancel("a") == []
    line.problem = problem
    if event == "another step":
        rank.step()  # b begins
        step = next_step(rank.state, rank.now)
        begin(rank.state, step)
        assert {chunk.job for chunk in step.chunks} == {B}
        line.open = True
        halves, _ = rank.runner._poll(rank.now)
        rank.said += on(rank.state, Moved(halves), rank.now)
        rank.state.check()
        assert failure(rank).may_still_write is bool(problem)
        rank.said += on(rank.state, rank.runner.run(step), rank.now)
        line.problem = ""
    line.open = True
    failed = settled(rank)
    assert failed.code == (ENGINE_ERROR if how == "a chunk raises" else LOGITS_NOT_FINITE)
    assert failed.may_still_write is bool(problem)
    assert told(rank, "b") == answer_of(range(9), 1)


def test_a_job_fails_when_the_last_of_its_groups_has_ended_and_says_of_each_what_may_land() -> None:
    line = Line()
    rank = line.rank(PREFILL, half_blocks=1, raises=over(20))
    rank.arrive(job("a", [PREFILL], range(24), store=[1, 2, 3, 4, 5, 6]))
    until_fault(rank)
    assert set(rank.runner.flying_halves) == {0, 1}
    line.open, line.problem = True, "the line is cut"
    ends = iter([True, False])
    rank.runner.ends = lambda: next(ends)
    assert rank.step()[1] == []
    line.problem, rank.runner.ends = "", lambda: True
    assert settled(rank).may_still_write


@pytest.mark.parametrize("position", [16, 20])
def test_blocks_that_leave_behind_the_pass_at_fault_are_not_of_use(position: int) -> None:
    rank = Rank(PREFILL, limits=Limits(16, prefills=2, layers=3), raises=over(position))
    for name in ("a", "b"):
        rank.arrive(job(name, [PREFILL], range(21), store=[f"{name}{n}" for n in range(6)]))
    assert settled(rank).code == ENGINE_ERROR
    assert "a5" not in rank.pool
    assert rank.pool["b5"][:1] == kv_of(range(21))[20:]


# ------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("faulty", [0, 1, 2])
@pytest.mark.parametrize("answered", [1, 2, 5])
@pytest.mark.parametrize("how", ["raises", "lacks"])
def test_a_branch_at_fault_ends_its_siblings_after_the_same_token_and_no_neighbour(
    faulty: int, answered: int, how: str
) -> None:
    rank = Rank(*BOTH, sharing="hash", limits=Limits(64))
    last = 9 + answered - 1
    setattr(rank.runner, how, over(last, faulty) if how == "raises" else behind(last, faulty))
    for name in ("a", "b"):
        rank.arrive(job(name, BOTH, range(9), n=3, max_tokens=8, salt=SALT))
    settled(rank)
    for branch in range(3):
        assert told(rank, "a", branch) == answer_of(range(9), answered, branch)
        assert told(rank, "b", branch) == answer_of(range(9), 8, branch)


@pytest.mark.parametrize("faulty", [0, 2])
def test_branches_that_were_loaded_fail_together_too(faulty: int) -> None:
    rank = Rank(DECODE, lacks=behind(11, faulty))
    load, first = in_pool(rank, range(9)), {0: 40, 2: 41}
    rank.arrive(job("a", [DECODE], range(9), load=load, answers=[(0, [40]), (2, [41])], max_tokens=8))
    settled(rank)
    for branch, token in first.items():
        assert told(rank, "a", branch) == answer_of([*range(9), token], 2, branch)


def test_a_branch_that_has_ended_stays_ended_and_one_that_was_dropped_is_not_told_of_again() -> None:
    prompt, ends = ending(3, 6, 6, 6)
    rank = Rank(*BOTH, limits=Limits(64), lacks=behind(14, 2))
    rank.arrive(job("a", BOTH, prompt, n=4, stop_ids=frozenset({ends})))
    rank.until(Ended)
    assert rank.cancel("a", branch=3) == [Ended(JobId("a", 0, 3), "cancelled", 3)]
    settled(rank)
    assert [one.job.branch for one in rank.said if isinstance(one, Ended)] == [0, 3]
    assert told(rank, "a", 1) == answer_of(prompt, 6, 1)


def test_a_branch_whose_last_token_comes_with_the_fault_of_another_fails_with_it() -> None:
    prompt, ends = ending(4, 4)
    rank = Rank(*BOTH, limits=Limits(64), lacks=behind(11, 1))
    rank.arrive(job("a", BOTH, prompt, n=2, stop_ids=frozenset({ends})))
    settled(rank)
    assert told(rank, "a", 0) == answer_of(prompt, 3, 0)
    assert not [one for one in rank.said if isinstance(one, Ended)]


def test_blocks_that_were_offered_before_keep_their_slots_until_they_are_answered() -> None:
    """A sibling's answer ends, and its last block is saved; the job fails after that."""
    prompt, ends = ending(4, 6)
    rank = Rank(*BOTH, limits=Limits(64), num_slots=4, lacks=behind(13, 1))
    more = {"stop_ids": frozenset({ends}), "offers": True, "salt": SALT}
    rank.arrive(job("a", BOTH, prompt, n=2, **more))
    rank.settle()
    failure(rank)
    assert [one.job.branch for one in rank.said if isinstance(one, Ended)] == [0]
    blocks = [
        (one.job.branch, one.index) for said in rank.said if isinstance(said, Saved) for one in said.blocks
    ]
    assert sorted(blocks) == [(0, 0), (0, 1), (0, 2), (1, 2)]
    assert len(rank.state.staging.free_slots) == 4 - len(blocks)
    assert not rank.state.tasks


@pytest.mark.parametrize("duties", [(PREFILL,), (DECODE,), BOTH])
def test_a_cancel_after_the_failure_changes_nothing_and_the_next_attempt_is_a_new_job(
    duties: tuple[str, ...],
) -> None:
    rank = Rank(*duties, lacks=behind(9))
    load = in_pool(rank, range(9)) if duties == (DECODE,) else []
    rank.arrive(job("a", duties, range(10), load=load))
    settled(rank)
    assert rank.cancel("a") == []
    del rank.said[:]
    rank.runner.lacks = lambda chunk, draw: False
    rank.arrive(job("a", duties, range(10), load=load, attempt=1))
    rank.settle()
    rank.assert_idle()
    assert told(rank, "a") == answer_of(range(10), 1 if duties == (PREFILL,) else 8)


@pytest.mark.parametrize("opens", [False, True])
def test_a_prefetch_of_a_request_at_fault_ends_by_itself(opens: bool) -> None:
    line = Line()
    rank = line.rank(DECODE, sharing="hash", half_blocks=1)
    line.open = True
    rank.arrive(job("a", [DECODE], range(10), load=in_pool(rank, range(9)), salt=SALT))
    rank.until(Token)
    line.open = False
    rank.arrive(prefetch("a", range(50, 58), in_pool(rank, range(50, 58))))
    rank.step()
    assert rank.state.loading is not None
    rank.runner.raises = over(len(rank.said_tokens("a")) + 9)
    until_fault(rank)
    (failed,) = (one for one in rank.said if isinstance(one, Failed))
    assert rank.state.loading is not None
    if not opens:
        rank.cancel("a")
    line.open = True
    rank.settle()
    rank.assert_idle()
    (prefetched,) = (one for one in rank.said if isinstance(one, Prefetched))
    assert (prefetched.blocks, failed.code) == (2 * opens, ENGINE_ERROR)


# ------------------------------------------------------------------------------- swaps


def swapping(line: Line, n: int) -> tuple[Rank, SwapWanted]:
    """A rank that has asked for places for one of the branches of a job, whose others run."""
    line.open = True
    rank = line.rank(*BOTH, num_pages=4 + 2 * n, preemption="swap", limits=Limits(64))
    rank.arrive(job("a", BOTH, range(5), n=n, max_tokens=100))
    wanted = rank.until(SwapWanted)
    assert isinstance(wanted, SwapWanted)
    return rank, wanted


def fault_of(rank: Rank) -> list[Outcome]:
    """Have the next pass over a token of the job raise."""
    rank.runner.raises = lambda chunk: chunk.job.request_id == "a"
    return until_fault(rank)


def swap_places(wanted: SwapWanted) -> list[str]:
    return [f"swap-{wanted.job.branch}-{n}" for n in range(-(-len(wanted.token_ids) // BLOCK))]


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("answer", ["none", "granted", "late", "refused late"])
def test_a_job_fails_while_a_branch_waits_to_be_swapped(n: int, answer: str) -> None:
    rank, wanted = swapping(Line(), n)
    places = None if answer == "refused late" else swap_places(wanted)
    if answer == "granted":
        rank.tell(SwapAnswered(wanted.job, places))
        rank.state.staging.free_from = [rank.now + 1000] * 2  # no half is free, so that no group begins
    said = fault_of(rank)
    assert [one.code for one in said if isinstance(one, Failed)] == [ENGINE_ERROR]
    if "late" in answer:
        assert rank.tell(SwapAnswered(wanted.job, places)) == []
    settled(rank)
    assert rank.pool == {}


@pytest.mark.parametrize("problem", ["", "the line is cut"])
@pytest.mark.parametrize("half_blocks", [1, 2])
def test_a_job_fails_when_the_kv_of_the_branch_that_is_swapped_has_left(
    problem: str, half_blocks: int
) -> None:
    line = Line()
    rank, wanted = swapping(line, 3)
    rank.state.staging.half_blocks = half_blocks
    line.open = False
    rank.tell(SwapAnswered(wanted.job, swap_places(wanted)))
    rank.step()
    flying = set(rank.runner.flying_halves)
    assert len(flying) == min(2, -(-len(swap_places(wanted)) // half_blocks))
    assert not [one for one in fault_of(rank) if isinstance(one, Failed)]
    assert rank.cancel("a") == []
    for _ in range(3):
        assert rank.step()[0].writes == ()
    assert set(rank.runner.flying_halves) == flying
    line.open, line.problem = True, problem
    failed = settled(rank)
    assert (failed.code, failed.may_still_write) == (ENGINE_ERROR, bool(problem))


@pytest.mark.parametrize("broken", [0, 1, None])
def test_a_job_fails_when_the_last_of_two_swaps_has_ended_and_says_of_both_what_may_land(
    broken: int | None,
) -> None:
    line = Line()
    rank, first = swapping(line, 5)
    second = rank.until(SwapWanted)
    rank.state.staging.half_blocks = 8
    line.open = False
    for wanted in (first, second):
        rank.tell(SwapAnswered(wanted.job, swap_places(wanted)))
    rank.step()
    assert {group.job for group in rank.runner.flying_halves.values()} == {first.job, second.job}
    rank.cancel("a", branch=2)  # which leaves pages to the others
    assert not [one for one in fault_of(rank) if isinstance(one, Failed)]
    for half in (0, 1):
        assert not [one for one in rank.said if isinstance(one, Failed)]
        del rank.runner.flying_halves[half]
        rank.tell(Moved([TransferEnded(half, "cut", True) if half == broken else TransferEnded(half)]))
    assert settled(rank).may_still_write is (broken is not None)


def test_a_branch_that_was_preempted_before_is_no_part_of_the_job_any_more() -> None:
    rank = Rank(*BOTH, num_pages=10, limits=Limits(64))
    rank.arrive(job("a", BOTH, range(5), n=3, max_tokens=100))
    preempted = rank.until(Preempted)
    rank.arrive(job("a", BOTH, preempted.token_ids, attempt=1, branch=2, answered=preempted.answered))
    rank.runner.raises = lambda chunk: chunk.job[:2] == ("a", 0)
    until_fault(rank)
    (failed,) = (one for one in rank.said if isinstance(one, Failed))
    assert failed.job[:2] == ("a", 0)
    rank.settle()
    assert [one.job for one in rank.said if isinstance(one, Ended)] == [JobId("a", 1, 2)]
    rank.assert_idle()


# ------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("lacking", [0, 1, None])
@pytest.mark.parametrize("flies", [False, True])
@pytest.mark.parametrize("under_way", [False, True])
def test_a_token_that_does_not_come_late_fails_the_job_once_its_blocks_have_left(
    lacking: int | None, flies: bool, under_way: bool
) -> None:
    first = First(lacks=behind(9, lacking))
    rank = first.rank
    rank.arrive(job("a", [PREFILL], range(10), n=2, store=[1, 2, 3]))
    rank.arrive(job("b", [PREFILL], range(40, 58)))
    first.line.open = not flies
    first.until_drawing("a")
    rank.step()
    assert bool(rank.runner.flying_halves) is flies
    late = [one for one in first.last.come() if one.job == A]
    if under_way:
        step = next_step(rank.state, rank.now)
        begin(rank.state, step)
        said = first.moved(late=late)
        rank.said += on(rank.state, first.last.run(step), rank.now)
        rank.state.check()
    else:
        said = rank.tell(Moved((), late))
    assert [type(one) for one in said] == [Failed] * (not flies)
    assert rank.cancel("a") == []
    first.line.open = first.last.comes = True
    assert settled(rank).code == LOGITS_NOT_FINITE
    assert told(rank, "a") == told(rank, "a", 1) == []
    assert told(rank, "b") == answer_of(range(40, 58), 1)


@pytest.mark.parametrize("position", range(0, 20, 4))
@pytest.mark.parametrize("comes", ["at once", "at the end", "while it is drawn"])
@pytest.mark.parametrize("flies", [False, True])
def test_a_score_that_does_not_come_late_fails_the_job_once_when_its_prompt_is_computed(
    position: int, comes: str, flies: bool
) -> None:
    first = First(comes=comes == "at once", lacks=unscored(position))
    rank = first.rank
    first.line.open = not flies
    rank.arrive(job("a", [PREFILL], range(21), scored=True, store=[1, 2, 3, 4, 5, 6]))
    rank.arrive(job("b", [PREFILL], range(9)))
    if comes == "while it is drawn":
        first.until_drawing("a")
        for one in first.last.come():
            rank.tell(Moved((), [one]))
    first.last.comes = comes != "at the end"
    while rank.state.prefilling or rank.state.waiting or rank.state.loading:
        rank.step()
    first.line.open = first.last.comes = True
    assert settled(rank).code == LOGITS_NOT_FINITE
    assert not [one for one in rank.said if isinstance(one, Scored)]
    assert told(rank, "b") == answer_of(range(9), 1)


@pytest.mark.parametrize("flies", [False, True])
def test_a_prompt_that_is_cancelled_after_a_score_did_not_come_ends_once(flies: bool) -> None:
    first = First(comes=True, lacks=unscored(2))
    rank = first.rank
    first.line.open = not flies
    rank.arrive(job("a", [PREFILL], range(40), scored=True, store=[*range(10)]))
    while not any(task.fault for task in rank.state.prefilling):
        rank.step()
    rank.step()
    assert bool(rank.runner.flying_halves) is flies
    rank.cancel("a")
    first.line.open = True
    rank.settle()
    (ended,) = (one for one in rank.said if isinstance(one, Ended | Failed))
    assert ended.job == A
    rank.assert_idle()


def test_what_comes_late_of_a_job_at_fault_changes_nothing_more() -> None:
    first = First()
    first.rank.arrive(job("a", [PREFILL], range(6), store=[1, 2]))
    first.line.open = False
    first.until_drawing("a")
    first.rank.step()
    for _ in range(2):
        assert first.rank.tell(Moved((), [Late(A, [NO_TOKEN], [None])])) == []
        assert first.rank.tell(Moved((), [Late(A, [3], [None])])) == []
    first.line.open = True
    settled(first.rank)
    assert told(first.rank, "a") == []


# ------------------------------------------------------------------------------- all at once

PROMPTS = [[*range(5)], [*range(9)], [*range(9), 1, 1], [*range(12)], [7, 7, 7], [*range(21)]]


@st.composite
def runs(
    draw: Any,
) -> tuple[dict[str, Any], list[tuple[list[int], int, int]], dict[str, tuple[int, int, str]]]:
    """(options of a rank; prompt, branches and length of the answer of each job; some jobs' faults)."""
    options = {
        "sharing": draw(st.sampled_from(["off", "hash", "radix"])),
        "num_pages": draw(st.sampled_from([16, 20, 64])),
        "limits": Limits(draw(st.sampled_from([2, 8, 64])), prefills=draw(st.integers(1, 3))),
    }
    jobs = draw(
        st.lists(
            st.tuples(st.sampled_from(PROMPTS), st.integers(1, 3), st.integers(4, 8)), min_size=2, max_size=6
        )
    )
    faults = {}
    for number, (prompt, n, length) in enumerate(jobs):
        if draw(st.booleans()):
            how = draw(st.sampled_from(["raises", "lacks"]))
            position = draw(st.integers(0 if how == "raises" else len(prompt) - 1, len(prompt) + length - 1))
            faults[f"r{number}"] = position, draw(st.integers(0, n - 1)), how
    return options, jobs, faults


@settings(max_examples=examples(60))
@given(runs())
def test_whatever_is_at_fault_all_others_have_their_whole_answers_and_the_rank_is_free(run: Any) -> None:
    """A job that is preempted comes again, and meets its fault there. Its family ends with it."""
    options, jobs, faults = run

    def raises(chunk: Chunk) -> bool:
        position, branch, how = faults.get(chunk.job.request_id, (0, 0, ""))
        prompt = len(jobs[int(chunk.job.request_id[1:])][0])
        is_of = position < prompt or chunk.job.branch == branch
        return how == "raises" and is_of and chunk.start <= position < chunk.end

    def lacks(chunk: Chunk, draw: Draw | None) -> bool:
        position, branch, how = faults.get(chunk.job.request_id, (0, 0, ""))
        return how == "lacks" and draw is not None and (draw.branch, chunk.end) == (branch, position + 1)

    rank = Rank(*BOTH, half_blocks=0, num_slots=0, raises=raises, lacks=lacks, **options)
    for number, (prompt, n, length) in enumerate(jobs):
        rank.arrive(job(f"r{number}", BOTH, prompt, n=n, max_tokens=length, salt=SALT))
    attempts, failed = 0, set[str]()
    for _ in range(2000):
        if not rank.state.busy:
            break
        for one in rank.step(unchanged=False)[1]:
            if isinstance(one, Failed):
                assert one.job.request_id not in failed
                failed.add(one.job.request_id)
                for attempt in range(attempts + 1):  # as the control plane does
                    rank.cancel(one.job.request_id, attempt)
            elif isinstance(one, Preempted) and one.job.request_id not in failed:
                attempts += 1
                length = jobs[int(one.job.request_id[1:])][2]
                more = {"attempt": attempts, "branch": one.job.branch, "answered": one.answered}
                rank.arrive(
                    job(one.job.request_id, BOTH, one.token_ids, max_tokens=length, salt=SALT, **more)
                )
    rank.assert_idle()
    assert failed <= faults.keys()
    for number, (prompt, n, length) in enumerate(jobs):
        name = f"r{number}"
        position, faulty, how = faults.get(name, (10**6, -1, ""))
        before = max(0, position + 1 - len(prompt))
        for branch in range(n):
            whole, found = answer_of(prompt, length, branch), told(rank, name, branch)
            assert found == whole[: len(found)]
            assert len(found) == length or name in failed
            assert branch != faulty or position < len(prompt) - 1 or len(found) <= before
        if how and (how == "lacks" or position >= len(prompt)) and before < length:
            assert name in failed
            assert told(rank, name, faulty) == answer_of(prompt, before, faulty)
