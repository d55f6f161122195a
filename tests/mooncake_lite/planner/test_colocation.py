"""Two kinds of nodes, or nodes that do both: closed forms beside simulations, and relations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from mooncake_lite.planner.colocation import CHUNKS, both_keep, split_speed, ways_of
from mooncake_lite.planner.first import First, highest
from mooncake_lite.planner.jobs import jobs_of, prompt_load
from mooncake_lite.planner.limits import Limit
from mooncake_lite.planner.simulate import simulate
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import sped
from mooncake_lite.workloads.traces import Trace, TraceRequest

CLUSTER = Cluster(profile=named_profile(PAPER_MACHINES), nodes={"prefill": 1, "decode": 1})
TTFT, TBT = Limit(2.0, 0.9), Limit(0.2, 0.9)


def talk(requests: int, rate: float) -> Trace:
    """Short prompts, nothing to reuse."""
    dice, now, found = Random(3), 0.0, list[TraceRequest]()
    for number in range(requests):
        now += dice.expovariate(rate)
        found.append(TraceRequest(now * 1e3, dice.randint(100, 400), dice.randint(50, 150), [number]))
    return Trace(found)


WORKLOADS = {
    "talk": (talk(500, 12.0), 2, 512),
    "rag": (made(KINDS["rag"], 300, 4.0, 5), 4, 0),
    "unique": (made(KINDS["unique"], 300, 3.0, 5), 5, 0),
}
"""name -> requests, nodes, and the chunk that nodes which do both would take"""


def first_of(trace: Trace) -> First:
    return First(CLUSTER, jobs_of(trace), TTFT, TBT)


@pytest.mark.parametrize("name", WORKLOADS)
def test_simulations_agree_about_which_way_is_better(name: str) -> None:
    """Between both rates of the closed forms, the better way keeps the limits, and the other one does not."""
    trace, nodes, chunk = WORKLOADS[name]
    ways = ways_of(first_of(trace), nodes)
    both, _ = next(iter(ways.both.values()))
    assert (both > ways.split_rps) == (name == "talk")
    rate = (both * ways.split_rps) ** 0.5
    fast = sped(trace, rate / jobs_of(trace).rate)
    colocated = replace(
        CLUSTER, mode="colocated", nodes={"compute": nodes}, node_bytes=0, sharing="hash",
        batched_tokens=chunk, policy="least-loaded",
    )  # fmt: skip
    ratios = [{"prefill": one, "decode": nodes - one} for one in range(1, nodes)]
    kept = [simulate(replace(CLUSTER, nodes=one), fast, TTFT, TBT)[0].keeps(TTFT, TBT) for one in ratios]
    assert any(kept) == (name != "talk")
    assert simulate(colocated, fast, TTFT, TBT)[0].keeps(TTFT, TBT) == (name == "talk")


@pytest.mark.quick
@pytest.mark.parametrize("name", WORKLOADS)
def test_more_of_anything_that_serves_carries_no_lower_rate(name: str) -> None:
    trace, nodes, _ = WORKLOADS[name]
    first = first_of(trace)
    roomy = First(CLUSTER, first.jobs, Limit(4.0, 0.9), Limit(0.4, 0.9))
    assert split_speed(first, nodes) <= split_speed(first, nodes + 1)
    assert split_speed(first, nodes) <= split_speed(roomy, nodes)
    for chunk in CHUNKS:
        here = highest(lambda speed: both_keep(first, nodes, chunk, speed))  # noqa: B023
        assert here <= highest(lambda speed: both_keep(first, nodes + 1, chunk, speed))  # noqa: B023
        assert here <= highest(lambda speed: both_keep(roomy, nodes, chunk, speed))  # noqa: B023


@pytest.mark.quick
def test_what_is_said_to_turn_a_comparison_turns_it() -> None:
    first = first_of(WORKLOADS["rag"][0])
    ways = ways_of(first, 4)

    def splits(other: First) -> bool:
        found = ways_of(other, 4)
        both, _ = next(iter(found.both.values()))
        return found.split_rps > both

    assert splits(first)
    longer = ways.turns["output_tokens"]
    assert longer is not None
    jobs = first.jobs
    answer = (jobs.answer * longer / jobs.answer.mean()).astype(int).clip(1)
    assert not splits(first.like(replace(jobs, answer=answer)))
    link = ways.turns["link_gbps"]
    assert link is not None
    assert not splits(first.like(jobs, replace(CLUSTER, link_bytes_per_s=link * 1e9 / 8)))
    assert splits(first.like(jobs, replace(CLUSTER, link_bytes_per_s=2 * link * 1e9 / 8)))


@pytest.mark.quick
def test_without_a_pool_prompts_wait_for_the_link_into_a_node() -> None:
    """No rate is said at which one link would move more than it can, whatever the limits are."""
    jobs = jobs_of(WORKLOADS["rag"][0])
    roomy, fast = Limit(1e4, 0.9), 0.0
    for gbps in (10, 20, 60, 600):
        cluster = replace(CLUSTER, mode="split", link_bytes_per_s=gbps * 1e9 / 8)
        mean_bytes = jobs.tokens.mean() * cluster.layout.nbytes / cluster.block_tokens
        rate = jobs.rate * highest(partial(First(cluster, jobs, roomy, roomy).decodes_keep, 1))
        assert fast <= rate <= gbps * 1e9 / 8 / mean_bytes
        fast = rate
    assert rate > 1.5 * jobs.rate


@pytest.mark.quick
def test_without_limits_a_node_that_does_both_is_busy_with_passes_and_sequences() -> None:
    """Whole prompts: a request takes one mixed pass, and what its answer adds to passes of others."""
    roomy = replace(CLUSTER, kv_bytes=10**16)
    jobs = jobs_of(made(KINDS["rag"], 300, 4.0, 5))
    first = First(roomy, jobs, Limit(1e6, 0.9), Limit(1e5, 0.9))
    compute, decode, overhead_s = CLUSTER.profile.compute, CLUSTER.costs.decode, CLUSTER.overheads.step_s
    each_s = 0.0
    for tokens, cached, answer in zip(jobs.tokens.tolist(), jobs.cached.tolist(), jobs.answer.tolist()):
        load = prompt_load(tokens, cached)
        each_s += compute.fit.seconds(load) * compute.time_scale + overhead_s
        each_s += (answer - 1) * (decode.per_sequence_s + decode.per_key_s * (tokens + answer / 2))
    speed = highest(lambda speed: both_keep(first, 2, CHUNKS[-1], speed))
    assert speed * jobs.rate == pytest.approx(2 * len(jobs) / each_s, rel=0.02)
