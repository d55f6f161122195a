"""Bytes that move by layers: all of them cross a link, beside the pass, and none is faster than its link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.cli import main
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.profiles.file import MovesSection
from mooncake_lite.ranks.computing.jobs import blocks_to_load, blocks_to_store
from mooncake_lite.simulator.clock import Action
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.network import Link, Network
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.world import World
from mooncake_lite.workloads.traces import Trace, TraceRequest, write_trace
from tests.mooncake_lite.simulator.made import BLOCK, PROFILE, cluster, played, traces

pytestmark = pytest.mark.quick

NODES = ("2P1D", "1P2D")


class Moves:
    """A run, and the bytes that its orders ask for.

    asked    of "near", "far" and "disk" together
    seconds  of each prompt: from its order to its report; nbytes: that it stored and loaded
    """

    def __init__(self, cluster: Cluster, trace: Trace) -> None:
        self.asked = 0
        self.began: dict[str, tuple[float, fx.StartPrefill]] = {}
        self.seconds: list[float] = []
        self.stored: list[int] = []
        setting = cluster.setting(TraceSource(trace), 1)
        self.world = World(setting, observe=self._observe)
        self.world.run()

    def _observe(self, event: ev.Event, now: float, effects: Sequence[fx.Effect]) -> None:
        if isinstance(event, ev.PrefillEnded):
            began_s, order = self.began[event.request_id]
            self.seconds.append(now - began_s)
            self.stored.append(sum(ref.nbytes for ref in blocks_to_store(order)))
        for effect in effects:
            match effect:
                case fx.StartPrefill():
                    self.began[effect.request_id] = now, effect
                    refs = [*blocks_to_load(effect), *blocks_to_store(effect)]
                case fx.StartDecode():
                    refs = [*blocks_to_load(effect)]
                case fx.GrantPuts():
                    refs = [place for place in effect.places if place is not None]
                case fx.LoadBlocks() | fx.SaveBlocks():
                    refs = list(effect.refs)
                case fx.CopyBlocks():
                    refs = list(effect.sources)
                case _:
                    refs = []
            self.asked += sum(ref.nbytes for ref in refs)


@pytest.mark.parametrize("layerwise", ["auto", "on", "off"])
@pytest.mark.parametrize("nodes", NODES)
def test_what_is_stored_and_loaded_is_moved(nodes: str, layerwise: str, soak: int) -> None:
    for trace in traces(soak, 40, 1.0):
        fields: dict[str, Any] = {
            "ssd_bytes": 10**13,
            "ssd_bytes_per_s": 20e9,
            "node_bytes": 200 * (BLOCK + 4096),
        }
        run = Moves(cluster(nodes, layerwise=layerwise, **fields), trace)
        moved = run.world.hardware.bytes_moved()
        assert min(moved.values()) > 0
        assert sum(moved.values()) == run.asked


@pytest.mark.parametrize("layerwise", ["auto", "on", "off"])
@pytest.mark.parametrize("nodes", NODES)
def test_no_store_beats_its_link(nodes: str, layerwise: str, soak: int) -> None:
    """All that a node stores leaves over the link between its pages and its memory."""
    slow = PROFILE.with_section("moves", MovesSection(1e9, None, 1e9, 1e9))
    for trace in traces(soak, 40, 0.2):
        run = Moves(cluster(nodes, profile=slow, layerwise=layerwise), trace)
        assert len(run.seconds) == len(trace.requests)
        assert all(seconds >= nbytes / 1e9 for seconds, nbytes in zip(run.seconds, run.stored))


def test_no_transfer_beats_the_slowest_of_its_links(monkeypatch: pytest.MonkeyPatch, soak: int) -> None:
    send, late = Network.send, list[float]()

    def timed(
        network: Network, links: Sequence[Link], nbytes: int, done: Action, latency_s: float = 0.0,
        most: float = inf,
    ) -> None:  # fmt: skip
        rate, began_s = min(most, *map(network._capacity, links)), network._clock.now

        def ended() -> None:
            late.append((network._clock.now - began_s - latency_s) / (nbytes / rate))
            done()

        send(network, links, nbytes, ended, latency_s, most)

    monkeypatch.setattr(Network, "send", timed)
    for trace in traces(soak, 40, 1.0):
        played(cluster("2P1D", ssd_bytes=10**13, node_bytes=200 * (BLOCK + 4096)), trace)
    assert len(late) > 100
    assert min(late) == pytest.approx(1, rel=1e-9), "some had their links alone"


def alone(rate: float, new: int, cached: int, layerwise: str) -> tuple[float, float, float]:
    """Return, of a prompt with blocks that are new and cached: seconds of its pass, TTFT, and then to its
    second token."""
    profile = PROFILE.with_section("moves", MovesSection(rate, 1e-9, rate, rate))
    ids = list(range(cached))
    first = TraceRequest(0, max(1, 512 * cached), 2, ids or [99])
    second = TraceRequest(200_000, 512 * (cached + new), 2, [*ids, *range(100, 100 + new)])
    *_, record = played(cluster(profile=profile, layerwise=layerwise), Trace([first, second])).records
    count = 512 * new
    pass_s = pass_seconds(PROFILE)(PassLoad(count, count * 512 * cached + count * (count + 1) // 2))
    return pass_s, record.ttft_s, record.token_times_s[1] - record.arrived_s - record.ttft_s


def test_a_prefix_comes_in_beside_its_pass_and_no_faster_than_its_link() -> None:
    for rate in (46e9, 20e9, 5e9):
        load_s = 32 * BLOCK / rate
        pass_s, whole_s, _ = alone(rate, 1, 32, "off")
        assert load_s + pass_s <= whole_s <= load_s + pass_s + 0.02
        _, by_layers_s, _ = alone(rate, 1, 32, "on")
        longer_s = max(load_s, pass_s)
        assert longer_s <= by_layers_s <= longer_s + pass_s / 15 + BLOCK / rate + 0.02


def test_a_store_leaves_beside_its_pass_and_its_last_group_after_it() -> None:
    """The second token waits for the rest of the store, for the load of the decode node, and for a step."""
    for rate in (46e9, 5e9, 1e9):
        store_s = load_s = 16 * BLOCK / rate
        pass_s, _, whole_s = alone(rate, 16, 0, "off")
        assert store_s + load_s <= whole_s <= store_s + load_s + 0.06
        _, _, by_layers_s = alone(rate, 16, 0, "on")
        left_s = max(store_s - pass_s, store_s / 15) + load_s
        assert left_s <= by_layers_s <= left_s + store_s / 15 + 0.06


def test_auto_moves_by_layers_what_is_faster_so() -> None:
    """A block of 16 tokens is loaded in 0.1 ms: groups of layers would cost more than they hide."""
    small, one_request = replace(cluster(), block_tokens=16), Trace([TraceRequest(0, 600, 2, [1, 2])])
    leasts = {
        one: replace(small, layerwise=one).setting(TraceSource(one_request), 1).shape.least
        for one in ("auto", "on")
    }
    assert leasts["auto"] > leasts["on"] == 1


def test_layers_without_overlap_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(write_trace(Trace([TraceRequest(0, 600, 2, [1, 2])])))
    assert main(["simulate", "cluster", str(file), "--no-overlap-transfers", "--layerwise", "on"]) == 2
    assert "use --layerwise auto" in capsys.readouterr().err
