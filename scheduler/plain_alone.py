"""The bound of the queue `predicted`, computed while it runs: first come, first served on plain slots.

Kept by `scheduler.held_line`. The same requests are served by virtual slots, as many as there are plain ones,
each for as long as it really takes. Why none may begin later than there: scheduler/queues/predicted.py.

    real       joins ---- begins ============ ends
    virtual    joins -------------- begins ============ ends      the same duration, so it is known by then

Rules.
  Anew      When slots come or go, or after a time in which no request could be served, the virtual slots
            begin with what the plain slots hold, and those that wait join then. The sums so far stay.
  Followed  A request for several answers, which one instance must have room for, begins here only when it has
            really begun. So does a preempted one: those that it goes before may have begun, and not here. The
            bound then says nothing about its own wait. For later ones it holds.
  Left      A request that leaves the line has begun and ended then: here it takes no time either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from scheduler.line import FIRST, Key, Line

MOST_WAITING = 10_000
"""Most requests in the virtual line; beyond it, the virtual slots begin anew. Under a load that the plain
slots alone could not carry, that line grows without end, and the bound with it."""

ROUNDING_S = 1e-6
"""Sums of durations differ from times by less."""


class Bound(NamedTuple):
    """The guarantee with the numbers of a run, of the requests that have begun in both.

    waited_s   how long they waited for decode slots, together; most_s: the bound on it
    late       requests that began later than with the plain slots alone: 0, or the proof is wrong
    """

    requests: int = 0
    waited_s: float = 0.0
    most_s: float = 0.0
    late: int = 0


@dataclass(slots=True)
class _Job:
    """A request. slots: virtual ones that it needs; began_s: really, virtual_s: here; inf: not yet.

    follows   it must have begun really before it begins here
    ended_s   when its answers really ended, as many as it needs slots
    """

    joined_s: float
    slots: int
    follows: bool = False
    began_s: float = inf
    virtual_s: float = inf
    ended_s: list[float] = field(default_factory=list)
    number: str = ""


class PlainAlone:
    """The virtual slots.

    bound      the sums so far
    waiting    number -> job that waits here
    _open      request that has not really ended -> its job
    _line      the numbers, in the order of their keys
    _last      greatest key of those that have joined
    _ends      times at which virtual slots become free, as far as known: a heap
    """

    def __init__(self) -> None:
        self.bound = Bound()
        self.begin(0, {}, 0.0)

    def begin(self, slots: int, taken: Mapping[str, int], now: float) -> None:
        """Begin anew with so many slots. taken: request -> those of them that it has."""
        self._open = {name: _Job(now, plain, False, now, now) for name, plain in taken.items()}
        self._slots, self._free = slots, slots - sum(taken.values())
        self.waiting, self._line, self._number = dict[str, _Job](), Line(), 0
        self._last = FIRST
        self._ends: list[float] = []

    def advance(self, now: float) -> None:
        """Free the virtual slots that become free until now, and give them to those that wait."""
        while self._ends and self._ends[0] <= now:
            at = heappop(self._ends)
            self._free += 1
            self._serve(at)

    def joins(self, name: str, slots: int, key: Key, now: float, *, front: bool) -> None:
        """Let a request join the line. Its key decides where, as in the real one."""
        self._number += 1
        follows = slots > 1 or front or key < self._last
        self._last = max(key, self._last)
        job = _Job(now, min(slots, self._slots), follows, number=f"{self._number}")
        self._open[name] = self.waiting[job.number] = job
        self._line.add(job.number, key, front=front)
        self._serve(now)

    def begins(self, name: str, now: float) -> None:
        """Note that a request has really begun."""
        job = self._open[name]
        job.began_s = now
        self._settle(job)
        self._serve(now)

    def ends(self, name: str, answers: int, now: float) -> None:
        """Note that so many answers of a request have really ended. Without a plain slot it is unknown."""
        if (job := self._open.get(name)) is None:
            return
        for _ in range(min(answers, job.slots - len(job.ended_s))):
            job.ended_s.append(now)
            if job.virtual_s < inf:
                heappush(self._ends, job.virtual_s + (now - job.began_s))
        if len(job.ended_s) == job.slots:
            del self._open[name]

    def _serve(self, now: float) -> None:
        """Give free slots to the first of the line, as long as there are enough."""
        while (number := self._line.head()) is not None:
            job = self.waiting[number]
            if job.slots > self._free or (job.follows and job.began_s == inf):
                return
            self._line.remove(number)
            del self.waiting[number]
            self._free -= job.slots
            job.virtual_s = now
            self._settle(job)

    def _settle(self, job: _Job) -> None:
        """Count a request that has begun in both. The ends of its ended answers are then known here."""
        if max(job.began_s, job.virtual_s) < inf:
            for ended_s in job.ended_s:
                heappush(self._ends, job.virtual_s + (ended_s - job.began_s))
            requests, waited_s, most_s, late = self.bound
            waited_s, most_s = waited_s + job.began_s - job.joined_s, most_s + job.virtual_s - job.joined_s
            late += job.began_s > job.virtual_s + ROUNDING_S
            self.bound = Bound(requests + 1, waited_s, most_s, late)

    def check(self) -> None:
        """Assert the invariants."""
        self._line.check()
        assert self.waiting.keys() == set(self._line)
        assert all(job.virtual_s == inf for job in self.waiting.values())
        assert 0 <= self._free <= self._slots
