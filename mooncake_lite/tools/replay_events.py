"""`mooncake-lite replay-events FILE`: runs recorded events through a new control plane and compares effects.

Mounted by `mooncake_lite.cli`; the file is that of `recording.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import click

from mooncake_lite.conductor.recording import Digester, Entry, Recording
from mooncake_lite.control import Control
from mooncake_lite.control.effects import Effect, Forget
from mooncake_lite.control.readable import readable

REPORT_EVERY = 1000
"""Events between two updates of the progress bar."""

SHOWN_EFFECTS = 40


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event whose effects differ from the recorded ones.

    number    of the event, from 1
    effects   those of the replay
    raised    what the replay raised instead, "" when it did not
    """

    number: int
    entry: Entry
    effects: list[Effect]
    raised: str


@dataclass(slots=True)
class Replayed:
    """The outcome of a replay.

    events           how many were replayed
    first_s, last_s  times of the first and the last of them
    ended            requests by outcome
    open_requests    requests that had not ended when the recording ended
    """

    events: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    ended: dict[str, int] = field(default_factory=dict)
    open_requests: int = 0
    difference: Difference | None = None


def replay_events(recording: Recording, told: Callable[[int], None] = lambda _: None) -> Replayed:
    """Apply all events to a new control plane, up to the first difference.

    told   called from time to time with the number of bytes read so far

    Raises RecordingError if the file is damaged.
    """
    control = Control(recording.header.config)
    digester = Digester()
    outcome = Replayed()
    for entry in recording.entries():
        outcome.events += 1
        outcome.first_s = entry.now if outcome.events == 1 else outcome.first_s
        outcome.last_s = entry.now
        effects: list[Effect] = []
        raised = ""
        try:
            effects = control.on(entry.event, entry.now)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        if entry.digest != (None if raised else digester.digest(effects)):
            outcome.difference = Difference(outcome.events, entry, effects, raised)
            break
        for effect in effects:
            if isinstance(effect, Forget):
                outcome.ended[effect.outcome] = outcome.ended.get(effect.outcome, 0) + 1
        if outcome.events % REPORT_EVERY == 0:
            told(recording.read_bytes)
    outcome.open_requests = control.open_requests
    return outcome


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> int:
    """Replay FILE, a recording of `mooncake-lite serve --record FILE`, and compare the effects.

    The command applies every recorded event to a new control plane. Exit code 0: the effects of every event
    equal those of the recorded run. Exit code 1: they differ, and the first difference is shown.
    """
    from mooncake_lite.config.progress import bar

    with closing(Recording(file)) as recording:
        began = time.perf_counter()
        with bar("replaying", recording.num_bytes) as update:
            outcome = replay_events(recording, lambda done: update(completed=done))
        _show(file, recording, outcome, time.perf_counter() - began)
    return 1 if outcome.difference else 0


def _show(file: Path, recording: Recording, outcome: Replayed, wall_s: float) -> None:
    rate = outcome.events / wall_s if wall_s else 0.0
    requests = ", ".join(f"{count:,} {name}" for name, count in sorted(outcome.ended.items())) or "none"
    click.echo(
        f"{file}: {outcome.events:,} events of {outcome.last_s - outcome.first_s:,.1f} s, made by "
        f"mooncake-lite {recording.header.version}; replayed in {wall_s:.1f} s, {rate:,.0f} events/s"
    )
    click.echo(f"requests: {requests}; {outcome.open_requests:,} open")
    if recording.torn_bytes:
        click.echo(f"the last event is cut off after {recording.torn_bytes} bytes: the run was killed")
    found = outcome.difference
    if found is None:
        click.echo("equal: every event has the effects that were recorded")
        return
    after_s = found.entry.now - outcome.first_s
    click.echo(f"first difference: event {found.number:,}, {after_s:.6f} s after the first event:")
    click.echo(f"  {readable(found.entry.event)}")
    recorded = "an exception" if found.entry.digest is None else f"digest {found.entry.digest:016x}"
    click.echo(f"recorded: {recorded}; replayed: {found.raised or f'{len(found.effects)} effects'}")
    for effect in found.effects[:SHOWN_EFFECTS]:
        click.echo(f"  {readable(effect)}")
    if len(found.effects) > SHOWN_EFFECTS:
        click.echo(f"  ... and {len(found.effects) - SHOWN_EFFECTS} more")
