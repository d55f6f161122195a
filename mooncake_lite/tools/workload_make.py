"""`mooncake-lite workload make`, `convert` and `merge`: the commands that write a trace.

Mounted by `workload.py`. Kinds are in `workloads/kinds.py`, forms in `workloads/forms.py`. Explained in
docs/how-to/make-a-workload.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.options import OUT_FILE, NumberRange, with_options, write_out
from mooncake_lite.simulator.sessions import SessionMix, Sessions
from mooncake_lite.workloads.arrivals import ARRIVALS, merged, retimed
from mooncake_lite.workloads.forms import coarsened
from mooncake_lite.workloads.kinds import KINDS, Kind, made
from mooncake_lite.workloads.options import form_options, known_trace
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace, TraceRequest, write_trace

TRACE = click.Path(path_type=Path)
OUT = click.option("--out", required=True, type=OUT_FILE, help="Write the trace to FILE.")


@click.group()
def make() -> None:
    """Make a trace."""


def _options(arrivals: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of all kinds. arrivals: where none are named."""
    return with_options(
        click.option("--requests", default=1_000, show_default=True, type=click.IntRange(1, 10_000_000)),
        click.option(
            "--rate", default=1.0, show_default=True, type=NumberRange(1e-6, 1e6),
            help="Requests per second, in the mean.",
        ),
        click.option(
            "--arrivals", type=click.Choice(list(ARRIVALS)),
            help=f"When requests come; day: from one night to the next.  [default: {arrivals}]",
        ),
        click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**63 - 1)),
        OUT,
    )  # fmt: skip


@make.command()
@_options("sessions begin at random, and turns follow")
def sessions(requests: int, rate: float, arrivals: str | None, seed: int, out: Path) -> None:
    """Make conversations about documents that they share. Equal options give equal files.

    Without --arrivals the rate is reached after a few minutes.
    """
    trace = sessions_of(requests, rate, seed)
    write_out("--out", out, write_trace(retimed(trace, arrivals, rate, seed) if arrivals else trace))


def _command(name: str, kind: Kind) -> click.Command:
    """Return the command that makes workloads of a kind."""

    @click.command(name, help=f"Make {kind.about}. Equal options give equal files.")
    @_options(kind.arrivals)
    def command(
        requests: int, rate: float, arrivals: str | None, seed: int, out: Path, pause_s: float | None = None
    ) -> None:
        chosen = kind if pause_s is None else replace(kind, pause_s=pause_s)
        write_out("--out", out, write_trace(made(chosen, requests, rate, seed, arrivals)))

    return _pause(kind)(command) if kind.pause_s else command


def _pause(kind: Kind) -> Any:
    """Return a decorator that adds the option of kinds whose sessions have turns."""
    return click.option(
        "--pause-s", default=kind.pause_s, show_default=True, type=NumberRange(0.001, 1e6),
        help="From one turn of a session to the next, in the mean.",
    )  # fmt: skip


for name, kind in KINDS.items():
    make.add_command(_command(name, kind))


@click.command()
@click.argument("trace", type=TRACE)
@click.argument("out", type=OUT_FILE)
@form_options
def convert(trace: Path, out: Path, **words: Any) -> None:
    """Write TRACE, of any form that can be read, to OUT in Mooncake's form, with blocks of 512 tokens."""
    write_out("OUT", out, write_trace(_coarse(trace, known_trace(trace, words))))


@click.command()
@click.argument("traces", type=TRACE, nargs=-1, required=True)
@form_options
@OUT
def merge(traces: tuple[Path, ...], out: Path, **words: Any) -> None:
    """Put the requests of TRACES into one trace, by their times. What one shares, no other one does."""
    found = [_coarse(path, known_trace(path, {**words})) for path in traces]
    write_out("--out", out, write_trace(merged(found)))


def _coarse(path: Path, trace: Trace) -> Trace:
    """Return a trace with blocks of 512 tokens, and say what that changes."""
    if trace.block_tokens == BLOCK_TOKENS:
        return trace
    size = trace.block_tokens
    click.echo(
        f"note: {path}: blocks of {size} tokens become blocks of {BLOCK_TOKENS}: less is shared", err=True
    )
    return coarsened(trace)


def sessions_of(num_requests: int, rate: float, seed: int) -> Trace:
    """Make a trace. Ids are numbers in the order in which blocks come; a partial block is never shared."""
    source, ids = Sessions(seed, num_requests, rate, SessionMix(), BLOCK_TOKENS), dict[int, int]()
    fresh, now_s, made = 0, 0.0, list[TraceRequest]()
    for _ in range(num_requests):
        request = source.next()
        now_s += request.after_s
        length, named = len(request.token_ids), list[int]()
        for key in [*request.keys, *([None] if length % BLOCK_TOKENS else [])]:
            number = fresh if key is None else ids.setdefault(key, fresh)
            fresh += number == fresh
            named.append(number)
        made.append(TraceRequest(round(now_s * 1e3), length, request.most_tokens, named))
    return Trace(made)
