"""`simulate cluster`: the tiers and copies of the pool work in worlds that write no bytes."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.traces import Trace, TraceRequest

pytestmark = pytest.mark.quick

PROFILE = named_profile("LLaMA3-70B-8xA800")
BLOCK = 160 * 2**20
"""Bytes of 512 tokens."""


def cluster(nodes: str = "1P1D", **fields: Any) -> Cluster:
    counts = {"prefill": int(nodes[0]), "decode": int(nodes[2])}
    return Cluster(profile=PROFILE, nodes=counts, **fields)


def conversations(turns: int, users: int, gap_s: float = 3.0, blocks: int = 4) -> Trace:
    """Users take turns; each prompt repeats the user's last one, and has `blocks` blocks more."""
    made = []
    for number in range(turns * users):
        turn, user = divmod(number, users)
        ids = [user * 10_000 + block for block in range((turn + 1) * blocks)]
        made.append(TraceRequest(number * gap_s * 1000, 512 * len(ids) + 100, 2, [*ids, 10**7 + number]))
    return Trace(made)


def played(cluster: Cluster, trace: Trace) -> Outcome:
    return play(cluster, TraceSource(trace), 1)


def test_a_block_that_dram_has_no_space_for_is_reused_from_ssd() -> None:
    """Six users with twelve blocks each, and DRAM for twenty blocks."""
    trace, small = conversations(turns=3, users=6), 20 * BLOCK + 2**20
    without = played(cluster(node_bytes=small), trace)
    with_ssd = played(cluster(node_bytes=small, ssd_bytes=10**13, ssd_bytes_per_s=20e9), trace)
    unlimited = played(cluster(), trace)
    assert with_ssd.reused["ssd"] > 0
    assert sum(without.reused.values()) < sum(with_ssd.reused.values()) == sum(unlimited.reused.values())


def test_where_nothing_is_evicted_an_ssd_changes_no_hit() -> None:
    trace = conversations(turns=3, users=4)
    assert played(cluster(ssd_bytes=10**13), trace).reused == played(cluster(), trace).reused


def test_blocks_that_a_node_reads_from_another_one_again_and_again_are_copied_to_it() -> None:
    shared = list(range(8))
    requests = [TraceRequest(n * 150.0, 8 * 512 + 100, 2, [*shared, 100 + n]) for n in range(40)]
    outcome = played(cluster("2P1D"), Trace(requests))
    assert outcome.copies[2] == 8
