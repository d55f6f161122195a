"""`mooncake-lite workload`: what is in a trace, and traces that are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.cli import main
from mooncake_lite.tools.workload_make import sessions_of
from mooncake_lite.workloads.traces import Trace, TraceRequest, read_trace, write_trace

pytestmark = pytest.mark.quick

SMALL = Trace(
    [
        TraceRequest(0, 1024, 10, [1, 2]),
        TraceRequest(1000, 1100, 20, [1, 2, 3]),
        TraceRequest(4000, 600, 30, [1, 4]),
    ]
)


def stats(tmp_path: Path, trace: Trace, *words: str) -> dict[str, Any]:
    path, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    path.write_bytes(write_trace(trace))
    assert main(["workload", "stats", str(path), "--json", str(result), *words]) == 0
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_a_small_trace_has_the_figures_that_were_counted_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = stats(tmp_path, SMALL)
    assert (found["requests"], found["duration_s"]) == (3, 4.0)
    assert found["requests_per_s"]["mean"] == 0.75
    assert sum(found["requests_per_s"]["over_time"]) * 4 / 60 == pytest.approx(3)
    assert (found["input_length"]["p50"], found["input_length"]["max"]) == (1024, 1100)
    assert found["output_length"]["mean"] == 20
    blocks = found["blocks"]
    assert (blocks["references"], blocks["unique"], blocks["seen_once"]) == (7, 4, 0.5)
    assert blocks["most_hit"][:2] == [{"id": 1, "references": 3}, {"id": 2, "references": 2}]
    assert found["token_hit_share"] == (1024 + 512) / (1024 + 1100 + 600)
    assert found["hits"][-1] == {"blocks": 4, "hit_rate": 3 / 7}
    assert (found["reuse_gap_s"]["mean"], found["reuse_gap_s"]["max"]) == (5 / 3, 3.0)
    assert "7 references to 4 blocks, of which 50.0% are seen once" in capsys.readouterr().out


def test_divided_lengths_change_tokens_and_no_hits(tmp_path: Path) -> None:
    whole, part = stats(tmp_path, SMALL), stats(tmp_path, SMALL, "--divide-lengths", "4")
    assert (part["block_tokens"], part["input_length"]["max"]) == (128, 275)
    assert [part[name] for name in ("blocks", "hits")] == [whole[name] for name in ("blocks", "hits")]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_figure_is_the_same_in_every_run(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    file = tmp_path / f"figure{suffix}"
    stats(tmp_path, SMALL, "--plot", str(file))
    first = file.read_bytes()
    stats(tmp_path, SMALL, "--plot", str(file))
    assert file.read_bytes() == first


def test_one_request_without_an_answer_can_be_described_and_drawn(tmp_path: Path) -> None:
    found = stats(tmp_path, Trace([TraceRequest(7, 1, 0, [5])]), "--plot", str(tmp_path / "figure.svg"))
    assert (found["requests_per_s"]["mean"], found["token_hit_share"]) == (None, 0)
    assert found["reuse_gap_s"]["mean"] is None


def test_equal_seeds_make_equal_traces_that_share_documents(tmp_path: Path) -> None:
    file, again, other = (tmp_path / name for name in ("a", "b", "c"))
    for path, seed in ((file, "1"), (again, "1"), (other, "2")):
        words = ["--requests", "50", "--rate", "2", "--seed", seed, "--out", str(path)]
        assert main(["workload", "make", "sessions", *words]) == 0
    assert file.read_bytes() == again.read_bytes() != other.read_bytes()
    trace = read_trace(file)
    assert trace == sessions_of(50, 2.0, 1)
    ids = [item for request in trace.requests for item in request.hash_ids]
    assert sorted(set(ids)) == list(range(len(set(ids))))
    assert len(set(ids)) < len(ids)
    partial = [one.hash_ids[-1] for one in trace.requests if one.input_length % 512]
    assert all(ids.count(item) == 1 for item in partial)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stats", "nowhere"], "nowhere: no such file or directory"),
        (["stats", "nowhere", "--plot", "x.pdf"], "the name must end with .svg or .png"),
        (["make", "sessions", "--out", "x", "--rate", "0"], "'--rate'"),
        (["make", "sessions"], "Missing option '--out'"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", *words]) == 2
    assert message in capsys.readouterr().err
