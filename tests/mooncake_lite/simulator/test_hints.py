"""What simulated clients say after each turn, and what it does to a run."""

from __future__ import annotations

import pytest

from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.hints import FACTOR, KINDS, MORE_S, Hints
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.traces import Trace, TraceRequest

pytestmark = pytest.mark.quick


def request(at_s: float, *ids: int) -> TraceRequest:
    return TraceRequest(1000 * at_s, 512 * len(ids), 1, list(ids))


TRACE = Trace([request(0, 1, 2), request(5, 1, 2, 3), request(9, 1, 4)])


def test_agents_know_which_blocks_are_used_again_and_when() -> None:
    hints = Hints(TRACE, "agents", 0.0, 0)
    assert hints.after(0, 1.0) == [
        ("retain", 2, FACTOR * 4.0 + MORE_S, True), ("prefetch", 2, 4.0, True),
    ]  # fmt: skip
    assert hints.after(1, 6.0)[-1] == ("demote", 3, 0.0, False)
    assert hints.after(1, 6.0)[0][:2] == ("retain", 1)
    assert hints.after(2, 10.0) == [("demote", 2, 0.0, False)]


def test_an_agent_keeps_its_blocks_for_a_turn_that_waits_already() -> None:
    assert Hints(TRACE, "agents", 0.0, 0).after(0, 6.0)[0] == ("retain", 2, MORE_S, True)


def test_wrong_hints_are_the_contrary() -> None:
    hints = Hints(TRACE, "wrong", 0.0, 0)
    assert hints.after(0, 1.0) == [("demote", 2, 0.0, False)]
    assert hints.after(2, 10.0)[0][0] != "demote"


def test_expected_pauses_have_an_error() -> None:
    said = [Hints(TRACE, "agents", 0.5, seed).after(0, 1.0)[1][2] for seed in range(9)]
    assert min(said) < 4.0 < max(said)


def turns(sessions: int, count: int) -> Trace:
    """Sessions of eight blocks that take their turns 20 s apart; the last turn is made of the same blocks."""
    ids = [[100 * session + block for block in range(8)] for session in range(sessions)]
    return Trace([request(20 / sessions * n, *ids[n % sessions]) for n in range(sessions * count)])


def played(kind: str) -> Outcome:
    """Twelve sessions in memory for eight, in turn: LRU always evicts the one that is needed next."""
    trace = turns(12, 8)
    profile = named_profile(PAPER_MACHINES)
    size = Cluster(profile=profile, nodes={"prefill": 1, "decode": 1}).layout.nbytes
    cluster = Cluster(profile=profile, nodes={"prefill": 1, "decode": 1}, node_bytes=64 * size)
    return play(cluster, TraceSource(trace, None if kind == "none" else Hints(trace, kind, 0.0, 0)), 0)


def test_hints_of_agents_beat_lru_and_no_hints_are_much_worse() -> None:
    computed = {kind: played(kind).to_dict(30.0, 0.1)["hit_rate"]["all"] for kind in KINDS}
    assert computed["none"] < 0.1
    assert computed["agents"] > 0.3
    assert min(computed.values()) >= computed["none"] - 0.02
