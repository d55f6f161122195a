"""Options of all commands that play a trace, and the trace that they describe.

Used by `replay` and `simulate cluster`. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import NumberRange, with_options
from mooncake_lite.workloads.rescale import divided, sped, spread
from mooncake_lite.workloads.traces import Trace, read_trace

POSITIVE = NumberRange(0, 1e9, min_open=True)

DIVIDE_LENGTHS = click.option(
    "--divide-lengths", type=click.IntRange(min=1), default=1, show_default=True,
    help="Divide the lengths of prompts and answers: 1, 2, 4 ... 512. Shared prefixes stay shared.",
)  # fmt: skip

trace_options = with_options(
    click.option("--slo-ttft-ms", type=POSITIVE, default=30_000.0, show_default=True, help="Limit on TTFT."),
    click.option(
        "--slo-tbt-ms", type=POSITIVE, default=100.0, show_default=True,
        help="Limit on the mean of a request's slowest tenth of gaps.",
    ),
    click.option("--speed", type=POSITIVE, default=1.0, show_default=True, help="Of the arrivals."),
    click.option("--spread", is_flag=True, help="Spread arrivals within the trace's ticks of 3 s."),
    DIVIDE_LENGTHS,
    click.option("--limit-requests", type=click.IntRange(1), help="Play the first requests alone."),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True),
)  # fmt: skip
"""Adds the options that say what is played, how fast, and what is within the limits."""


def chosen_trace(path: Path, words: Mapping[str, Any]) -> Trace:
    """Read the trace that these options describe. Raises TraceError and ConfigError."""
    return adapted(read_trace(path), words)


def adapted(trace: Trace, words: Mapping[str, Any]) -> Trace:
    """Return a trace as these options change it. Raises ConfigError."""
    trace = divided(trace.first(words["limit_requests"]), words["divide_lengths"])
    return sped(spread(trace, words["seed"]) if words["spread"] else trace, words["speed"])
