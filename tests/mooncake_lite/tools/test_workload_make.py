"""`mooncake-lite workload make`, `convert` and `merge`: files that all commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_lite.cli import main
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.traces import Trace, TraceRequest, read_trace, write_trace

pytestmark = pytest.mark.quick

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
TALKS = [{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning"}]}]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_is_read_back(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "made.jsonl"
    words = ["--requests", "40", "--rate", "2", "--seed", "5", "--out", str(out)]
    assert main(["workload", "make", kind, *words]) == 0
    assert read_trace(out) == made(KINDS[kind], 40, 2.0, 5)


@pytest.mark.parametrize("kind", ["agents", "sessions"])
def test_other_arrivals_change_times_alone(kind: str, tmp_path: Path) -> None:
    plain, day = tmp_path / "plain", tmp_path / "day"
    for path, words in ((plain, []), (day, ["--arrivals", "day"])):
        assert main(["workload", "make", kind, "--requests", "60", "--out", str(path), *words]) == 0
    one, other = read_trace(plain).requests, read_trace(day).requests
    assert [each.hash_ids for each in one] == [each.hash_ids for each in other]
    assert [each.timestamp for each in one] != [each.timestamp for each in other]
    assert other[-1].timestamp == pytest.approx(60_000, rel=0.1)


def test_longer_pauses_let_more_sessions_take_turns(tmp_path: Path) -> None:
    begun = []
    for pause_s in ("10", "200"):
        path = tmp_path / pause_s
        words = ["--requests", "400", "--rate", "0.2", "--pause-s", pause_s, "--out", str(path)]
        assert main(["workload", "make", "agents", *words]) == 0
        begun.append(len({tuple(request.hash_ids[:80]) for request in read_trace(path).requests[:20]}))
    assert begun[0] < begun[1]


def test_a_trace_of_lengths_is_converted_and_what_it_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "azure.csv", tmp_path / "out.jsonl"
    path.write_text(AZURE)
    assert main(["workload", "convert", str(path), str(out)]) == 0
    told = capsys.readouterr()
    assert told.err == f"note: {path}: the prefixes of 2 prompts are not known (Azure); no two are equal\n"
    assert [(one.timestamp, one.input_length) for one in read_trace(out).requests] == [(0, 4808), (52, 3180)]
    assert main(["workload", "convert", str(path), str(out), "--assume-prefix", "1024"]) == 0
    assert "the first 1024 tokens of all are assumed to be equal" in capsys.readouterr().err
    assert {tuple(one.hash_ids[:2]) for one in read_trace(out).requests} == {(0, 1)}


def test_a_trace_without_times_is_played_at_the_rate_that_is_assumed_and_otherwise_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "talks.json", tmp_path / "result.json"
    path.write_text(json.dumps(TALKS * 9))
    words = ["simulate", "cluster", str(path), "--nodes", "1P1D", "--json", str(result)]
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([*words, "--assume-rate", "3"]) == 0
    found = json.loads(result.read_text())
    assert (found["completed"], found["config"]["assume_rate"]) == (9, 3.0)
    assert "assume_prefix" not in found["config"]
    assert "times are made up, at 3 requests/s" in capsys.readouterr().err


def test_traces_with_blocks_of_16_are_played_and_described(tmp_path: Path) -> None:
    path, result = tmp_path / "bailian.jsonl", tmp_path / "result.json"
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 64, "output_length": 20}
    text = json.dumps({**line, "type": "text", "turn": 1, "hash_ids": [5, 6, 7, 8]}) + "\n"
    path.write_text(text + text.replace(": 0,", ": 3.5,", 1))
    for command in (["simulate", "cluster"], ["simulate", "cache"], ["workload", "stats"]):
        assert main([*command, str(path), "--json", str(result)]) == 0
    assert json.loads(result.read_text())["block_tokens"] == 16
    assert main(["simulate", "cluster", str(path), "--nodes", "1P1D", "--json", str(result)]) == 0
    assert json.loads(result.read_text())["hit_rate"]["all"] == pytest.approx(63 / 128, abs=0.13)


def test_traces_of_several_kinds_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, out = (tmp_path / name for name in ("one", "other", "out"))
    one.write_bytes(write_trace(Trace([TraceRequest(0, 512, 1, [0]), TraceRequest(99, 512, 1, [0])])))
    other.write_text(AZURE)
    assert main(["workload", "merge", str(one), str(other), "--out", str(out)]) == 0
    requests = read_trace(out).requests
    assert [each.timestamp for each in requests] == [0, 0, 52, 99]
    assert requests[0].hash_ids == requests[3].hash_ids == [0]
    assert "not known (Azure)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["make", "agents", "--out", "x", "--rate", "nan"], "'--rate'"),
        (["make", "agents", "--out", "x", "--arrivals", "weekly"], "'--arrivals'"),
        (["make", "rag", "--out", "x", "--rate", "1e-6", "--requests", "100000"], "raise the rate"),
        (["convert", "nowhere", "x"], "nowhere: no such file or directory"),
        (["merge", "--out", "x"], "TRACES"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_says_once_what_its_trace_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    sweep = tmp_path / "sweep.toml"
    sweep.write_text('trace = "azure.csv"\n[cluster]\nnodes = "1P1D"\n[vary]\nspeed = [1.0, 2.0]\n')
    assert main(["simulate", "sweep", str(sweep)]) == 0
    assert capsys.readouterr().err.count("not known (Azure)") == 1
