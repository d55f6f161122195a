"""The books of one instance, its queue and its slots, and of one request that has a place. Plain data.

Kept by `scheduler.state`, read by policies and admission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import NamedTuple

from scheduler.line import Key, Line
from scheduler.requests import Placement, Request

DUTIES_OF_INSTANCES = frozenset({"prefill"}), frozenset({"decode"}), frozenset({"prefill", "decode"})
"""The possible duties of an instance: one of the two, or both."""


class Started(NamedTuple):
    """A request in a prefill slot: the predicted seconds of its work, and when it started."""

    seconds: float
    at_s: float


@dataclass(slots=True)
class PrefillInstance:
    """One instance that prefills.

    queue            requests placed on it, in the order in which they will start
    running          requests that occupy one of its prefill slots -> what `start` has added
    pending_tokens   uncached tokens of both
    waiting_s        seconds of the prefills in its queue, as the costs predict them without corrections
    left_s           predicted seconds of work that the running ones have left at the time `as_of_s`
    row              its row in the columns

    Invariant: left_s is at least 0, and at most the sum of the predicted seconds of the running requests.
    Slots share one machine, so work takes as long one after the other as side by side.
    """

    instance: int
    node: int
    slots: int
    queue: Line = field(default_factory=Line)
    running: dict[str, Started] = field(default_factory=dict)
    pending_tokens: int = 0
    waiting_s: float = 0.0
    left_s: float = 0.0
    as_of_s: float = 0.0
    row: int = 0

    @property
    def ends_s(self) -> float:
        """Return the predicted time at which the running requests end; not after now if none runs."""
        return self.as_of_s + self.left_s

    def start(self, request_id: str, seconds: float, now: float) -> None:
        """Let a request occupy a slot, with the predicted seconds of its work."""
        self.left_s = max(0.0, self.ends_s - now) + seconds
        self.as_of_s = now
        self.running[request_id] = Started(seconds, now)

    def leave(self, request_id: str, now: float, *, is_done: bool) -> None:
        """Free a request's slot. If it is not done, it gives back the seconds that it cannot have used."""
        started = self.running.pop(request_id)
        unused_s = 0.0 if is_done else max(0.0, started.seconds - (now - started.at_s))
        left_s = max(0.0, self.ends_s - now) - unused_s
        self.left_s = max(0.0, min(left_s, sum(one.seconds for one in self.running.values())))
        self.as_of_s = now

    def check(self, placed: Mapping[str, Placed]) -> None:
        """Assert the invariants. placed: every request that has a place."""
        here = [*self.queue, *self.running]
        assert len(set(here)) == len(here), "a request is queued and running"
        assert all(placed[name].placement.prefill == self.instance for name in here)
        assert not any(placed[name].decodes for name in here), "a request decodes before its prefill ends"
        assert len(self.running) <= self.slots
        self.queue.check()
        started_s = sum(one.seconds for one in self.running.values())
        assert 0.0 <= self.left_s <= started_s or isclose(self.left_s, started_s, abs_tol=1e-6)
        expected = sum(placed[name].prefill_s for name in self.queue)
        assert isclose(self.waiting_s, expected, abs_tol=1e-6)
        assert self.pending_tokens == sum(placed[name].uncached_tokens for name in here)


@dataclass(slots=True)
class DecodeInstance:
    """One instance that decodes.

    free             slots that no request has
    taken            request placed on it -> its slots, one per answer, from `place` until it is forgotten
    context          tokens that their sequences attend to, half of each predicted answer included
    coming           of the slots that are taken, those of requests whose prefill has not ended
    coming_context   of the context, theirs
    row              its row in the columns
    """

    instance: int
    slots: int
    free: int
    node: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    context: float = 0.0
    coming: int = 0
    coming_context: float = 0.0
    row: int = 0

    def take(self, request_id: str, slots: int, context: float, *, coming: bool) -> int:
        """Give a request this many slots. Returns how many more than it had.

        context   tokens that each of its sequences attends to; coming: its prefill has not ended
        """
        more = slots - self.taken.get(request_id, 0)
        self.taken[request_id] = slots
        if not slots:
            del self.taken[request_id]
        self.free -= more
        self.context = self.context + more * context if self.taken else 0.0
        if coming:
            self._expect(more, context)
        return more

    def begin(self, request_id: str, context: float) -> None:
        """Let a request decode whose prefill has ended."""
        self._expect(-self.taken[request_id], context)

    def _expect(self, slots: int, context: float) -> None:
        self.coming += slots
        self.coming_context = self.coming_context + slots * context if self.coming else 0.0

    def check(self, placed: Mapping[str, Placed]) -> None:
        """Assert the invariants. placed: every request that has a place."""
        assert all(placed[name].placement.decode == self.instance for name in self.taken)
        assert self.free == self.slots - sum(self.taken.values()) >= 0
        assert all(1 <= slots <= placed[name].request.n for name, slots in self.taken.items())
        context = sum(placed[name].request.context * slots for name, slots in self.taken.items())
        assert isclose(self.context, context, abs_tol=1e-3)
        coming = {name: slots for name, slots in self.taken.items() if not placed[name].decodes}
        assert self.coming == sum(coming.values())
        context = sum(placed[name].request.context * slots for name, slots in coming.items())
        assert isclose(self.coming_context, context, abs_tol=1e-3)


@dataclass(slots=True)
class Placed:
    """A request that has a place.

    prefill_s   predicted seconds of its prefill, without corrections
    key         of its place in the queue
    decodes     its prefill has ended, or it needs none
    """

    request: Request
    placement: Placement
    prefill_s: float = 0.0
    key: Key = ()
    decodes: bool = False

    @property
    def uncached_tokens(self) -> int:
        """Return the tokens that its prefill is expected to compute."""
        return self.request.num_tokens - self.placement.cached_tokens
