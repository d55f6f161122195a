"""Pauses of streams, in the rows of `bench faults` and in the table of `demo --faults`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mooncake_lite.tools.bench.faults import Found, _rows
from mooncake_lite.tools.demo.faults import Played
from mooncake_lite.tools.streams import Stream

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
