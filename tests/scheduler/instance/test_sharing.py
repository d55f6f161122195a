"""Sequences that share pages: prefixes inside a rank, and the branches of one prompt."""

from __future__ import annotations

import pytest

from scheduler.instance import DECODE, PREFILL, JobId, Limits
from scheduler.instance.outcomes import Computed, Ended, Failed, Loaded, Preempted, Prefilled, Token
from tests.scheduler.instance.model_runner import BLOCK, PAGE
from tests.scheduler.instance.rank import Rank, job
from tests.scheduler.instance.test_loads_and_stores import in_pool

pytestmark = pytest.mark.quick

BOTH = (PREFILL, DECODE)
SALT = b"weights"


def both(rank: Rank, name: str, tokens: range, **more: object) -> None:
    values = {"salt": SALT} | more
    rank.arrive(job(name, BOTH, tokens, **values))


def computed(rank: Rank, name: str) -> tuple[int, int]:
    """(prompt tokens computed, reused) of a request."""
    (one,) = [said for said in rank.said if isinstance(said, Computed) and said.job.request_id == name]
    return one.tokens, one.loaded


@pytest.mark.parametrize(("sharing", "reused"), [("off", 0), ("hash", 8), ("radix", 10)])
def test_a_prefix_that_lies_in_pages_is_not_computed_again(sharing: str, reused: int) -> None:
    rank = Rank(*BOTH, limits=Limits(64), sharing=sharing)
    both(rank, "first", range(11), max_tokens=1)
    rank.settle()
    both(rank, "again", range(13), max_tokens=1)
    rank.settle()
    assert computed(rank, "again") == (13 - reused, reused)
    assert [said.shared for said in rank.said if isinstance(said, Loaded)] == [0, reused]
    rank.assert_idle()


@pytest.mark.parametrize("sharing", ["hash", "radix"])
@pytest.mark.parametrize("salt", [b"another tenant", None])
def test_nothing_is_shared_with_another_salt_or_without_one(sharing: str, salt: bytes | None) -> None:
    rank = Rank(*BOTH, limits=Limits(64), sharing=sharing)
    both(rank, "first", range(11), max_tokens=1)
    rank.settle()
    both(rank, "again", range(11), max_tokens=1, salt=salt)
    rank.settle()
    assert computed(rank, "again") == (11, 0)


def test_blocks_that_lie_in_pages_are_not_read_from_the_pool() -> None:
    rank = Rank(PREFILL, limits=Limits(64), sharing="hash")
    rank.arrive(job("first", [PREFILL], range(9), salt=SALT))
    rank.settle()
    rank.arrive(job("again", [PREFILL], range(17), salt=SALT, load=in_pool(rank, range(16))))
    reads = []
    while rank.state.busy:
        reads += [place for read in rank.step()[0].reads for place in read.places]
    assert len(reads) == 2
    assert computed(rank, "again") == (1, 16)


def test_a_block_of_the_pool_is_not_written_into_pages_that_others_share() -> None:
    rank = Rank(PREFILL, limits=Limits(64), sharing="radix")
    rank.arrive(job("first", [PREFILL], range(BLOCK + PAGE + 1), salt=SALT))
    rank.settle()
    rank.arrive(job("again", [PREFILL], range(9), salt=SALT, load=in_pool(rank, range(8))))
    landed = []
    while rank.state.busy:
        landed += [page for land in rank.step()[0].lands for page in land.pages]
    assert len(landed) == BLOCK // PAGE
    assert not set(landed) & set(rank.state.prefix.match(*_chain_of(rank), BLOCK))


def _chain_of(rank: Rank) -> tuple[object, range]:
    from scheduler.instance.prefix import Chain

    return Chain(SALT), range(BLOCK + 1)


def test_idle_pages_are_evicted_when_a_job_needs_them() -> None:
    rank = Rank(*BOTH, num_pages=8, limits=Limits(64), sharing="hash")
    both(rank, "first", range(9), max_tokens=1)
    rank.settle()
    assert len(rank.state.pages.idle) == 4
    both(rank, "other", range(100, 113), max_tokens=1)
    rank.settle()
    both(rank, "first again", range(9), max_tokens=1)
    rank.settle()
    assert computed(rank, "first again")[1] < 8
    rank.assert_idle()


def test_two_sequences_that_compute_the_same_block_keep_one_copy() -> None:
    rank = Rank(*BOTH, limits=Limits(64, prefills=2), sharing="hash")
    both(rank, "a", range(9), max_tokens=5)
    both(rank, "b", range(9), max_tokens=5)
    rank.until(Token)
    a, b = (task.sequence.pages for task in rank.state.running)
    assert a[:4] == b[:4]
    assert a[4] != b[4]


# -------------------------------------------------------------------------------- branches


def test_a_prompt_is_computed_once_for_all_of_its_answers() -> None:
    rank = Rank(*BOTH, limits=Limits(64))
    both(rank, "a", range(9), n=3, max_tokens=4)
    rank.settle()
    assert computed(rank, "a") == (9, 0)
    ended = [said.job for said in rank.said if isinstance(said, Ended)]
    assert ended == [JobId("a", 0, branch) for branch in range(3)]
    tokens = [said.job.branch for said in rank.said if isinstance(said, Token)]
    assert [tokens.count(branch) for branch in range(3)] == [4, 4, 4]
    rank.assert_idle()


def test_branches_share_full_pages_and_copy_the_last_one_before_they_write() -> None:
    rank = Rank(*BOTH, limits=Limits(64))
    both(rank, "a", range(9), n=3, max_tokens=9)
    rank.until(Token)
    step, _ = rank.step()
    copies = [growth for growth in step.grow if growth.copies is not None]
    assert len(copies) == 2, "the last branch keeps the page itself"
    assert len({growth.copies for growth in copies}) == 1
    pages = [task.sequence.pages for task in rank.state.running]
    assert pages[0][:4] == pages[1][:4] == pages[2][:4]
    assert len({sequence[4] for sequence in pages}) == 3


def test_the_answer_of_a_branch_that_comes_alone_counts_for_its_pages_and_its_keys() -> None:
    rank = Rank(DECODE, num_pages=4, sharing="hash")
    alone = {"salt": SALT, "answers": [(1, range(4, 9))]}
    assert rank.arrive(job("long", [DECODE], range(4), **alone)) == [
        Failed(JobId("long", 0, 1), "5 KV pages are needed, the rank has 4", for_good=True)
    ]
    rank = Rank(DECODE, sharing="hash")
    rank.arrive(job("a", [DECODE], range(4), **alone))
    assert len(rank.state.waiting[0].chain.keys) == 9 // BLOCK


def test_a_prompt_that_ends_with_its_page_needs_no_copy() -> None:
    rank = Rank(*BOTH, limits=Limits(64))
    both(rank, "a", range(8), n=2, max_tokens=4)
    copied = []
    while rank.state.busy:
        copied += [growth for growth in rank.step()[0].grow if growth.copies is not None]
    assert copied == []


def test_one_branch_is_cancelled_alone() -> None:
    rank = Rank(*BOTH, limits=Limits(64))
    both(rank, "a", range(9), n=3, max_tokens=5)
    rank.until(Token)
    assert [said.job for said in rank.cancel("a", 0, 1)] == [JobId("a", 0, 1)]  # type: ignore[union-attr]
    rank.settle()
    finished = {said.job.branch: said.finish for said in rank.said if isinstance(said, Ended)}
    assert finished == {0: "finished", 1: "cancelled", 2: "finished"}


def test_a_branch_that_is_cancelled_before_its_prompt_is_computed_is_not_drawn() -> None:
    rank = Rank(*BOTH, limits=Limits(4))
    both(rank, "a", range(9), n=2, max_tokens=3)
    rank.step()
    assert [said.job for said in rank.cancel("a", 0, 0)] == [JobId("a", 0, 0)]  # type: ignore[union-attr]
    rank.settle()
    assert {said.job.branch for said in rank.said if isinstance(said, Token)} == {1}
    rank.assert_idle()


def test_all_branches_of_a_waiting_job_end_when_it_is_cancelled() -> None:
    rank = Rank(*BOTH)
    both(rank, "a", range(9), n=2)
    assert [said.job.branch for said in rank.cancel("a")] == [0, 1]  # type: ignore[union-attr]
    rank.assert_idle()


def test_a_prefill_rank_draws_a_token_for_each_branch_and_stores_the_prompt_once() -> None:
    rank = Rank(PREFILL, limits=Limits(64))
    rank.arrive(job("a", [PREFILL], range(6), n=3, store=[1, 2]))
    done = rank.until(Prefilled)
    drawn = [(said.job.branch, said.token) for said in rank.said if isinstance(said, Token)]
    assert drawn == list(enumerate(done.first_tokens))
    assert len(set(done.first_tokens)) == 3
    assert set(rank.pool) == {1, 2}


def test_a_decode_rank_loads_a_prompt_once_and_goes_on_with_each_branch() -> None:
    rank = Rank(DECODE)
    load = in_pool(rank, range(9))
    rank.arrive(job("a", [DECODE], range(9), load=load, answers=[(0, [40]), (2, [41])], max_tokens=3))
    rank.settle()
    assert sum(isinstance(said, Loaded) for said in rank.said) == 1
    assert {said.job.branch for said in rank.said if isinstance(said, Ended)} == {0, 2}
    first = next(said for said in rank.said if isinstance(said, Token))
    assert (first.job.branch, first.index) == (0, 1)
    rank.assert_idle()


def test_branches_that_share_their_last_page_need_a_page_for_each_but_one() -> None:
    rank = Rank(*BOTH, num_pages=6, limits=Limits(64))
    both(rank, "a", range(9), n=2, max_tokens=2)
    rank.settle()
    assert not any(isinstance(said, Preempted) for said in rank.said)
    rank.assert_idle()


def test_of_two_branches_that_lack_a_page_for_a_copy_one_keeps_the_page() -> None:
    rank = Rank(*BOTH, num_pages=5, limits=Limits(64))
    both(rank, "a", range(9), n=2, max_tokens=2)
    rank.settle()
    assert [said.job.branch for said in rank.said if isinstance(said, Preempted)] == [1]
    assert [said.job.branch for said in rank.said if isinstance(said, Ended)] == [0]
    rank.assert_idle()


def test_a_branch_that_lacks_a_page_goes_back_alone_with_its_answer() -> None:
    rank = Rank(*BOTH, num_pages=9, limits=Limits(64))
    both(rank, "a", range(9), n=2, max_tokens=8)
    preempted = rank.until(Preempted)
    assert preempted.job == JobId("a", 0, 1)
    assert list(preempted.token_ids[:9]) == list(range(9))
    assert len(preempted.token_ids) == 9 + preempted.answered
    assert rank.until(Ended).job == JobId("a", 0, 0)
    rank.assert_idle()
