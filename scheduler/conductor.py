"""The Conductor's policy, first form: longest prefix, then least load, behind a bounded queue.

Called by `mooncake_lite.roles.conductor` with the time as an argument. The differences to Algorithm 1
of the paper (FAST'25) are listed in docs/explain/paper.md: no TTFT estimate decides yet. What is
replicated, hot_spots.py decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler.events import (
    BlockRemoved,
    BlockStored,
    DecodeEnded,
    Event,
    PrefillEnded,
    RankJoined,
    RequestDeferred,
    RequestDropped,
    RequestResumed,
)
from scheduler.prefix_index import PrefixIndex
from scheduler.requests import Placement, Rejection, Request

FIRST_GUESS_S_PER_TOKEN = 0.005
"""Prefill time per token before any was measured; it only shapes the first Retry-After."""

RETRY_AFTER_LIMITS_S = (1.0, 60.0)


@dataclass(slots=True)
class _PrefillRank:
    """One prefill rank: the requests that wait for it, and the one it works on.

    Invariant: pending_tokens is the sum of uncached tokens over queue and running.
    """

    rank: int
    node: int
    queue: deque[str] = field(default_factory=deque)
    running: str | None = None
    pending_tokens: int = 0


@dataclass(slots=True)
class _DecodeRank:
    """One decode rank.

    assigned  requests placed on it whose prefill has not begun
    active    requests that are being prefilled for it, or that it decodes
    """

    rank: int
    slots: int
    assigned: int = 0
    active: int = 0


@dataclass(slots=True)
class _Tracked:
    """A request between `decide` and its end."""

    request: Request
    prefill: int
    decode: int
    uncached_tokens: int
    cached_tokens: int
    stage: str = "waiting"  # waiting -> prefill -> decode


class Conductor:
    """Chooses ranks for requests and says which may start now.

    max_queue   requests that may wait for a prefill rank; one more is refused
    """

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.index = PrefixIndex()
        self._prefill: dict[int, _PrefillRank] = {}
        self._decode: dict[int, _DecodeRank] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._s_per_token = FIRST_GUESS_S_PER_TOKEN

    @property
    def num_waiting(self) -> int:
        """Requests accepted whose prefill has not begun."""
        return sum(len(rank.queue) for rank in self._prefill.values())

    @property
    def num_running(self) -> int:
        """Requests in prefill or decode."""
        return len(self._tracked) - self.num_waiting

    @property
    def prefill_s_per_token(self) -> float:
        """What prefill takes for one token, as measured lately; a guess before the first measurement."""
        return self._s_per_token

    def decide(self, request: Request, now: float) -> Placement | Rejection:
        """Place a request and queue it, or refuse it. `now` in seconds, any monotonic origin."""
        if not self._prefill or not self._decode:
            return Rejection(request.request_id, "no prefill or no decode rank has joined", 1.0)
        if request.request_id in self._tracked:
            return Rejection(request.request_id, f"request id {request.request_id} is in use", 0.0)
        if self.num_waiting >= self.max_queue:
            reason = f"{self.num_waiting} requests are waiting, the limit is {self.max_queue}"
            return Rejection(request.request_id, reason, self._retry_after_s())
        return self._place(request, front=False)

    def next_dispatches(self, now: float) -> list[Placement]:
        """Requests whose turn it is: their prefill rank is idle and their decode rank has a slot.

        Each is counted as running from here on, until PrefillEnded, RequestDeferred or RequestDropped.
        """
        ready = []
        for prefill in self._prefill.values():
            if prefill.running is not None or not prefill.queue:
                continue
            tracked = self._tracked[prefill.queue[0]]
            decode = self._decode[tracked.decode]
            if decode.active >= decode.slots:
                continue
            prefill.queue.popleft()
            prefill.running = tracked.request.request_id
            decode.assigned -= 1
            decode.active += 1
            tracked.stage = "prefill"
            ready.append(self._placement(tracked))
        return ready

    def on(self, event: Event, now: float) -> None:
        """Apply one event. An event about an unknown request changes nothing: it may already be over."""
        match event:
            case BlockStored() | BlockRemoved():
                self.index.on(event)
            case RankJoined():
                self._join(event)
            case PrefillEnded():
                self._prefill_ended(event)
            case DecodeEnded() | RequestDropped():
                self._forget(event.request_id)
            case RequestDeferred():
                self._defer(event.request_id)
            case RequestResumed():
                self._forget(event.request_id)
                self._place(
                    Request(
                        event.request_id, event.num_tokens, event.keys, event.block_tokens, event.max_tokens
                    ),
                    front=True,
                )

    # ------------------------------------------------------------------------------ choosing

    def _place(self, request: Request, front: bool) -> Placement:
        match = self.index.match(request.keys)
        cached = min(match.blocks * request.block_tokens, request.num_tokens - 1)
        prefill = min(
            self._prefill.values(),
            key=lambda rank: (-match.by_node.get(rank.node, 0), rank.pending_tokens, rank.rank),
        )
        decode = min(
            self._decode.values(), key=lambda rank: (rank.active + rank.assigned - rank.slots, rank.rank)
        )
        tracked = _Tracked(request, prefill.rank, decode.rank, request.num_tokens - cached, cached)
        self._tracked[request.request_id] = tracked
        (prefill.queue.appendleft if front else prefill.queue.append)(request.request_id)
        prefill.pending_tokens += tracked.uncached_tokens
        decode.assigned += 1
        return self._placement(tracked)

    @staticmethod
    def _placement(tracked: _Tracked) -> Placement:
        return Placement(tracked.request.request_id, tracked.prefill, tracked.decode, tracked.cached_tokens)

    def _retry_after_s(self) -> float:
        """Time until the shortest queue has moved by one request, from the measured prefill rate."""
        waits = [
            rank.pending_tokens * self._s_per_token / (len(rank.queue) + 1) for rank in self._prefill.values()
        ]
        low, high = RETRY_AFTER_LIMITS_S
        return min(high, max(low, min(waits)))

    # ------------------------------------------------------------------------------ events

    def _join(self, event: RankJoined) -> None:
        if event.role == "prefill":
            self._prefill[event.rank] = _PrefillRank(event.rank, event.node)
        elif event.role == "decode":
            self._decode[event.rank] = _DecodeRank(event.rank, event.slots)
        self.index.add_rank(event.rank, event.node)

    def _prefill_ended(self, event: PrefillEnded) -> None:
        if event.computed_tokens > 0 and event.seconds > 0:
            measured = event.seconds / event.computed_tokens
            self._s_per_token += 0.2 * (measured - self._s_per_token)
        tracked = self._tracked.get(event.request_id)
        if tracked is not None and tracked.stage == "prefill":
            self._leave_prefill(tracked)
            tracked.stage = "decode"

    def _defer(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.stage != "prefill":
            return
        prefill, decode = self._prefill[tracked.prefill], self._decode[tracked.decode]
        prefill.running = None
        prefill.queue.appendleft(request_id)
        decode.active -= 1
        decode.assigned += 1
        tracked.stage = "waiting"

    def _forget(self, request_id: str) -> None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        decode = self._decode[tracked.decode]
        if tracked.stage == "waiting":
            prefill = self._prefill[tracked.prefill]
            prefill.queue.remove(request_id)
            prefill.pending_tokens -= tracked.uncached_tokens
            decode.assigned -= 1
        else:
            if tracked.stage == "prefill":
                self._leave_prefill(tracked)
            decode.active -= 1

    def _leave_prefill(self, tracked: _Tracked) -> None:
        prefill = self._prefill[tracked.prefill]
        prefill.running = None
        prefill.pending_tokens -= tracked.uncached_tokens

    def check(self) -> None:
        """Assert what must hold between two calls."""
        self.index.check()
        for prefill in self._prefill.values():
            mine = [t for t in self._tracked.values() if t.prefill == prefill.rank and t.stage != "decode"]
            assert prefill.pending_tokens == sum(t.uncached_tokens for t in mine)
            waiting = {t.request.request_id for t in mine if t.stage == "waiting"}
            assert set(prefill.queue) == waiting
            assert len(prefill.queue) == len(waiting)
            running = [t.request.request_id for t in mine if t.stage == "prefill"]
            assert running == ([prefill.running] if prefill.running else [])
        for decode in self._decode.values():
            stages = [t.stage for t in self._tracked.values() if t.decode == decode.rank]
            assert decode.assigned == stages.count("waiting")
            assert decode.active == len(stages) - decode.assigned
            assert decode.active <= decode.slots
