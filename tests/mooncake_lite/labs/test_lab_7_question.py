"""Lab 7 asks why KVCache-centric is ahead of global cache-aware on slow links. It must be, by its copies.

FAST'25, section 4.2: hot prefixes are copied, so that no node becomes the one from which all others fetch.
"""

from __future__ import annotations

import random

import pytest

from mooncake_lite.labs.child import load
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.variant import sizes
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.rescale import sped
from mooncake_lite.workloads.traces import Trace
from tests.mooncake_lite.labs.trees import ROOT

LAB = lab_in(ROOT, 7)
PLAY = load(str(ROOT / LAB.folder / "play.py"))
DATA = load(str(ROOT / LAB.tests / "data.py"))
NODES = {"prefill": 4, "decode": 4}
SLOW = PLAY.LINKS["100 Gbps"]


def outcomes(seed: int, speed: float, requests: int | None, *policies: str) -> list[Outcome]:
    """Play the conversations of a class with these policies."""
    made = DATA.conversations(random.Random(f"{seed} conversations"), sizes(LAB, seed))
    trace = sped(Trace(made).first(requests), speed)
    clusters = [
        Cluster(profile=PLAY.PROFILE, nodes=NODES, policy=policy, link_bytes_per_s=SLOW)
        for policy in policies
    ]
    return [play(cluster, TraceSource(trace), 1) for cluster in clusters]


@pytest.mark.parametrize("seed", [1, 2])
def test_on_slow_links_copies_save_computing_and_time(seed: int) -> None:
    without, copying = outcomes(seed, PLAY.SPEED, 120, "global-cache", "kvcache-centric")
    assert copying.mean_ttft_s < 0.9 * without.mean_ttft_s
    assert (without.pool["copies_stored"], copying.pool["copies_stored"] > 0) == (0, True)
    assert copying.pool["puts_duplicate"] < without.pool["puts_duplicate"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kvcache_centric_wins_the_whole_trace_and_nearly_ties_while_links_are_idle(
    seed: int, soak: int
) -> None:
    if soak == 1:
        pytest.skip("plays five whole traces; make soak does it")
    local, without, copying = outcomes(
        seed, PLAY.SPEED, None, "local-cache", "global-cache", "kvcache-centric"
    )
    assert copying.mean_ttft_s < 0.9 * min(local.mean_ttft_s, without.mean_ttft_s)
    without, copying = outcomes(seed, 0.5, None, "global-cache", "kvcache-centric")
    assert without.mean_ttft_s == pytest.approx(copying.mean_ttft_s, rel=0.15)
