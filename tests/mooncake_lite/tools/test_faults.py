"""Pauses of streams, in the rows of `bench faults` and in the table of `demo --faults`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from mooncake_lite.errors import ClusterError
from mooncake_lite.tools.bench.faults import Found, _rows
from mooncake_lite.tools.demo.faults import Played
from mooncake_lite.tools.profile import overheads
from mooncake_lite.tools.streams import Prompt, Stream, play, process_of

pytestmark = pytest.mark.quick


def test_the_bench_tells_pauses_in_milliseconds() -> None:
    median, *_ = _rows("sleeping ranks", {"decode": Found([0.1, 0.2, 0.4], [0.03, 0.04, 0.05], 0, 1)})
    assert median.peer is not None
    assert (median.unit, median.ours, median.peer.value) == ("ms", 200.0, 40.0)


def test_the_demo_counts_the_gaps_after_the_death_alone() -> None:
    calm, paused = Stream("a", [0.0, 1.0, 1.1, 1.2]), Stream("a", [0.0, 1.0, 6.0, 6.1, 6.4])
    out = io.StringIO()
    Console(file=out, width=200).print(Played([("", [calm], 0.0), ("decode rank", [paused], 6.05)]).table())
    undisturbed, killed = (line.split() for line in out.getvalue().splitlines() if "the same" in line)
    assert undisturbed == ["nothing", "100", "100", "the", "same"]
    assert killed == ["decode", "rank", "300", "300", "the", "same"]


def test_a_stream_that_finds_no_server_has_the_reason_and_the_act_is_done() -> None:
    act = Mock()
    (stream,), moment = play("http://127.0.0.1:1", [Prompt([1, 2], 3)], act, 0.0)
    assert act.called
    assert "refused" in stream.error
    assert (stream.text, len(stream.times)) == ("", 1)
    assert stream.times[0] <= moment + 1.0


def test_a_process_that_a_cluster_does_not_have_is_told() -> None:
    with pytest.raises(ClusterError, match="the cluster has no process 7"):
        process_of(os.getpid(), "7")


def test_overheads_that_cannot_be_measured_are_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(overheads, "sleeping_profile", lambda folder: None)
    monkeypatch.setattr(overheads, "started", Mock(side_effect=ClusterError("no mpirun")))
    assert overheads.measure_overheads(Path("model"), told.append) is None
    assert told == ["overheads are not measured: no mpirun"]
