"""The replay counts as the paper's table does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake_lite.simulator.replay import prefill_s, replay, workload_of
from mooncake_lite.workloads.traces import Trace, TraceRequest, read_trace
from store.policies import NAMES, policy_factory
from tests.mooncake_lite.workloads.made import made_trace

VARIABLE = "MOONCAKE_LITE_TRACES"
PUBLISHED = {
    False: {1_000: 0.0445, 10_000: 0.2112, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637, 10**9: 0.3664},
    True: {1_000: 0.0468, 10_000: 0.2242, 30_000: 0.3447, 50_000: 0.3710, 100_000: 0.3795, 10**9: 0.3819},
}
"""complete blocks only -> blocks of the pool -> share of hits of the public conversation trace, LRU."""


def trace_of(*prompts: list[int], length: int | None = None) -> Trace:
    return Trace([TraceRequest(float(n), length or 512 * len(ids), 1, ids) for n, ids in enumerate(prompts)])


@pytest.mark.quick
def test_a_small_trace_gives_the_hits_that_were_counted_by_hand() -> None:
    workload = workload_of(trace_of([1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [5, 7]))
    # unbounded: 0, then 1 2, then 0, then 1 2 3, then 5
    unbounded = replay(workload, policy_factory("lru")(100), 100)
    assert (unbounded.hits, unbounded.by_request) == (6, [0, 2, 0, 3, 1])
    # 4 blocks: 1 2 hit; 5 6 push out 3 and 1; then every block pushes out the one wanted next
    counted = replay(workload, policy_factory("lru")(4), 4)
    assert (counted.hits, counted.misses, counted.evictions, counted.references) == (2, 11, 7, 13)
    assert counted.hit_rate == 2 / 13


@pytest.mark.quick
def test_a_block_behind_a_missing_one_is_refreshed_and_no_hit() -> None:
    """2 is there when its prompt comes back, but 1 in front of it is not."""
    workload = workload_of(trace_of([1, 2], [3], [1, 2]))
    counted = replay(workload, policy_factory("lru")(2), 2)
    assert (counted.hits, counted.misses) == (0, 5)
    counted = replay(workload, policy_factory("lfu")(3), 3)
    assert counted.hits == 2


@pytest.mark.quick
def test_partial_last_blocks_are_left_out_altogether() -> None:
    trace = trace_of([1, 2], [1, 2], length=700)
    assert workload_of(trace).references == 4
    complete = workload_of(trace, complete_only=True)
    assert (complete.references, complete.order(), set(complete.facts)) == (2, [1, 1], {1})


@pytest.mark.quick
def test_policies_are_told_what_a_block_costs_and_what_it_hangs_on() -> None:
    """FAST'25: 8k tokens take 1.00 s, 128k take 27.52; the fit is within 2 %."""
    assert prefill_s(8192) == pytest.approx(1.00, rel=0.02)
    assert prefill_s(131072) == pytest.approx(27.52, rel=0.02)
    facts = workload_of(trace_of([4, 5, 6])).facts
    assert [(facts[i].parent, facts[i].position) for i in (4, 5, 6)] == [(None, 0), (4, 1), (5, 2)]
    assert sum(facts[i].cost_s for i in (4, 5, 6)) == pytest.approx(prefill_s(3 * 512))
    assert facts[6].cost_s > facts[5].cost_s > facts[4].cost_s


@pytest.mark.quick
def test_progress_adds_up_to_all_references() -> None:
    told: list[int] = []
    workload = workload_of(made_trace())
    replay(workload, policy_factory("lru")(10), 10, told.append)
    assert sum(told) == workload.references
    assert len(told) > 1


KNOWN = {
    "lru": (0.1954, 0.3542),
    "lfu": (0.2303, 0.4339),
    "length": (0.2211, 0.2941),
    "s3fifo": (0.2108, 0.4324),
    "sieve": (0.2103, 0.4339),
    "arc": (0.217, 0.4607),
    "gdsf": (0.1902, 0.4021),
    "wtinylfu": (0.2211, 0.4396),
    "leaves-first": (0.2139, 0.3676),
    "learned": (0.2226, 0.4283),
    "belady": (0.3835, 0.5357),
}
"""policy -> share of hits of the made-up trace, 20 and 80 blocks."""


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_a_made_up_trace_has_a_known_table(name: str) -> None:
    workload = workload_of(made_trace())
    shares = []
    for blocks in (20, 80):
        policy = policy_factory(name, workload.order())(blocks)
        shares.append(round(replay(workload, policy, blocks).hit_rate, 4))
        policy.check()
    assert tuple(shares) == KNOWN[name]


def test_lru_gives_the_published_table_of_the_public_trace_to_four_digits() -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} does not say where conversation_trace.jsonl is")
    trace = read_trace(Path(folder) / "conversation_trace.jsonl")
    assert (len(trace.requests), sum(len(r.hash_ids) for r in trace.requests)) == (12_031, 288_500)
    for complete_only, row in PUBLISHED.items():
        workload = workload_of(trace, complete_only=complete_only)
        found = {
            blocks: round(replay(workload, policy_factory("lru")(blocks), blocks).hit_rate, 4)
            for blocks in row
        }
        assert found == row
