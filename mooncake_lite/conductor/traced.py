"""Tracing of the conductor: each event of the control plane, and the life of each request.

Made by `__main__` under --trace. It watches what goes into the control plane and what comes
out; neither the control plane nor a policy knows of it. See docs/how-to/trace.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.conductor.loop import ConductorRole
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.life import Stage
from mooncake_lite.ranks.traced import REQUESTS, STEPS, WAIT_FOR_MESSAGES, keep_lines
from mooncake_lite.tracing.lanes import Spans, Timeline
from mooncake_lite.tracing.tracer import PartFile, Tracer, share_nbytes


def conductor_tracer(config: ServeConfig, term: int) -> Tracer:
    """Open the part of the conductor, or continue that of the one before. Raises TracingError."""
    part = PartFile(Path(config.trace), 0, again=term > 0)
    return Tracer(0, "rank 0 conductor", part, share_nbytes(config.ranks + 1))


class TracedConductorRole(ConductorRole):
    """A conductor that traces. It also keeps what ranks on other hosts send for the trace.

    parts   of the ConductorRole
    """

    def __init__(self, tracer: Tracer, *parts: Any) -> None:
        super().__init__(*parts)
        self._tracer = tracer
        self._steps = Timeline(tracer, STEPS)
        self._spans = Spans(tracer, REQUESTS)
        self._open: dict[str, Stage] = {}
        self._turn_ended_ns = tracer.now_ns()
        self._own[m.TraceLines] = self.after_stop

    def step(self, received: Sequence[tuple[str, m.Message]]) -> None:
        """As ConductorRole.step; the time since the last one was a wait."""
        self._steps.wait(WAIT_FOR_MESSAGES, self._turn_ended_ns)
        super().step(received)
        self._turn_ended_ns = self._tracer.now_ns()
        self._tracer.flush_when_due()

    def after_stop(self, peer: str, message: m.Message) -> None:
        """Keep lines of a rank on another host, which come until all have stopped."""
        if isinstance(message, m.TraceLines):
            keep_lines(self.config, message)
        else:
            super().after_stop(peer, message)

    def close(self) -> None:
        """Close the role; the trace of rank 0 goes on until all ranks have stopped."""
        super().close()
        self._steps.close()

    def _decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Apply an event as ConductorRole does, and add it to the trace."""
        began_ns = self._tracer.now_ns()
        effects = super()._decide(event, now)
        self._steps.work(type(event).__name__, began_ns, _details(event, effects))
        self._follow(event, effects)
        return effects

    # ------------------------------------------------------------------------------ requests

    def _follow(self, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """Open, move on and close the spans of the requests that an event has changed."""
        named = dict.fromkeys(getattr(item, "request_id", "") for item in (event, *effects))
        if isinstance(event, ev.BlocksLoaded) or any(isinstance(effect, fx.LoadBlocks) for effect in effects):
            named |= dict.fromkeys(self._open)  # these name no request
        for request_id in named:
            if request_id:
                self._move(request_id, self.control.requests.stage_of(request_id))
        for effect in effects:
            if isinstance(effect, fx.Decided):
                self._spans.instant(effect.request_id, "placed", _placement(effect))
            elif isinstance(effect, fx.Forget):
                self._open.pop(effect.request_id, None)
                self._spans.close(effect.request_id, {"outcome": effect.outcome})

    def _move(self, request_id: str, stage: Stage) -> None:
        if stage is Stage.OVER or stage is self._open.get(request_id):
            return
        if request_id not in self._open:
            self._spans.open(request_id, request_id)
            self._spans.follow(request_id, request_id)
        self._open[request_id] = stage
        self._spans.stage(request_id, stage.value)


def _details(event: ev.Event, effects: Sequence[fx.Effect]) -> dict[str, Any]:
    """Describe an event by its numbers and names, and count what followed. Lists are left out."""
    found = {name: getattr(event, name) for name in event.__struct_fields__}
    plain = {name: value for name, value in found.items() if isinstance(value, str | int | float) and value}
    finite = {name: value for name, value in plain.items() if value != float("inf")}
    return finite | {"effects": dict(Counter(type(effect).__name__ for effect in effects))}


def _placement(effect: fx.Decided) -> dict[str, Any]:
    """Describe a decision, with the numbers that explain it."""
    where = {"prefill": effect.prefill, "decode": effect.decode, "cached tokens": effect.cached_tokens}
    return where | msgspec.structs.asdict(effect.terms)
