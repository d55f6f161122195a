"""Predicted and measured: how far the times that decided about a request were from those that it had.

Used by the conductor role, which shows it every event and its effects; /metrics has the result. It changes no
decision. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_lite.conductor.machine import Observer
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from scheduler import Costs

Observe = Callable[[str, float], None]
"""Takes "ttft" or "tbt", and a predicted time divided by the measured one."""


@dataclass(slots=True)
class _Request:
    """The predicted and the actual times of a request. Times of 0 are a guess and not compared.

    attempt     of its prefill; decodes_s: when its first sequence began to decode, 0 before
    """

    arrived_s: float
    attempt: int = 0
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    decodes_s: float = 0.0


class Predictions(Observer):
    """Compares the first prediction for each request with what ranks report about its first attempt.

    TTFT is from the arrival to the report that the prompt is computed, without the store before it. TBT is
    the time of decoding, from the loading of the KV on, divided by the tokens after the first. Preempted
    requests are not compared any more.
    """

    def __init__(self, costs: Costs, observe: Observe) -> None:
        self._costs, self._observe = costs, observe
        self._requests: dict[str, _Request] = {}

    def on(self, event: ev.Event, effects: Sequence[fx.Effect], now: float) -> None:
        """Take an event, and the effects that it had."""
        match event:
            case ev.RequestArrived(request_id):
                self._requests[request_id] = _Request(now)
            case ev.PrefillEnded() | ev.PromptComputed():
                self._computed(event, now)
            case ev.DecodeLoaded():
                if (request := self._of(event)) is not None:
                    request.decodes_s = now
            case ev.DecodeEnded():
                self._ended(event, now)
            case ev.Preempted(request_id=request_id) | ev.Swapped(request_id=request_id):
                self._requests.pop(request_id, None)
        for effect in effects:
            if isinstance(effect, fx.Decided):
                self._decided(effect, now)
            elif isinstance(effect, fx.Moved) and effect.request_id in self._requests:
                self._requests[effect.request_id].tbt_s = effect.tbt_s
            elif isinstance(effect, fx.Forget):
                self._requests.pop(effect.request_id, None)

    def _of(
        self, event: ev.PrefillEnded | ev.PromptComputed | ev.DecodeLoaded | ev.DecodeEnded
    ) -> _Request | None:
        request = self._requests.get(event.request_id)
        return request if request is not None and request.attempt == event.attempt else None

    def _decided(self, decided: fx.Decided, now: float) -> None:
        request = self._requests.get(decided.request_id)
        if request is not None and not request.attempt:
            request.attempt = decided.attempt
            if self._costs.is_measured:
                request.ttft_s = now - request.arrived_s + decided.terms.ttft_s
            if self._costs.is_step_measured:
                request.tbt_s = decided.terms.tbt_s

    def _computed(self, event: ev.PrefillEnded | ev.PromptComputed, now: float) -> None:
        request = self._of(event)
        if request is None:
            return
        store_s = event.store_s if isinstance(event, ev.PrefillEnded) else 0.0
        taken_s = now - store_s - request.arrived_s
        if request.ttft_s and taken_s > 0:
            self._observe("ttft", request.ttft_s / taken_s)
        request.ttft_s = 0.0  # a report that comes again is not compared
        if isinstance(event, ev.PromptComputed):
            request.decodes_s = now

    def _ended(self, ended: ev.DecodeEnded, now: float) -> None:
        request = self._of(ended)
        if request is not None and request.tbt_s and ended.answer_tokens > 1 and now > request.decodes_s > 0:
            self._observe("tbt", request.tbt_s * (ended.answer_tokens - 1) / (now - request.decodes_s))
