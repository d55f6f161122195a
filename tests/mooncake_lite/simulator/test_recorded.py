"""`simulate cluster --from-recording`: the requests of a recording, played again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import mean

import pytest

from mooncake_lite.cli import main
from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.errors import TraceError
from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.recorded import read_recording
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.world import World
from mooncake_lite.tools.workload import sessions_of
from mooncake_lite.workloads.traces import Trace

CLUSTER = Cluster(profile=named_profile("LLaMA3-70B-8xA800"), nodes={"prefill": 2, "decode": 1})


def recorded(path: Path, trace: Trace) -> list[float]:
    """Record a run. Returns the times to first token."""
    setting = CLUSTER.setting(TraceSource(trace), seed=1)
    recorder = Recorder(path, setting.shape.config)

    def observe(event: ev.Event, now: float, effects: Sequence[fx.Effect]) -> None:
        recorder.record(event, now, effects)

    world = World(setting, check_every=10**9, observe=observe, patience_s=inf)
    world.run()
    recorder.close()
    return [one.ttft_s for one in sorted(world.records, key=lambda one: one.arrived_s)]


@pytest.mark.quick
def test_the_requests_of_a_recording_are_those_that_came(tmp_path: Path) -> None:
    trace = sessions_of(40, 0.8, seed=2)
    ttfts = recorded(tmp_path / "run", trace)
    again = read_recording(tmp_path / "run")
    assert again.roles == {"prefill": 2, "decode": 1, "store": 2}
    assert again.trace.block_tokens == 512
    firsts: dict[int, int] = {}
    for found, wanted in zip(again.trace.requests, trace.requests, strict=True):
        assert found.input_length == wanted.input_length
        assert found.output_length == wanted.output_length
        assert len(found.hash_ids) == len(wanted.hash_ids)
        for one, other in zip(found.hash_ids, wanted.hash_ids[: wanted.input_length // 512]):
            assert firsts.setdefault(other, one) == one
    assert len(set(firsts.values())) == len(firsts)
    played = play(CLUSTER, TraceSource(again.trace), seed=1)
    assert mean(one.ttft_s for one in played.records) == pytest.approx(mean(ttfts), rel=0.05)


@pytest.mark.quick
def test_a_recording_is_played_under_another_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run", sessions_of(20, 0.8, seed=2))
    out = tmp_path / "result.json"
    words = ["--from-recording", "--policy", "random", "--json", str(out)]
    assert main(["simulate", "cluster", str(tmp_path / "run"), *words]) == 0
    found = json.loads(out.read_text())
    assert found["completed"] == 20
    assert found["config"]["nodes"] == "2P1D2S"
    assert found["config"]["mode"] == "pooled"
    assert "20 completed" in capsys.readouterr().out


@pytest.mark.quick
def test_what_is_no_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_text("{}\n")
    assert main(["simulate", "cluster", str(tmp_path / "trace"), "--from-recording"]) == 2
    assert "recording" in capsys.readouterr().err
    Recorder(tmp_path / "empty", CLUSTER.setting(TraceSource(sessions_of(1, 1, 1)), 1).shape.config).close()
    with pytest.raises(TraceError, match="there is no request in this recording"):
        read_recording(tmp_path / "empty")
