"""The line of accepted requests without a place: no decode instance has had a free slot for them.

Kept by `scheduler.state`. Books only; `scheduler.queues` decides about the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

from scheduler.line import FIRST, Key, Line
from scheduler.queues.contract import Queue
from scheduler.requests import Request
from scheduler.trusted_slots import TrustedSlots


@dataclass(frozen=True, slots=True)
class Held:
    """A request without a place. prefill_s: predicted without corrections; key: of its place in lines."""

    request: Request
    prefill_s: float
    key: Key


class HeldLine:
    """One line for all instances.

    prefill_s   predicted seconds of the prefills of all that wait, without corrections
    sequences   decode slots that they need
    slots       decode slots, and which of them go by predicted length
    """

    def __init__(self, queue: Queue) -> None:
        self.prefill_s = 0.0
        self.sequences = 0
        self._queue = queue
        self._held: dict[str, Held] = {}
        self._line = Line()
        self._by_length = Line()
        self.slots = TrustedSlots(queue.trust)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: Request, prefill_s: float, now: float, *, front: bool) -> None:
        """Let a request join. front: before all others."""
        key = FIRST if front else self._queue.key(request, prefill_s, now)
        self._held[request.request_id] = Held(request, prefill_s, key)
        self.prefill_s += prefill_s
        self.sequences += request.n
        self._line.add(request.request_id, key, front=front)
        self._by_length.add(request.request_id, FIRST if front else (request.predicted_tokens,), front=front)

    def head(self) -> Request | None:
        """Return the request that may take the next slot; None when the line is empty."""
        name = self._line.head()
        if name is None:
            return None
        first = self._held[name].request
        if self._queue.trust and not self.slots.has_plain(first.n):
            shortest = self._by_length.head()
            assert shortest is not None, "both lines have the same requests"
            return self._held[shortest].request
        return first

    def leave(self, request_id: str) -> Held | None:
        """Let a request leave. Returns what it was; None for an unknown one."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._line.remove(request_id)
            self._by_length.remove(request_id)
            self.prefill_s = self.prefill_s - held.prefill_s if self._held else 0.0
            self.sequences -= held.request.n
        return held

    def check(self) -> None:
        """Assert the invariants."""
        assert isclose(self.prefill_s, sum(one.prefill_s for one in self._held.values()), abs_tol=1e-6)
        assert self.sequences == sum(one.request.n for one in self._held.values())
        assert self._held.keys() == set(self._line)
        self._line.check()
        self._by_length.check()
        assert set(self._line) == set(self._by_length)
        self.slots.check()
