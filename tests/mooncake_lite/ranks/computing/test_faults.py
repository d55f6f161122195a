"""What a rank tells of a request that cannot be computed: its failure, once, with a code, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.ranks.computing.machine import NewTerm
from scheduler.instance import DECODE, PREFILL
from scheduler.instance.step import ENGINE_ERROR, LOGITS_NOT_FINITE
from tests.mooncake_lite.ranks.computing.test_machine import ABOUT, CANCEL, Rank, decode, prefill, serve
from tests.scheduler.instance.test_faults import answer_of, behind, over

pytestmark = pytest.mark.quick

TOKENS = [*range(14)]


def order_of(rank: Rank, duties: tuple[str, ...], n: int) -> m.Start:
    """An order for n answers to a prompt of 14 tokens."""
    if duties == (PREFILL,):
        return prefill(TOKENS, [], store=4, n=n)
    if duties == (DECODE,):
        return rank.decode([*TOKENS, answer_of(TOKENS, 1)[0]], answered=1)
    return serve(TOKENS, [], n=n, max_tokens=8)


def about(message: Any) -> Any:
    """The request that a message is about; None for other messages."""
    event = message.event if isinstance(message, m.Report) else message
    return getattr(event, "request_id", None)


@pytest.mark.parametrize("code", [ENGINE_ERROR, LOGITS_NOT_FINITE])
@pytest.mark.parametrize(
    ("duties", "n", "position"),
    [
        ((PREFILL,), 1, 13),
        ((PREFILL,), 3, 13),
        ((DECODE,), 1, 16),
        ((PREFILL, DECODE), 1, 13),
        ((PREFILL, DECODE), 3, 13),
        ((PREFILL, DECODE), 1, 17),
        ((PREFILL, DECODE), 3, 17),
    ],
)
def test_a_request_that_cannot_be_computed_is_told_of_once_and_its_rank_has_forgotten_it(
    code: str, duties: tuple[str, ...], n: int, position: int
) -> None:
    branch = n - 1 if position >= len(TOKENS) else None
    how: dict[str, Any] = {"raises": over(position, branch)}
    if code == LOGITS_NOT_FINITE:
        how = {"lacks": behind(position, n - 1)}
    rank = Rank(*duties, **how)
    rank.hear(order_of(rank, duties, n), *[decode("b", [7], [], attempt=0)] * (DECODE in duties))
    failed = rank.until(m.RequestFailed)
    assert failed == m.RequestFailed(*ABOUT, failed.reason, False, True, code)
    tokens = [one for one in rank.all(m.Tokens) if about(one) == "a"]
    for number in range(n):
        got = [token for one in tokens if one.branch == number for token in one.token_ids]
        whole = answer_of(TOKENS, position + 1 - len(TOKENS), number)
        assert got == whole[duties == (DECODE,) :]

    before = len(rank.told)
    listed = rank.hear(CANCEL, m.ListOpen(2, 7))
    assert ("a", 3) not in next(one for one in listed if isinstance(one, m.OpenListed)).work
    while rank.machine.state.busy:
        rank.hear()
    assert not [one for one in rank.told[before:] if about(one) == "a"]
    assert [one.request_id for one in rank.all(m.DecodeEnded)] == ["b"] * (DECODE in duties)


@pytest.mark.parametrize("problem", ["", "the line is cut"])
def test_a_request_is_open_and_its_failure_is_not_told_before_its_blocks_have_left(problem: str) -> None:
    flies = True
    rank = Rank(PREFILL, ends=lambda: not flies, breaks=lambda: problem, raises=over(13))
    rank.hear(prefill(TOKENS, [], store=4))
    for _ in range(6):
        rank.hear()
    assert (rank.all(m.RequestFailed), bool(rank.model.flying_halves)) == ([], True)
    (listed,) = rank.hear(CANCEL, m.ListOpen(2, 7))
    assert listed.work == [("a", 3)]
    flies = False
    failed = rank.until(m.RequestFailed)
    assert (failed.code, failed.for_good, failed.may_still_write) == (ENGINE_ERROR, True, bool(problem))
    assert rank.hear(m.ListOpen(2, 8)) == [m.OpenListed(2, 5, 8, [])]


def test_a_new_conductor_is_joined_when_the_blocks_of_a_job_at_fault_have_left_and_hears_of_none() -> None:
    flies = True
    rank = Rank(PREFILL, ends=lambda: not flies, raises=over(13))
    rank.hear(prefill(TOKENS, [], store=4))
    for _ in range(6):
        rank.hear()
    assert rank.hear(NewTerm(6)) == []
    assert rank.hear() == []
    flies = False
    told = [one for _ in range(3) for one in rank.hear()]
    assert [(type(one), one.epoch) for one in told] == [(m.RankHello, 6), (m.PagesChanged, 6)]
    rank.model.raises = lambda chunk: False
    rank.hear(prefill(TOKENS, [], store=4, attempt=4))
    assert rank.until(m.PrefillEnded).event.attempt == 4


@pytest.mark.parametrize("n", [1, 3])
def test_a_new_conductor_is_joined_at_once_after_an_answer_has_failed(n: int) -> None:
    rank = Rank(PREFILL, DECODE, lacks=behind(16, n - 1))
    rank.hear(serve(TOKENS, [], n=n, max_tokens=8, salt=b""))
    rank.until(m.RequestFailed)
    assert [(type(one), one.epoch) for one in rank.hear(NewTerm(6))] == [
        (m.RankHello, 6),
        (m.PagesChanged, 6),
    ]
