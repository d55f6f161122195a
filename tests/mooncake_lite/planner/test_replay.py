"""Replays of queues: beside the simulator, which nobody wrote for this, and by relations."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mooncake_lite.planner.batch import Batch
from mooncake_lite.planner.jobs import prompt_load
from mooncake_lite.planner.pool import Pages, Pool
from mooncake_lite.planner.replay import Replayed, replay
from mooncake_lite.planner.search import with_nodes
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import divided, sped
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import Trace, TraceRequest
from scheduler.costs import DecodeCost

CLUSTER = Cluster(profile=named_profile(PAPER_MACHINES), nodes={"prefill": 2, "decode": 2})
SPLIT = replace(CLUSTER, mode="split", sharing="hash")


def workload(kind: str, requests: int, rate: float, seed: int = 5) -> Trace:
    return made(KINDS[kind], requests, rate, seed)


def near(found: np.ndarray, wanted: np.ndarray, part: float, s: float = 0.02) -> None:
    """Assert that mean and 90th percentile are within a part, or 20 ms."""
    for figure in (np.mean, lambda values: np.quantile(values, 0.9)):
        assert float(figure(found)) == pytest.approx(float(figure(wanted)), rel=part, abs=s)


@pytest.mark.parametrize(
    ("kind", "rate", "prefills", "decodes"),
    [("rag", 3.0, 2, 2), ("code", 9.0, 3, 1), ("unique", 2.0, 3, 2), ("viral", 3.0, 3, 1)],
)
def test_a_replay_is_what_the_simulator_plays(kind: str, rate: float, prefills: int, decodes: int) -> None:
    """At loads of 0.3 to 0.8. They share links and passes, and neither queues nor batches."""
    cluster, trace = with_nodes(CLUSTER, (prefills, decodes)), workload(kind, 300, rate)
    played, outcome = replay(cluster, trace), play(cluster, TraceSource(trace), 0)
    records = outcome.records
    near(played.ttft_s, np.array([one.ttft_s for one in records]), 0.1)
    near(played.tpot_s, np.array([one.tpot_s for one in records]), 0.05, 0.001)
    near(played.tbt_s, np.array([one.tbt_s for one in records]), 0.1, 0.002)
    assert int(played.cached.sum()) == pytest.approx(outcome.reused["dram"], rel=0.03)
    assert played.far_bytes == pytest.approx(outcome.bytes_moved["far"], rel=0.15)


def test_a_replay_is_what_the_simulator_plays_where_a_shared_prefix_takes_seconds_to_compute() -> None:
    """Four times the default model's passes: each prompt that computes the prefix again delays all others."""
    profile = named_profile("SmolLM2-135M-Instruct")
    slow = msgspec.structs.replace(profile.compute, time_scale=4.0)
    trace = divided(workload("code", 100, 2.2, 4), 4)
    cluster = Cluster(
        profile=profile.with_section("compute", slow), nodes={"prefill": 2, "decode": 2}, together=True,
        block_tokens=trace.block_tokens, node_bytes=2 << 30, kv_bytes=2 << 30,
    )  # fmt: skip
    played, outcome = replay(cluster, trace), play(cluster, TraceSource(trace), 0)
    near(played.ttft_s, np.array([one.ttft_s for one in outcome.records]), 0.02, 0.0)
    assert int(played.cached.sum()) == outcome.reused["dram"]


@pytest.mark.parametrize(
    ("kind", "rate", "prefills", "decodes"),
    [("rag", 3.0, 2, 2), ("code", 9.0, 3, 2), ("unique", 2.0, 3, 2), ("viral", 3.0, 3, 2)],
)
def test_a_replay_of_mode_split_is_what_the_simulator_plays(
    kind: str, rate: float, prefills: int, decodes: int
) -> None:
    """Prefixes are found in the own pages of a node alone, and all KV goes to the node that decodes."""
    cluster, trace = with_nodes(SPLIT, (prefills, decodes)), workload(kind, 300, rate)
    played, outcome = replay(cluster, trace), play(cluster, TraceSource(trace), 0)
    records = outcome.records
    near(played.ttft_s, np.array([one.ttft_s for one in records]), 0.1)
    near(played.tpot_s, np.array([one.tpot_s for one in records]), 0.05, 0.001)
    near(played.tbt_s, np.array([one.tbt_s for one in records]), 0.1, 0.002)
    assert int(played.cached.sum()) == pytest.approx(outcome.reused.get("pages", 0), rel=0.03)
    assert played.far_bytes == pytest.approx(outcome.bytes_moved["far"], rel=0.01)


def test_few_pages_reuse_less_in_a_replay_of_mode_split_as_in_the_simulator() -> None:
    small = replace(with_nodes(SPLIT, (2, 2)), kv_bytes=150 * CLUSTER.layout.nbytes)
    trace = workload("rag", 300, 2.0)
    played, outcome = replay(small, trace), play(small, TraceSource(trace), 0)
    assert int(played.cached.sum()) == pytest.approx(outcome.reused["pages"], rel=0.1)
    assert played.cached.sum() < 0.9 * replay(with_nodes(SPLIT, (2, 2)), trace).cached.sum()


def test_links_that_are_slow_make_a_replay_slow_as_they_do_the_simulator() -> None:
    cluster = replace(with_nodes(CLUSTER, (2, 2)), link_bytes_per_s=2e9)
    trace = workload("rag", 200, 1.5)
    played, records = replay(cluster, trace), play(cluster, TraceSource(trace), 0).records
    near(played.tpot_s, np.array([one.tpot_s for one in records]), 0.1, 0.002)
    fast = replay(with_nodes(CLUSTER, (2, 2)), trace)
    assert played.tpot_s.mean() > 1.2 * fast.tpot_s.mean()


def test_a_small_pool_reuses_less_in_a_replay_as_in_the_simulator() -> None:
    small = replace(with_nodes(CLUSTER, (2, 2)), node_bytes=60 * CLUSTER.layout.nbytes)
    trace = workload("rag", 300, 2.0)
    played, outcome = replay(small, trace), play(small, TraceSource(trace), 0)
    assert int(played.cached.sum()) == pytest.approx(outcome.reused["dram"], rel=0.15)
    assert played.cached.sum() < 0.8 * replay(with_nodes(CLUSTER, (2, 2)), trace).cached.sum()


@pytest.mark.parametrize("policy", ["random", "least-loaded", "global-cache"])
def test_a_policy_reuses_as_much_in_a_replay_as_in_the_simulator(policy: str) -> None:
    cluster, trace = replace(with_nodes(CLUSTER, (3, 2)), policy=policy), workload("rag", 200, 2.5)
    played, outcome = replay(cluster, trace), play(cluster, TraceSource(trace), 0)
    assert int(played.cached.sum()) == pytest.approx(outcome.reused["dram"], rel=0.05)
    near(played.ttft_s, np.array([one.ttft_s for one in outcome.records]), 0.1)


@pytest.fixture(scope="module")
def calm() -> tuple[Trace, Replayed]:
    trace = workload("rag", 250, 2.0)
    return trace, replay(with_nodes(CLUSTER, (4, 3)), trace)


@pytest.mark.quick
def test_unsaturated_more_of_what_serves_never_makes_first_tokens_later(calm: tuple[Trace, Replayed]) -> None:
    trace, played = calm
    for nodes in ((5, 3), (4, 4), (8, 6)):
        assert replay(with_nodes(CLUSTER, nodes), trace).ttft_s.mean() <= 1.01 * played.ttft_s.mean()
    faster = replace(with_nodes(CLUSTER, (4, 3)), link_bytes_per_s=1e12)
    assert replay(faster, trace).tpot_s.mean() <= 1.001 * played.tpot_s.mean()


@pytest.mark.quick
def test_a_doubled_rate_on_a_doubled_cluster_never_waits_longer() -> None:
    trace = workload("unique", 400, 1.5)
    once = replay(with_nodes(CLUSTER, (2, 2)), trace)
    twice = replay(with_nodes(CLUSTER, (4, 4)), sped(trace, 2.0))
    assert twice.ttft_s.mean() < once.ttft_s.mean()


@pytest.mark.quick
def test_a_replay_is_the_same_each_time_and_reuses_no_more_than_there_is(
    calm: tuple[Trace, Replayed],
) -> None:
    trace, played = calm
    again = replay(with_nodes(CLUSTER, (4, 3)), trace)
    assert again.ttft_s.tolist() == played.ttft_s.tolist()
    assert again.tbt_s.tolist() == played.tbt_s.tolist()
    assert (played.cached <= cached_tokens(trace)).all()
    assert played.cached.sum() > 0


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["least-loaded", "random", "round-robin", "local-cache", "global-cache"])
def test_every_policy_that_is_offered_can_be_replayed(policy: str, calm: tuple[Trace, Replayed]) -> None:
    trace, played = calm
    other = replay(replace(with_nodes(CLUSTER, (4, 3)), policy=policy), trace)
    assert other.cached.sum() <= 1.05 * played.cached.sum()
    assert other.ttft_s.min() > 0


@pytest.mark.quick
def test_an_answer_of_one_token_is_not_decoded() -> None:
    trace = workload("rag", 40, 2.0)
    requests = [type(one)(one.timestamp, one.input_length, 1, one.hash_ids) for one in trace.requests]
    played = replay(CLUSTER, Trace(requests))
    assert not played.tpot_s.any()
    assert not played.tbt_s.any()
    assert played.context == 0


@pytest.mark.quick
def test_a_pool_keeps_prefixes_on_their_nodes_and_lets_the_oldest_go() -> None:
    pool = Pool(2, 3)
    pool.put(0, [1, 2, 3])
    pool.put(0, [1, 2, 4])  # no space: on the other node
    assert pool.leading([1, 2, 4, 5]) == (3, {0: 2})
    assert pool.places([1, 4, 9], 1) == [0, 1, -1]
    pool.copy(1, [1, 2, 3])
    assert pool.leading([1, 2, 3]) == (3, {0: 3, 1: 2})
    assert pool.sources([1, 2, 3], 1) == {1: 2, 0: 1}
    pool.used([1, 2, 3], 0)
    pool.put(0, [7])  # both are full: in place of what the other node has, where nothing was used
    assert pool.places([7], 0) == [1]
    assert -1 not in pool.places([1, 2, 3], 0)
    full = Pool(1, 3)
    full.put(0, [1, 2, 3])
    full.put(0, [8])  # the end of a prefix goes first
    assert full.places([1, 2, 3, 8], 0) == [0, 0, -1, 0]


@pytest.mark.quick
def test_a_whole_prompt_in_pages_computes_its_last_block() -> None:
    """And the node that decodes has the other blocks in its pages by then."""
    ids = list(range(10))
    requests = [TraceRequest(at, 5_120, 3, ids) for at in (0.0, 60_000.0)]
    cluster = with_nodes(SPLIT, (1, 1))
    played = replay(cluster, Trace(requests))
    assert played.cached.tolist() == [0, 9 * 512]
    assert played.ttft_s[1] < 0.4 * played.ttft_s[0]
    assert played.tbt_s[1] < played.tbt_s[0]
    records = play(cluster, TraceSource(Trace(requests)), 0).records
    assert played.ttft_s.tolist() == pytest.approx([one.ttft_s for one in records], abs=0.003)
    assert played.tbt_s.tolist() == pytest.approx([one.tbt_s for one in records], abs=0.003)


@pytest.mark.quick
def test_pages_of_a_node_are_its_own() -> None:
    pages = Pages(2, 3)
    pages.put(0, [1, 2, 3])
    pages.put(1, [1, 2])
    assert pages.leading([1, 2, 3]) == (3, {0: 3, 1: 2})
    pages.used([1, 2], 0)
    pages.put(0, [8])  # the end of a prefix goes first, and the other node keeps what it has
    assert pages.leading([1, 2, 3]) == (2, {0: 2, 1: 2})
    assert pages.places([8, 1], 1) == [0, 1]


@pytest.mark.quick
def test_two_prompts_of_one_node_come_a_pass_and_a_slot_apart() -> None:
    requests = [
        TraceRequest(0.0, 5_000, 3, list(range(10))),
        TraceRequest(0.0, 5_000, 3, list(range(20, 30))),
    ]
    cluster = with_nodes(CLUSTER, (1, 1))
    first, second = replay(cluster, Trace(requests)).ttft_s.tolist()
    over, pass_s = cluster.overheads, pass_seconds(cluster.profile)(prompt_load(5_000, 0))
    assert first == pytest.approx(2 * over.message_s + pass_s + over.step_s + over.request_s)
    assert second - first == pytest.approx(pass_s + over.step_s + 2 * over.message_s)


@pytest.mark.quick
@pytest.mark.parametrize("together", [False, True])
def test_a_prompt_that_follows_at_once_does_not_find_the_blocks_of_the_one_before(together: bool) -> None:
    """A node is free when a pass ends; the conductor knows a moment later that the prompt is stored."""
    requests = [TraceRequest(ms, 1_100, 3, [0, 1, 2]) for ms in (0.0, 1.0, 2.0)]
    cluster = replace(with_nodes(CLUSTER, (1, 1)), together=together)
    played, outcome = replay(cluster, Trace(requests)), play(cluster, TraceSource(Trace(requests)), 0)
    assert played.cached.tolist() == [0, 0, 1_024]
    assert outcome.reused["dram"] == 1_024
    near(played.ttft_s, np.array([one.ttft_s for one in outcome.records]), 0.01)


@pytest.mark.quick
def test_a_batch_takes_the_steps_that_its_cost_says() -> None:
    """Two sequences: the second one's KV takes 0.25 s to load, and joins between two steps."""
    clock, told = Clock(), list[tuple[int, float]]()
    cost = DecodeCost(0.1, 0.01, 0.001)
    batch = Batch(
        clock, cost, 0.002, lambda request, done: clock.after(0.25, done),
        lambda request, seconds: told.append((request, round(seconds, 6))), [10, 20], [5, 3],
    )  # fmt: skip
    for request in (0, 1):
        batch.place(request)
        batch.on_stored(request)
    while clock.step():
        pass
    alone = [0.112 + 0.001 * context for context in (11, 12, 13)]
    both = 0.122 + 0.001 * (14 + 21)
    steps = [*alone, both, 0.112 + 0.001 * 22]
    assert batch.begun == {0: 0, 1: 3}
    assert np.diff(batch.ends_s(), prepend=0.25).tolist() == pytest.approx(steps)
    assert told == [(0, 0.25), (1, round(sum(alone), 6))]  # a load has come once a step ends
    assert batch.most_context == 14 + 21
    assert (batch.open, batch.open_tokens, batch.context) == (0, 0, 0)
