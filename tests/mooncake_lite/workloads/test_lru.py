"""LRU caches of all sizes at once, against one size after the other."""

from __future__ import annotations

from random import Random

import pytest

from mooncake_lite.workloads.lru import lru_curve
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import Trace, TraceRequest
from tests.mooncake_lite.workloads.made import made_trace

pytestmark = pytest.mark.quick


def trace_of(*prompts: list[int]) -> Trace:
    return Trace([TraceRequest(0, 512 * len(ids), 1, ids) for ids in prompts])


def test_the_curve_of_a_small_trace_by_hand() -> None:
    """Before the last prompt, 1 was used last, then 4, 5, 2, 3: a prompt begins with what was used last.

    The third prompt is there as a whole in three blocks, but for the token that is always computed.
    """
    curve = lru_curve(trace_of([1, 2, 3], [4, 5], [1], [1, 2, 3, 6]))
    assert (curve.blocks.tolist(), curve.tokens.tolist()) == ([1, 3, 4, 5], [512, 1023, 1535, 2047])
    assert [curve.tokens_at(blocks) for blocks in (0, 1, 2, 3, 99)] == [0, 512, 512, 1023, 2047]
    assert (curve.blocks_for(0.25), curve.blocks_for(0.5), curve.blocks_for(1)) == (1, 4, 5)
    assert lru_curve(trace_of([1], [2])).blocks.tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_each_size_has_what_a_cache_of_this_size_has(seed: int) -> None:
    """Also where answers fill blocks, and where ids come back behind others."""
    dice, trace = Random(seed), made_trace(100)
    if seed:
        answers = [[1_000 + dice.randrange(40) for _ in range(dice.randrange(3))] for _ in trace.requests]
        trace = Trace(trace.requests, answers=answers)
    if seed == 2:
        prompts = [[dice.randrange(30) for _ in range(dice.randrange(1, 9))] for _ in range(200)]
        trace = trace_of(*prompts)
    curve = lru_curve(trace)
    for blocks in (*range(0, 40, 3), 80, 200, 10_000):
        assert curve.tokens_at(blocks) == sum(cached_tokens(trace, blocks)), blocks


def test_the_knee_is_where_the_mean_block_adds_more_than_the_next_one() -> None:
    """Of two prompts of 4 and 100 blocks, the short one comes back ten times and the long one once."""
    short, long = [0, 1, 2, 3], [*range(10, 110)]
    curve = lru_curve(trace_of(*[short] * 10, long, short, long))
    assert (curve.knee, int(curve.blocks[-1])) == (4, 104)
