"""Relations between runs: what must hold whatever the figures are.

Each is tested on a made trace, and in `make soak` on the public one too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest
from msgspec.structs import replace as changed

from mooncake_lite.profiles.costs import costs_of
from mooncake_lite.profiles.file import MovesSection, OverheadsSection
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.workloads.rescale import sped, spread
from mooncake_lite.workloads.traces import Trace
from tests.mooncake_lite.simulator.made import BLOCK, cluster, hits, played, traces

COUNT, RATE = 35, 1.0
"""Requests of a made trace, and how many come in a second."""

FAST_DISK = {"ssd_bytes": 10**13, "ssd_bytes_per_s": 20e9}


def blocks(count: int) -> int:
    """Return the bytes of DRAM that this many blocks need."""
    return count * (BLOCK + 4096)


def serial(trace: Trace) -> Trace:
    """Let each request come after the end of the one before."""
    at_ms, apart = 0.0, []
    for one in trace.requests:
        apart.append(changed(one, timestamp=at_ms))
        at_ms += 3_000 + 0.3 * one.input_length + 50 * one.output_length
    return Trace(apart)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("nodes", "fields"),
    [
        ("2P2D", {"node_bytes": blocks(150), **FAST_DISK}),
        ("2P1D", {"policy": "global-cache", "node_bytes": blocks(150)}),
        ("2C", {"mode": "colocated", "sharing": "hash", "node_bytes": 0}),
    ],
    ids=["pooled with SSD", "pooled", "colocated"],
)
def test_the_names_of_blocks_change_nothing(nodes: str, fields: dict[str, Any], soak: int) -> None:
    for trace in traces(soak, COUNT, RATE):
        ids = sorted({number for one in trace.requests for number in one.hash_ids})
        other = {number: 7 * place + 3 for place, number in enumerate(reversed(ids))}
        renamed = [
            changed(one, hash_ids=[other[number] for number in one.hash_ids]) for one in trace.requests
        ]
        first, second = (played(cluster(nodes, **fields), one) for one in (trace, Trace(renamed)))
        assert first.to_dict(30, 0.1) == second.to_dict(30, 0.1)


@pytest.mark.quick
def test_no_pool_has_more_hits_than_an_unlimited_one(soak: int) -> None:
    for trace in traces(soak, COUNT, RATE):
        apart = serial(trace)
        most = hits(played(cluster(node_bytes=10**16), apart))
        for fields in ({}, FAST_DISK, {"ssd_bytes": blocks(200)}):
            found = hits(played(cluster(node_bytes=blocks(300), **fields), apart))
            assert 0 < found <= most


@pytest.mark.quick
def test_one_node_that_prefills_has_more_hits_with_more_dram(soak: int) -> None:
    """LRU is a stack algorithm: what a pool holds, a larger one holds too."""
    for trace in traces(soak, COUNT, RATE):
        apart, longest = serial(trace), max(len(one.hash_ids) for one in trace.requests)
        found = [
            hits(played(cluster(node_bytes=blocks(longest * factor)), apart)) for factor in (2, 3, 5, 50)
        ]
        assert found == sorted(found)
        assert found[0] < found[-1] or soak > 1, "of this trace some blocks are evicted"


@pytest.mark.quick
def test_where_nothing_is_evicted_an_ssd_changes_no_hit(soak: int) -> None:
    for trace in traces(soak, COUNT, RATE):
        for nodes in ("1P1D", "2P1D"):
            without, with_ssd = (
                played(cluster(nodes, node_bytes=10**16, **fields), serial(trace))
                for fields in ({}, FAST_DISK)
            )
            assert without.reused == with_ssd.reused
            assert with_ssd.bytes_moved["disk"] > 0


def twice_as_fast(slow: Cluster) -> Cluster:
    """Halve all times of the machines."""
    profile = slow.profile
    costs = costs_of(profile)
    moves = MovesSection(
        None, costs.transfer.latency_s / 2, 2 * costs.transfer.far_bytes_per_s,
        2 * costs.load.dram_bytes_per_s, 2 * costs.load.ssd_bytes_per_s,
    )  # fmt: skip
    halved = OverheadsSection(
        *(getattr(slow.overheads, name) / 2 for name in OverheadsSection.__struct_fields__)
    )
    compute = changed(profile.compute, time_scale=profile.compute.time_scale / 2)
    for name, section in (("moves", moves), ("overheads", halved), ("compute", compute)):
        profile = profile.with_section(name, section)
    return replace(slow, profile=profile, ttft_s=slow.ttft_s / 2, tbt_s=slow.tbt_s / 2)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "off"), [("split", 1e-3), ("pooled", 0.02), ("colocated", 0.02)], ids=lambda one: str(one)
)
def test_everything_twice_as_fast_halves_all_times(mode: str, off: float, soak: int) -> None:
    """Nearly: long work is asked about after a fixed time, and the messages shift what is drawn later."""
    for trace in traces(soak, COUNT, RATE):
        slow = cluster("2P2D" if mode != "colocated" else "4C", mode=mode)
        first, second = played(slow, trace), played(twice_as_fast(slow), sped(trace, 2))
        for one, other in ((mean_ttft(first), mean_ttft(second)), (mean_end(first), mean_end(second))):
            assert one == pytest.approx(2 * other, rel=off)


def mean_ttft(outcome: Outcome) -> float:
    return outcome.mean_ttft_s


def mean_end(outcome: Outcome) -> float:
    ends = [one.token_times_s[-1] - one.arrived_s for one in outcome.records]
    return sum(ends) / len(ends)


MORE: dict[str, Callable[[Cluster], dict[str, Any]]] = {
    "nothing": lambda one: {},
    "DRAM": lambda one: {"node_bytes": one.node_bytes * 12 // 10},
    "links": lambda one: {"link_bytes_per_s": 1.25 * (one.link_bytes_per_s or 0)},
    "nodes": lambda one: {"nodes": {**one.nodes, "prefill": one.nodes["prefill"] + 1}},
}


@pytest.mark.parametrize("policy", ["global-cache", "kvcache-centric"])
def test_more_memory_links_or_nodes_are_not_worse(policy: str, soak: int) -> None:
    """Over five seeds: chance decides which of two nodes a request finds free, more so in a short trace."""
    for trace, (slower, fewer) in zip(traces(soak, 60, RATE), ((1.05, 0.02), (1.01, 0.003)), strict=False):
        few = cluster("3P3D", policy=policy, node_bytes=blocks(200), link_bytes_per_s=5e9)
        found = {}
        for name, more in MORE.items():
            runs = [played(replace(few, **more(few)), spread(trace, seed), seed) for seed in range(5)]
            ttfts_s = [record.ttft_s for run in runs for record in run.records]
            found[name] = median(ttfts_s), mean(map(hits, runs))
        ttft_s, rate = found["nothing"]
        worse = {
            name: one for name, one in found.items() if one[0] > slower * ttft_s or one[1] < rate - fewer
        }
        assert not worse, f"{worse}, and {ttft_s, rate} with fewer"


@pytest.mark.quick
def test_more_drafts_that_are_right_are_faster_and_none_is_as_without(soak: int) -> None:
    for trace in traces(soak, COUNT, RATE):
        apart = serial(trace)
        without, *found = [
            played(cluster("2P2D", acceptance=part), apart) for part in (0.0, 0.2, 0.5, 0.8, 1.0)
        ]
        ends = [mean_end(one) for one in (without, *found)]
        assert ends == sorted(ends, reverse=True)
        assert ends[-1] < 0.9 * ends[0]
        for one in found:
            assert one.mean_ttft_s == pytest.approx(without.mean_ttft_s, rel=0.01)
            lengths = [len(record.token_times_s) for record in one.records]
            assert lengths == [len(record.token_times_s) for record in without.records]
