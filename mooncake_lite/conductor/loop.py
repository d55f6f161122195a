"""The conductor role: the machine of `machine.py` with a clock, a hub, and what looks on.

It receives, sends what the machine returns, and tells it what could not be sent. Recordings, traces, KV
events and explanations are made here. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_lite import messages as m
from mooncake_lite.conductor.kv_event_stream import KVEventStream
from mooncake_lite.conductor.machine import UNREACHABLE, Conductor, Facts, Observer, Sent, carry
from mooncake_lite.conductor.predictions import Predictions
from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.conductor.timed_choice import TimedChoice
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from scheduler.placement.decisions import Decisions
from transport.channel import Hub
from transport.errors import WireError

TICK_S = 0.1
"""Longest wait for a message. It bounds the delay of periodic work; any value works that costs little CPU."""


class ConductorRole:
    """Drives a conductor with messages; `run` is the loop.

    hub        the bound channel that every other process speaks to
    stream     for external listeners of KV events; None without any
    recorder   of events; None when nothing is recorded
    clock      seconds; never moves backwards
    machine    the conductor itself
    decisions  the last ones, for `mooncake-lite explain`
    on_ready   called when the cluster is ready for the first time; on_end: when all ranks have stopped
    """

    def __init__(
        self,
        config: ServeConfig,
        hub: Hub,
        decides: ControlConfig,
        host: str = "",
        stream: KVEventStream | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.hub = config, hub
        self.on_ready: Callable[[], object] = lambda: None
        self.on_end: Callable[[], object] = lambda: None
        self._stream, self._recorder, self._clock = stream, recorder, clock
        self.decisions = Decisions(decides.placement)
        self._choice = TimedChoice(self.decisions.choose)
        self.control = Control(decides, self._choice)
        observers: list[Observer] = [] if stream is None else [stream]
        slots = config.max_num_partial_prefills, config.max_num_seqs
        self.machine = Conductor(
            Facts(*slots, config.enable_prefix_caching, host), self.control, decide=self._decide,
            decided_s=self._choice.seconds, watch=self._watch, channel=hub.counters.as_dict,
            observers=observers,
        )  # fmt: skip
        observers.append(Predictions(self.control.state.costs, self.machine.metrics.observe_prediction))
        self._own: dict[type, Callable[[str, Any], None]] = {m.Explain: self._explain}

    # ------------------------------------------------------------------------------ the loop

    def run(self) -> m.Stop:
        """Serve until told to stop, or until a rank is lost. Returns the Stop that ended the loop."""
        while self.machine.stop is None:
            wait_s = min(TICK_S, max(0.0, self.machine.wake_at - self._clock()))
            self.step(self.hub.receive(wait_s))
        return self.machine.stop

    def step(self, received: Sequence[tuple[str, m.Message]]) -> None:
        """Apply messages in order, then deadlines and listeners."""
        for peer, message in received:
            own = self._own.get(type(message))
            if own is not None:
                own(peer, message)
            else:
                self._send(self.machine.on(peer, message, self._clock()))
        self._send(self.machine.tick(self._clock()))
        if self.machine.ready:
            self.on_ready()
            self.on_ready = lambda: None
        if self._stream is not None:
            self._stream.serve()
        if self._recorder is not None and not received:
            self._recorder.flush()

    def close(self) -> None:
        """Close the stream and the recording."""
        if self._stream is not None:
            self._stream.close()
        if self._recorder is not None:
            self._recorder.close()

    def after_stop(self, peer: str, message: m.Message) -> None:
        """Handle a message that arrives while ranks flush: a steward that says hello now is told to stop."""
        if isinstance(message, m.StewardHello):
            self._send(self.machine.on(peer, message, self._clock()))

    def _send(self, sent: Sequence[Sent]) -> None:
        """Send what the machine returned, and print what it has to say."""
        if not sent:
            return  # as after most ticks
        carry(self.machine, sent, self._problem_with, self._clock)
        for line in self.machine.notices:
            print(f"mooncake-lite: {line}", file=sys.stderr, flush=True)
        self.machine.notices.clear()

    def _problem_with(self, sent: Sent) -> str | None:
        """Send a message. Returns why that is impossible; None: it is sent."""
        try:
            return None if self.hub.send(sent.peer, sent.message) else UNREACHABLE
        except WireError as error:
            return str(error)

    # ------------------------------------------------------------------------------ what looks on

    def _decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Call `Control.on` and record the event, also if the call raises."""
        if self._recorder is None:
            return self.control.on(event, now)
        effects = None
        try:
            effects = self.control.on(event, now)
            return effects
        finally:
            self._recorder.record(event, now, effects)
            if effects is None:
                self._recorder.flush()

    def _watch(self, event: ev.Event, effect: fx.Effect) -> None:
        """Note decisions: for explanations, and their times for /metrics."""
        if isinstance(effect, fx.Decided):
            self.decisions.placed(effect.request_id)
            for seconds in self._choice.taken_s:
                self.machine.metrics.observe_decision(seconds)
        elif isinstance(effect, fx.Reject):
            self.decisions.refused(effect.request_id, effect.reason)

    def _explain(self, peer: str, query: m.Explain) -> None:
        explanation = self.decisions.explain(query.request)
        last = [] if explanation is not None else self.decisions.request_ids
        self._send([Sent(peer, m.Explained(explanation, last))])
