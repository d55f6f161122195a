"""Rescaled traces: requests share what they shared, and arrive in the order in which they arrived."""

from __future__ import annotations

from itertools import combinations, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lite.errors import ConfigError
from mooncake_lite.workloads.rescale import divided, sped, spread
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace, TraceRequest
from tests.mooncake_lite.workloads.made import made_trace

pytestmark = pytest.mark.quick

DIVISORS = [2**n for n in range(10)]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that continue full blocks of earlier ones. A partial one has an id of its own."""
    fresh, made = 0, list[TraceRequest]()
    for number in range(draw(st.integers(1, 6))):
        ids: list[int] = []
        if made and draw(st.booleans()):
            other = draw(st.sampled_from(made))
            ids = other.hash_ids[: draw(st.integers(0, other.input_length // BLOCK_TOKENS))]
        more = draw(st.integers(1, 4))
        ids = [*ids, *range(fresh, fresh + more)]
        fresh += more
        length = BLOCK_TOKENS * (len(ids) - 1) + draw(st.integers(1, BLOCK_TOKENS))
        made.append(TraceRequest(3000.0 * (number // 2), length, draw(st.integers(0, 2000)), ids))
    return Trace(made)


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Leading ids that two requests share."""
    pairs = zip(one.hash_ids, other.hash_ids)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def prefixes(trace: Trace) -> dict[int, set[tuple[int, ...]]]:
    """id -> the prefixes that it ends, as (ids, tokens)."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for request in trace.requests:
        for place, item in enumerate(request.hash_ids, 1):
            tokens = min(request.input_length, place * trace.block_tokens)
            found.setdefault(item, set()).add((*request.hash_ids[:place], tokens))
    return found


@given(trace=traces(), by=st.sampled_from(DIVISORS))
def test_a_divided_trace_shares_the_prefixes_that_it_shared(trace: Trace, by: int) -> None:
    small = divided(trace, by)
    assert small.block_tokens * by == BLOCK_TOKENS
    for one, other in zip(trace.requests, small.requests):
        assert len(other.hash_ids) == -(-other.input_length // small.block_tokens)
        assert other.input_length - 1 < one.input_length / by + 1
        assert other.output_length == max(1, round(one.output_length / by))
    for pair, small_pair in zip(combinations(trace.requests, 2), combinations(small.requests, 2)):
        assert shared(*pair) == shared(*small_pair)
    assert all(len(each) == 1 for each in prefixes(trace).values())
    assert all(len(each) == 1 for each in prefixes(small).values())


@pytest.mark.parametrize("by", [64, 128, 256])
def test_a_later_prompt_still_continues_the_answer_that_it_continued(by: int) -> None:
    """The partial third block of the first prompt is full after its answer, as block 900."""
    first, later = TraceRequest(0, 1025, 900, [5, 300, 301]), TraceRequest(9, 2048, 1, [5, 300, 900, 1200])
    small = divided(Trace([first, later], answers=[[900], []]), by)
    assert [*small.requests[0].hash_ids[:2], *small.answers[0]] == small.requests[1].hash_ids[:3]
    assert small.requests[0].hash_ids[2] not in small.requests[1].hash_ids


def test_a_full_block_stays_full_and_a_rest_is_rounded_up() -> None:
    trace = Trace([TraceRequest(0, 1024, 343, [1, 2]), TraceRequest(0, 1025, 0, [1, 2, 3])])
    assert [(one.input_length, one.output_length) for one in divided(trace, 16).requests] == [
        (64, 21),
        (65, 1),
    ]
    assert divided(trace, 1).requests[0] == trace.requests[0]


@pytest.mark.parametrize("by", [0, -2, 3, 1024])
def test_a_divisor_that_would_cut_a_block_is_refused(by: int) -> None:
    with pytest.raises(ConfigError, match=f"divided by {by}: take a divisor of 512"):
        divided(made_trace(3), by)


def test_arrivals_are_spread_over_their_tick_in_their_order() -> None:
    trace = made_trace(101)
    loose = spread(trace, 7)
    assert spread(trace, 7) == loose != spread(trace, 8)
    assert [one.hash_ids for one in loose.requests] == [one.hash_ids for one in trace.requests]
    times = [one.timestamp for one in loose.requests]
    assert times == sorted(set(times))
    assert [time // 3000 for time in times] == [one.timestamp // 3000 for one in trace.requests]


def test_a_faster_trace_has_its_arrivals_closer_together() -> None:
    trace = made_trace(9)
    assert [one.timestamp for one in sped(trace, 1.5).requests] == [0, 0, 0, 0, 2000, 2000, 2000, 2000, 4000]
    for speed in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="cannot be played at speed"):
            sped(trace, speed)
