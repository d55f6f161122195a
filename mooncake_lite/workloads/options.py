"""Options of all commands that read or play a trace, and the trace that they describe.

Used by `replay`, `simulate` and `workload`. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import NumberRange, with_options
from mooncake_lite.workloads.forms import Assumed, read_any
from mooncake_lite.workloads.rescale import divided, sped, spread
from mooncake_lite.workloads.traces import Trace

POSITIVE = NumberRange(0, 1e9, min_open=True)

DIVIDE_LENGTHS = click.option(
    "--divide-lengths", type=click.IntRange(min=1), default=1, show_default=True,
    help="Divide the lengths of prompts and answers: 1, 2, 4 ... 512. Shared prefixes stay shared.",
)  # fmt: skip

form_options = with_options(
    click.option(
        "--assume-rate", type=NumberRange(1e-6, 1e6),
        help="Requests per second, for a file that has no times: conversations as ShareGPT's.",
    ),
    click.option(
        "--assume-prefix", type=click.IntRange(0, 1 << 24), default=0,
        help="Tokens with which all prompts begin, for a file of lengths alone: Azure's and BurstGPT's.",
    ),
)  # fmt: skip
"""Adds the options that say what is made up where a file lacks it."""

PLAYED = (
    click.option("--speed", type=POSITIVE, default=1.0, show_default=True, help="Of the arrivals."),
    click.option("--spread", is_flag=True, help="Spread arrivals within the trace's ticks of 3 s."),
    DIVIDE_LENGTHS,
    click.option("--limit-requests", type=click.IntRange(1), help="Play the first requests alone."),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True),
)

played_options = with_options(form_options, *PLAYED)
"""Adds the options that say what is played, and how fast."""

trace_options = with_options(
    form_options,
    click.option("--slo-ttft-ms", type=POSITIVE, default=30_000.0, show_default=True, help="Limit on TTFT."),
    click.option(
        "--slo-tbt-ms", type=POSITIVE, default=100.0, show_default=True,
        help="Limit on the mean of a request's slowest tenth of gaps.",
    ),
    *PLAYED,
)  # fmt: skip
"""Adds these, and the options that say what is within the limits."""


def chosen_trace(path: Path, words: dict[str, Any]) -> Trace:
    """Read the trace that these options describe. Arguments and errors are as those of `known_trace`."""
    return adapted(known_trace(path, words, words["limit_requests"]), words)


def known_trace(path: Path, words: dict[str, Any], most: int | None = None) -> Trace:
    """Read a trace of any form, and say what the form lacks. Raises TraceError and ConfigError.

    words   from it, `form_options` that assume nothing are removed
    """
    found = read_any(path, assumed_of(words), most)
    for note in found.notes:
        say_once(note)
    return found.trace


def assumed_of(words: dict[str, Any]) -> Assumed:
    """Return what `form_options` assume, and remove from `words` those that assume nothing."""
    assumed = {name: words.pop(f"assume_{name}", None) or 0 for name in ("rate", "prefix")}
    words |= {f"assume_{name}": value for name, value in assumed.items() if value}
    return Assumed(**assumed)


@cache
def say_once(note: str) -> None:
    """Print a note on stderr, once for all runs of a sweep: processes that it has started print none."""
    if parent_process() is None:
        click.echo(f"note: {note}", err=True)


def adapted(trace: Trace, words: Mapping[str, Any]) -> Trace:
    """Return a trace as these options change it. Raises ConfigError."""
    trace = divided(trace.first(words["limit_requests"]), words["divide_lengths"])
    return sped(spread(trace, words["seed"]) if words["spread"] else trace, words["speed"])
