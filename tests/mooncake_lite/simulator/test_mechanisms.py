"""`simulate cluster`: the tiers and copies of the pool work in worlds that write no bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from mooncake_lite.cli import main
from mooncake_lite.profiles.file import MovesSection, write_profile
from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.workloads.traces import Trace, TraceRequest, write_trace
from tests.mooncake_lite.simulator.made import BLOCK, PROFILE, cluster, conversations, played

pytestmark = pytest.mark.quick


def test_a_block_that_dram_has_no_space_for_is_reused_from_ssd() -> None:
    """Six users with twelve blocks each, and DRAM for twenty blocks."""
    trace, small = conversations(turns=3, users=6), 20 * BLOCK + 2**20
    without = played(cluster(node_bytes=small), trace)
    with_ssd = played(cluster(node_bytes=small, ssd_bytes=10**13, ssd_bytes_per_s=20e9), trace)
    unlimited = played(cluster(), trace)
    assert with_ssd.reused["ssd"] > 0
    assert sum(without.reused.values()) < sum(with_ssd.reused.values()) == sum(unlimited.reused.values())


def test_blocks_that_a_node_reads_from_another_one_again_and_again_are_copied_to_it() -> None:
    shared = list(range(8))
    requests = [TraceRequest(n * 150.0, 8 * 512 + 100, 2, [*shared, 100 + n]) for n in range(40)]
    outcome = played(cluster("2P1D"), Trace(requests))
    assert outcome.copies[2] == 8


def test_what_was_tried_is_in_the_result_and_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--nodes", "2P1D", "--node-dram", "3GB", "--ssd", "1TB", "--ssd-gbps", "160")
    result, said = simulated(conversations(turns=3, users=6), tmp_path, capsys, *words)
    found = result["mechanisms"]
    assert {"prefills", "prefix_loads", "decodes", "ssd_saves", "ssd_loads"} <= found.keys()
    assert not any(one["failed"] for one in found.values())
    assert found["prefills"]["tried"] == 18
    assert found["ssd_loads"]["tried"] == result["pool"]["hits_ssd"] > 0
    assert f"ssd loads {found['ssd_loads']['tried']}, " in said


def test_waits_for_decode_slots_and_their_bound_are_in_the_result_of_the_queue_that_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine users on two decode slots, one of which goes by predicted length."""
    words, trace = ("--nodes", "1P1D", "--max-num-seqs", "2"), conversations(turns=3, users=9, gap_s=0.1)
    result, said = simulated(trace, tmp_path, capsys, *words, "--queue", "predicted")
    bound = result["queue_bound"]
    assert (bound["requests"], bound["late"]) == (27, 0)
    assert 1.0 < bound["waited_s"] < bound["most_s"]
    assert "0 of 27 begin later than it says" in said
    assert "queue_bound" not in simulated(trace, tmp_path, capsys, *words)[0]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("2P1D",), "all copies failed (rank 5 could not read or write them, or an original is damaged)"),
        (("1P1D", "--ssd", "1TB", "--node-dram", "8GB"), "all ssd saves failed (bad)"),
        (("1P1D", "--kv-cache-bytes", "1GB"), "all prefills failed (25 KV pages are needed, the rank has 5)"),
    ],
)
def test_a_run_in_which_a_mechanism_never_works_ends_with_an_error(
    words: tuple[str, ...],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Bytes, "find", lambda self, ref: None)
    shared = list(range(24))
    requests = [TraceRequest(n * 150.0, 24 * 512 + 100, 2, [*shared, 100 + n]) for n in range(40)]
    (tmp_path / "trace.jsonl").write_bytes(write_trace(Trace(requests)))
    trace = str(tmp_path / "trace.jsonl")
    assert main(["simulate", "cluster", trace, "--nodes", *words]) == 1
    assert f"mean nothing: {name}\n" in capsys.readouterr().err
    assert main(["simulate", "cluster", trace, "--nodes", "2P2D", *words[1:], "--kill", "decode@3"]) == 0


def test_a_faster_disk_serves_what_a_slow_one_is_too_slow_for() -> None:
    """At 1 GB/s a block loads in 0.17 s and computes in 0.06 s, so it is computed."""
    trace, small = conversations(turns=3, users=6), 20 * BLOCK + 2**20
    slow, fast = (
        played(cluster(node_bytes=small, ssd_bytes=10**13, ssd_bytes_per_s=rate), trace)
        for rate in (1e9, 20e9)
    )
    assert slow.reused.get("ssd", 0) < fast.reused["ssd"]


def simulated(
    trace: Trace, folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[dict[str, Any], str]:
    """Return the JSON and the output of the command."""
    file, out = folder / "trace.jsonl", folder / "out.json"
    file.write_bytes(write_trace(trace))
    assert main(["simulate", "cluster", str(file), "--nodes", "1P1D", "--json", str(out), *words]) == 0
    return json.loads(out.read_text()), capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "guesses"),
    [
        ((), {}),
        (("--ssd", "1TB"), {"disks": 1e9}),
        (("--ssd", "1TB", "--ssd-gbps", "160"), {}),
        (("--profile", "bare", "--ssd", "1TB"), {"disks": 1e9, "copies within a host": 5e9, "links": 1e9}),
        (("--profile", "bare", "--link-gbps", "100"), {"copies within a host": 5e9}),
        (("--profile", "bare", "--one-node"), {"copies within a host": 5e9}),
        (("--profile", "bare", "--nodes", "2C"), {}),
    ],
    ids=" ".join,
)
def test_rates_that_count_and_that_nothing_has_measured_are_told(
    words: tuple[str, ...],
    guesses: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = changed(PROFILE, sections={n: raw for n, raw in PROFILE.sections.items() if n != "moves"})
    write_profile(tmp_path / "bare", bare)
    monkeypatch.chdir(tmp_path)
    result, said = simulated(conversations(turns=1, users=1), tmp_path, capsys, *words)
    assert result["guesses"] == guesses
    assert ("guessed, because the profile lacks them: " in said) == bool(guesses)
    assert ("disks 8 Gbit/s" in said) == ("disks" in guesses)


def test_a_prefix_that_is_faster_computed_than_loaded_is_no_failed_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [TraceRequest(n * 60_000, 512 * 21, 2, [*range(20), 100 + n]) for n in range(3)]
    slow = PROFILE.with_section("moves", MovesSection(1e8, None, 1e8, 1e8))
    write_profile(tmp_path / "slow", slow)
    result, _ = simulated(Trace(requests), tmp_path, capsys, "--profile", str(tmp_path / "slow"))
    assert result["mechanisms"].keys() == {"prefills", "decodes"}


def test_a_run_in_which_nothing_fits_says_that_nothing_was_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, said = simulated(conversations(turns=1, users=3), tmp_path, capsys, "--node-dram", "170MB")
    assert result["mechanisms"] == {}
    assert "tried: nothing\n" in said
