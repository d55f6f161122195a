"""`mooncake-lite workload stats`: what is in a trace."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from mooncake_lite.cli import main
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile, write_profile
from mooncake_lite.tools.workload_stats import stats_of
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import Trace, TraceRequest, write_trace
from tests.mooncake_lite.workloads.made import made_trace

pytestmark = pytest.mark.quick

SMALL = Trace(
    [
        TraceRequest(0, 1024, 10, [1, 2]),
        TraceRequest(1000, 1100, 20, [1, 2, 3]),
        TraceRequest(4000, 600, 30, [1, 4]),
    ]
)
MIB = 2**20


def stats(tmp_path: Path, trace: Trace, *words: str) -> dict[str, Any]:
    path, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    path.write_bytes(write_trace(trace))
    assert main(["workload", "stats", str(path), "--json", str(result), *words]) == 0
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_a_small_trace_has_the_figures_that_were_counted_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = stats(tmp_path, SMALL, "--pool-blocks", "1")
    assert (found["requests"], found["duration_s"]) == (3, 4.0)
    assert found["requests_per_s"]["mean"] == 0.75
    assert sum(found["requests_per_s"]["over_time"]) * 4 / 60 == pytest.approx(3)
    assert found["burstiness"] == {"gaps": 0.5, "counts_in_6_s": None, "counts_in_60_s": None}
    assert (found["input_length"]["p50"], found["input_length"]["max"]) == (1024, 1100)
    assert found["output_length"]["mean"] == 20
    blocks = found["blocks"]
    assert (blocks["references"], blocks["unique"], blocks["seen_once"]) == (7, 4, 0.5)
    assert blocks["most_hit"][:2] == [{"id": 1, "references": 3}, {"id": 2, "references": 2}]
    reuse, tokens = found["reuse"], 1024 + 1100 + 600
    assert reuse["without a limit"]["tokens"] == reuse["one node"]["tokens"] == (1024 + 512) / tokens
    assert (reuse["pool"]["blocks"], reuse["pool"]["tokens"]) == (1, (512 + 512) / tokens)
    assert reuse["pool"]["requests"] == 1 / 3, "the first prompt"
    assert reuse["without a limit"]["percentiles"][0::50] == pytest.approx([0, 512 / 600, 1024 / 1100])
    assert [found["working_set"][window_s]["max"] for window_s in ("60", "600")] == [4, 4]
    curve, gib = found["curve"], 1024 / 160
    assert curve["sizes"][0] == {"blocks": 1, "share": 1024 / tokens, "tokens_per_gib": 512 * gib / 6}
    assert curve["sizes"][-1] == {"blocks": 2, "share": 1536 / tokens, "tokens_per_gib": 0}
    assert (curve["knee"]["blocks"], curve["nine_tenths"]["blocks"]) == (1, 2)
    assert (found["reuse_gap_s"]["mean"], found["reuse_gap_s"]["max"]) == (5 / 3, 3.0)
    out = capsys.readouterr().out
    assert "7 references to 4 blocks, of which 50.0% are seen once" in out
    assert "0.312 GiB: 56.4% of prompt tokens, 90 % of all hits" in out


def test_divided_lengths_change_tokens_and_no_hits(tmp_path: Path) -> None:
    whole, part = stats(tmp_path, SMALL), stats(tmp_path, SMALL, "--divide-lengths", "4")
    assert (part["block_tokens"], part["input_length"]["max"]) == (128, 275)
    assert (part["block_bytes"], whole["block_bytes"]) == (40 * MIB, 160 * MIB)
    assert part["blocks"] == whole["blocks"]
    for one, other in zip(part["reuse"].values(), whole["reuse"].values()):
        assert one["percentiles"] == pytest.approx(other["percentiles"], rel=0.01)


def test_a_pool_has_a_size_in_bytes_of_the_profiles_kv(tmp_path: Path) -> None:
    found = stats(tmp_path, SMALL, "--pool-bytes", "500MiB", "--node-dram", "200MiB")["reuse"]
    assert (found["pool"]["blocks"], found["one node"]["blocks"]) == (3, 1)
    small = stats(tmp_path, SMALL, "--pool-bytes", "500MiB", "--profile", "SmolLM2-135M-Instruct")
    assert small["block_bytes"] == 2 * 30 * 3 * 512 * 64 * 4
    assert small["reuse"]["pool"]["blocks"] == 500 * MIB // small["block_bytes"]


def test_burstiness_is_one_for_a_poisson_process_and_more_for_bursts() -> None:
    def burstiness(bursts: bool) -> list[float]:
        dice, now_ms, requests = Random(5), 0.0, list[TraceRequest]()
        for number in range(6_000):
            if not bursts or number % 10 == 0:
                now_ms += dice.expovariate(1) * (10_000 if bursts else 1_000)
            requests.append(TraceRequest(now_ms, 1, 1, [number]))
        return list(stats_of(Trace(requests), MIB, {})["burstiness"].values())

    assert burstiness(False) == pytest.approx([1, 1, 1], abs=0.25)
    assert min(burstiness(True)[1:]) > 7
    assert burstiness(True)[0] > 4


def test_more_memory_has_no_less_and_one_more_gib_adds_what_pools_of_both_sizes_say(tmp_path: Path) -> None:
    found, trace = stats(tmp_path, made_trace(), "--pool-blocks", "100000"), made_trace()
    curve = found["curve"]
    shares = [one["share"] for one in curve["sizes"]]
    assert shares == sorted(shares)
    assert shares[-1] == found["reuse"]["pool"]["tokens"] == found["reuse"]["without a limit"]["tokens"]
    assert curve["nine_tenths"]["share"] >= 0.9 * shares[-1]
    for one in (curve["sizes"][20], curve["knee"], curve["sizes"][-5]):
        more = max(6, one["blocks"] // 10)  # blocks of a GiB, or a tenth
        before, after = (sum(cached_tokens(trace, size)) for size in (one["blocks"], one["blocks"] + more))
        assert one["tokens_per_gib"] == pytest.approx((after - before) / (more * 160 / 1024))


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
    assert found["requests_per_s"]["mean"] is found["burstiness"]["gaps"] is found["curve"] is None
    assert found["reuse"]["one node"]["tokens"] == 0
    assert found["reuse_gap_s"]["mean"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file or directory"),
        (["nowhere", "--plot", "x.pdf"], "the name must end with .svg or .png"),
        (["nowhere", "--pool-blocks", "1", "--pool-bytes", "1GiB"], "leave out one of them"),
        (["trace.jsonl", "--profile", "old.json"], "does not say how large KV is"),
    ],
)
def test_a_wrong_option_is_named(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_bytes(write_trace(SMALL))
    profile = named_profile(PAPER_MACHINES)
    write_profile(Path("old.json"), replace(profile, model=replace(profile.model, kv=[])))
    assert main(["workload", "stats", *words]) == 2
    assert message in capsys.readouterr().err
