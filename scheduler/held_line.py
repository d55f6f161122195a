"""The held line: accepted requests for which no decode instance has had a free slot.

Kept by `scheduler.state`. Books only; `scheduler.queues` decides about the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isclose

from scheduler.line import FIRST, Key, Line
from scheduler.plain_alone import MOST_WAITING, Bound, PlainAlone
from scheduler.queues.contract import Queue
from scheduler.requests import Request
from scheduler.trusted_slots import TrustedSlots


@dataclass(frozen=True, slots=True)
class Held:
    """A request without a place. prefill_s: predicted without corrections; key: its key in lines."""

    request: Request
    prefill_s: float
    key: Key


class HeldLine:
    """One line for all instances.

    prefill_s   predicted seconds of the prefills of all that wait, without corrections
    sequences   decode slots that they need
    slots       decode slots, and those of them that go by predicted length
    is_served   requests may begin. While none may, no bound is computed

    _by_length holds the requests for which trusted slots suffice, the shortest predicted answer first.
    _alone      computes the bound where some slots go by predicted length and others do not
    _anew       it must begin anew
    """

    def __init__(self, queue: Queue) -> None:
        self.prefill_s = 0.0
        self.sequences = 0
        self._queue = queue
        self._held: dict[str, Held] = {}
        self._line = Line()
        self._by_length = Line()
        self.slots = TrustedSlots(queue.trust)
        self.is_served = self._anew = True
        self._alone = PlainAlone() if 0 < queue.trust < 1 else None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: Request, prefill_s: float, now: float, *, front: bool) -> None:
        """Let a request join. front: before all others."""
        alone = self._now_alone(now)
        key = FIRST if front else self._queue.key(request, prefill_s, now)
        if alone is not None:
            alone.joins(request.request_id, request.n, key, now, front=front)
        self._held[request.request_id] = Held(request, prefill_s, key)
        self.prefill_s += prefill_s
        self.sequences += request.n
        self._line.add(request.request_id, key, front=front)
        self._join_by_length(request, front)

    def _join_by_length(self, request: Request, front: bool) -> None:
        if request.n <= self.slots.trusted:
            length = FIRST if front else (request.predicted_tokens,)
            self._by_length.add(request.request_id, length, front=front)

    def head(self) -> Request | None:
        """Return the request whose turn it is; None if none waits, or if all have to wait longer."""
        name = self._line.head()
        if name is None:
            return None
        first, slots = self._held[name].request, self.slots
        if not self._queue.trust:
            return first
        if slots.is_turn_of_first(first.n):
            return first if slots.has_free(first.n) else None
        name = self._by_length.head()
        shortest = self._held[name].request if name is not None else None
        return shortest if shortest is not None and slots.has_trusted(shortest.n) else None

    def place(self, request: Request, now: float) -> Held | None:
        """Give a request its slots. It leaves the line if it waits there. Returns what it was there."""
        name = request.request_id
        if (alone := self._now_alone(now)) is not None:
            if name not in self._held:
                alone.joins(name, request.n, self._queue.key(request, 0.0, now), now, front=False)
            alone.begins(name, now)
        is_first = self._line.head() in (None, name)
        self.slots.take(name, request.n, is_first=is_first)
        return self._remove(name)

    def leave(self, request_id: str, now: float) -> Held | None:
        """Let a request leave that gets no slots. Returns what it was; None for an unknown one."""
        if request_id in self._held and (alone := self._now_alone(now)) is not None:
            alone.begins(request_id, now)
            alone.ends(request_id, self._held[request_id].request.n, now)
        return self._remove(request_id)

    def _remove(self, request_id: str) -> Held | None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._line.remove(request_id)
            self._by_length.remove(request_id)
            self.prefill_s = self.prefill_s - held.prefill_s if self._held else 0.0
            self.sequences -= held.request.n
        return held

    def keep(self, request_id: str, slots: int, now: float) -> None:
        """Free all slots of a request but these: its other answers have ended."""
        if (alone := self._now_alone(now)) is not None:
            alone.ends(request_id, sum(self.slots.taken.get(request_id, ())) - slots, now)
        self.slots.keep(request_id, slots)

    def bound(self, until_s: float = -inf) -> Bound | None:
        """Return the guarantee with the numbers of this run. None: the queue gives none.

        until_s   inf once all requests have ended; left out: the last change
        """
        if self._alone is None:
            return None
        if not self._anew:
            self._alone.advance(until_s)
        return self._alone.bound

    def _now_alone(self, now: float) -> PlainAlone | None:
        """Return the plain slots alone as they are now, before a change; None: there is no bound now."""
        alone, plain = self._alone, self.slots.plain
        if alone is None or not self.is_served or not plain:
            self._anew = True
            return None
        if self._anew or len(alone.waiting) > MOST_WAITING:
            self._anew = False
            alone.begin(plain, {name: one[0] for name, one in self.slots.taken.items() if one[0]}, now)
            for name in self._line:
                held = self._held[name]
                alone.joins(name, held.request.n, held.key, now, front=False)
        alone.advance(now)
        return alone

    def change_slots(self, slots: int) -> None:
        """Add slots of an instance; a negative number removes free ones. Look again which requests fit."""
        self._anew = True
        self.slots.change(slots)
        self._by_length = Line()
        for held in self._held.values():
            self._join_by_length(held.request, held.key == FIRST)

    def change_key(self, request_id: str, key: Key) -> None:
        """Give a request that waits another key."""
        self._held[request_id] = replace(self._held[request_id], key=key)
        self._line.change_key(request_id, key)

    def check(self) -> None:
        """Assert the invariants."""
        assert isclose(self.prefill_s, sum(one.prefill_s for one in self._held.values()), abs_tol=1e-6)
        assert self.sequences == sum(one.request.n for one in self._held.values())
        assert self._held.keys() == set(self._line)
        self._line.check()
        self._by_length.check()
        fits = {name for name, one in self._held.items() if one.request.n <= self.slots.trusted}
        assert set(self._by_length) == fits
        if self._alone is not None:
            self._alone.check()
        self.slots.check()
