"""`simulate cluster --from-recording`: the requests of a recording, played again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest
from msgspec.structs import replace

from mooncake_lite.cli import main
from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.errors import TraceError
from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.recorded import _Seen, _trace_of, read_recording
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.world import World
from mooncake_lite.tools.workload_make import sessions_of
from mooncake_lite.workloads.traces import Trace

CLUSTER = Cluster(profile=named_profile("LLaMA3-70B-8xA800"), nodes={"prefill": 2, "decode": 1})


def recorded(path: Path, trace: Trace) -> list[float]:
    """Record a run. Returns the times to first token."""
    setting = CLUSTER.setting(TraceSource(trace), seed=1)
    recorder = Recorder(path, setting.shape.config)

    def observe(event: ev.Event, now: float, effects: Sequence[fx.Effect]) -> None:
        recorder.record(event, now, effects)

    world = World(setting, observe=observe)
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
def test_the_next_turn_has_the_blocks_of_one_answer_before_it() -> None:
    """Two answers fill blocks in turn; a later prompt goes on after the first of them."""
    one = _Seen(ev.RequestArrived("r", 1_100, 2_000, [1, 2], [0, 0]), 0.0)
    for key, parent, index in ((10, 2, 2), (20, 2, 2), (11, 10, 3), (21, 20, 3), (10, 2, 2)):
        one.put(key, parent, index)
    assert one.puts == [10, 11]
    one.answer_tokens = 1_000
    later = _Seen(ev.RequestArrived("s", 2_100, 10, [1, 2, 10, 11], [0] * 4), 5.0, 10)
    trace = _trace_of([one, later], 512)
    assert trace.requests[1].hash_ids[2:4] == trace.answers[0]
    source = TraceSource(trace)
    first, second = source.next(), source.next()
    assert second.keys == first.token_ids.keys[:4]  # type: ignore[attr-defined]


@pytest.mark.quick
def test_an_answer_of_unknown_length_is_said_to_be_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run", sessions_of(20, 0.8, seed=2))
    whole = (tmp_path / "run").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 3])
    found = read_recording(tmp_path / "cut")
    assert found.assumed > 0
    assert main(["simulate", "cluster", str(tmp_path / "cut"), "--from-recording"]) == 0
    assert f"{found.assumed} answers had not ended; their lengths are assumed" in capsys.readouterr().err
    limits = [one.max_tokens for one in (ev.RequestArrived("r", 600, 70, [], []),)]
    assert [
        one.output_length
        for one in _trace_of([_Seen(ev.RequestArrived("r", 600, 70, [], []), 0.0)], 512).requests
    ] == limits


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--spread"], "the arrivals of a recording are not in ticks"),
        (["--assume-rate", "2"], "a recording lacks nothing"),
        (["--profile", "SmolLM2-135M-Instruct"], "name the profile of its machines with --profile"),
    ],
)
def test_what_does_not_fit_a_recording_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run", sessions_of(2, 0.8, seed=2))
    assert main(["simulate", "cluster", str(tmp_path / "run"), "--from-recording", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick
def test_a_pipeline_is_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = sessions_of(2, 0.8, seed=2)
    config = CLUSTER.setting(TraceSource(trace), seed=1).shape.config
    staged = replace(config, roles=[*config.roles[:2], "stage", *config.roles[3:]])
    recorder = Recorder(tmp_path / "run", staged)
    recorder.record(ev.RequestArrived("r", 600, 70, [], []), 0.0, [])
    recorder.close()
    assert main(["simulate", "cluster", str(tmp_path / "run"), "--from-recording"]) == 2
    assert "ranks of the role stage are not simulated; name a cluster with --nodes" in capsys.readouterr().err
    words = ["--from-recording", "--nodes", "1C"]
    assert main(["simulate", "cluster", str(tmp_path / "run"), *words]) == 0


@pytest.mark.quick
def test_what_is_no_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_text("{}\n")
    assert main(["simulate", "cluster", str(tmp_path / "trace"), "--from-recording"]) == 2
    assert "recording" in capsys.readouterr().err
    Recorder(tmp_path / "empty", CLUSTER.setting(TraceSource(sessions_of(1, 1, 1)), 1).shape.config).close()
    with pytest.raises(TraceError, match="there is no request in this recording"):
        read_recording(tmp_path / "empty")
