"""Membership: heartbeats both ways, and reports of the kernel about processes of the same host.

The conductor has a Monitor, every other process a Heart. Each has a thread of its own, so that neither a long
prefill nor compiling is taken for a death. Knows names, not roles. All times are durations on the own
monotonic clock. A door to transport/messaging. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from transport.channel import CurveKeys, Hub, Spoke
from transport.messaging.pids import ProcessWatch, process_is_stopped
from transport.threads import OnFatal, start_thread
from transport.wire import Decoder

BEAT_BYTES = 64
"""Largest message here: a tag and a number take less."""

STUCK_FACTOR = 3
"""A silent process of this host that exists and is not suspended gets this many times dead_s.

The kernel reports a death at once. So such a process is alive, and its heart's thread gets no core or no
interpreter. Any small factor works: it only has to outlast such a pause, and to end at last.
"""


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Heart -> Monitor: show that the process is alive."""

    number: int


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Heart -> Monitor: the process ends on purpose, which is no loss."""


class BeatAnswer(msgspec.Struct, frozen=True, tag="Answer", array_like=True):
    """Monitor -> Heart: answer a Beat. The tag on the wire is "Answer". term: of Monitor.term."""

    number: int
    term: int = 0


class Heart:
    """Beats to a Monitor from a thread of its own, and notes its answers.

    endpoint     of the Monitor
    name         as the Monitor expects it
    interval_s   between beats; a tenth of the Monitor's dead_s or less
    on_fatal     called when the thread dies
    on_term      called when the Monitor's term has changed
    term         the Monitor's, as it last answered
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        interval_s: float = 0.2,
        curve: CurveKeys | None = None,
        *,
        on_fatal: OnFatal | None = None,
        on_term: Callable[[], object] = lambda: None,
    ):
        self._spoke = Spoke(endpoint, name, Decoder(BeatAnswer, BEAT_BYTES), curve, max_send_bytes=BEAT_BYTES)
        self._interval_s = interval_s
        self.term, self._on_term = 0, on_term
        self._heard = time.monotonic()
        self._running = True
        self._thread = start_thread(f"heart {name}", self._run, on_fatal=on_fatal)

    def seconds_since_monitor(self) -> float:
        """Return the seconds since the Monitor last answered, or since the start.

        Time in which this process itself was stopped does not count.
        """
        return time.monotonic() - self._heard

    def stop(self) -> None:
        """Send Leave and end the thread, within a second. May be called twice."""
        self._running = False
        self._spoke.wake()
        self._thread.join(timeout=2 * self._interval_s + 1)

    def _run(self) -> None:
        number = 0
        next_beat = time.monotonic()
        while self._running:
            late_s = time.monotonic() - next_beat
            if late_s > 5 * self._interval_s:  # this process was stopped, and could not read answers
                self._heard += late_s
            if late_s >= 0:
                number += 1
                self._spoke.send(Beat(number))
                next_beat = time.monotonic() + self._interval_s
            for answer in self._spoke.receive(max(0.0, next_beat - time.monotonic())):
                self._heard = time.monotonic()
                if answer.term > self.term:
                    self.term = answer.term
                    self._on_term()
        self._spoke.send(Leave())
        self._spoke.close()


@dataclass(slots=True)
class _Peer:
    """One name that beats. heard_s: time of its last beat on this process's clock; None before the first.

    ending     why it was killed, and killed_s when; "" while it may live
    """

    heard_s: float | None
    expected_s: float
    pid: int | None = None
    ending: str = ""
    killed_s: float = 0.0


class Monitor:
    """Listens for the beats of all expected names, and reports each loss once.

    endpoints   to bind, as for a Hub; .endpoints has the real ones
    expected    names that will beat
    tick_s      between two checks for silence; a thread that is two ticks late forgives all silence
    dead_s      silence after which a peer is lost; STUCK_FACTOR times that for a watched process that exists
                and is not suspended
    first_s     longest time until the first beat of a peer
    on_lost     called on the Monitor's thread with (name, reason, whether its end was seen); must be short
                and must not raise
    on_fatal    called when that thread dies
    starting    while True, every silence may last first_s, even after a first beat: a rank that imports torch
                or compiles holds its interpreter, for many seconds on a cold or busy disk
    term        a number that every heart learns with its next answer; it only grows

    A process whose number watch_pid() told is lost at once when it ends. A silent one is killed first, so
    that it writes nothing more when it is reported. If this thread did not run for a while (a stopped or
    starved process), silence in that time does not count for any peer.
    """

    def __init__(
        self,
        endpoints: Iterable[str],
        expected: Iterable[str],
        tick_s: float = 0.25,
        dead_s: float = 3.0,
        curve: CurveKeys | None = None,
        *,
        on_lost: Callable[[str, str, bool], None] | None = None,
        on_fatal: OnFatal | None = None,
        first_s: float = 120.0,
        starting: bool = False,
    ):
        now = time.monotonic()
        self._peers = {name: _Peer(None, now) for name in expected}
        self._lost: dict[str, str] = {}
        self._left: set[str] = set()
        self._tick_s, self._dead_s, self._first_s = tick_s, dead_s, first_s
        self._on_lost = on_lost
        self.starting, self.term = starting, 0
        self._lock = threading.Lock()
        self._wanted: list[tuple[str, int]] = []
        self._to_end: list[tuple[str, str]] = []
        self._watch = ProcessWatch()
        self._hub = Hub(
            endpoints,
            Decoder(Beat | Leave, BEAT_BYTES),
            curve,
            may_join=lambda name: name in self._peers,
            max_send_bytes=BEAT_BYTES,
        )
        self.endpoints = self._hub.endpoints
        self._running = True
        self._thread = start_thread("monitor", self._run, on_fatal=on_fatal)

    def forget(self, name: str) -> None:
        """Forget a name that ends on purpose: its silence or exit is no loss."""
        with self._lock:
            self._left.add(name)

    def watch_pid(self, name: str, pid: int) -> None:
        """Watch process `pid` of this host for `name`: its end is a loss that is noticed at once."""
        with self._lock:
            self._peers.setdefault(name, _Peer(None, time.monotonic()))
            self._wanted.append((name, pid))
        self._hub.wake()

    def end(self, name: str, reason: str) -> None:
        """End a peer: kill its process, if it is watched, and report its loss for this reason."""
        with self._lock:
            self._to_end.append((name, reason))
        self._hub.wake()

    def lost(self) -> dict[str, str]:
        """Return {name: reason} of every lost peer, in order of loss."""
        with self._lock:
            return dict(self._lost)

    def counters(self) -> dict[str, int]:
        """Return the counters of the underlying channel, as Counters.as_dict()."""
        return self._hub.counters.as_dict()

    def stop(self) -> None:
        """End the thread. Nothing is reported afterwards. May be called twice."""
        self._running = False
        self._hub.wake()
        self._thread.join(timeout=self._tick_s + 2)

    def _run(self) -> None:
        last = time.monotonic()
        while self._running:
            beats = self._hub.receive(self._tick_s)
            now = time.monotonic()
            self._forgive(now - last - self._tick_s)
            last = now
            for name, message in beats:
                self._note(name, message, now)
            self._start_watches()
            for name, reason, ended in self._dead(now):
                self._report(name, reason, ended)
        self._watch.close()
        self._hub.close()

    def _forgive(self, late_s: float) -> None:
        """Extend all limits by late_s: this thread ran so much later than planned."""
        if late_s <= 2 * self._tick_s:
            return
        with self._lock:
            for peer in self._peers.values():
                peer.expected_s += late_s
                if peer.heard_s is not None:
                    peer.heard_s += late_s

    def _note(self, name: str, message: Beat | Leave, now: float) -> None:
        if isinstance(message, Leave):
            self.forget(name)
            return
        with self._lock:
            self._peers[name].heard_s = now
        self._hub.send(name, BeatAnswer(message.number, self.term))

    def _start_watches(self) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, []
            for name, pid in wanted:
                self._peers[name].pid = pid
        for name, pid in wanted:
            self._unwatch(self._watch.remove(name))
            fd = self._watch.add(name, pid)
            if fd is not None:
                self._hub.watch_fd(fd)

    def _unwatch(self, fd: int | None) -> None:
        if fd is not None:
            self._hub.unwatch_fd(fd)

    def _dead(self, now: float) -> list[tuple[str, str, bool]]:
        """Return (name, reason, whether its end was seen) of peers that are newly lost."""
        with self._lock:
            to_end, self._to_end = self._to_end, []
            expected = [(name, peer) for name, peer in self._peers.items() if self._counts(name)]
            to_end += [(name, self._silence(self._judged(peer), now)) for name, peer in expected]
            found = [lost for name, reason in to_end if reason for lost in self._killed(name, reason, now)]
            for name, pid, fd in self._watch.ended():
                self._unwatch(fd)
                found.append((name, self._peers[name].ending or f"its process {pid} ended", True))
            first = {name: (name, reason, ended) for name, reason, ended in reversed(found)}
            return [one for one in first.values() if self._counts(one[0])]

    def _killed(self, name: str, reason: str, now: float) -> list[tuple[str, str, bool]]:
        """Kill a peer whose process is watched. Returns its loss if that is impossible, or takes too long."""
        peer = self._peers[name]
        if not self._counts(name):
            return []
        if peer.pid is None or (peer.ending and now - peer.killed_s > self._dead_s):
            return [(name, peer.ending or reason, False)]
        if not peer.ending:
            peer.ending, peer.killed_s = reason, now
            self._watch.kill(name)
        return []

    def _judged(self, peer: _Peer) -> _Peer:
        """Return a peer as its silence is judged: at the start, after a beat as before the first one."""
        if not self.starting or peer.heard_s is None:
            return peer
        return replace(peer, heard_s=None, expected_s=peer.heard_s)

    def _silence(self, peer: _Peer, now: float) -> str:
        """Return why this peer counts as dead by its silence, in some words; "" when it does not.

        Silence lasts since the last beat, or since `expected_s` if none has come. A peer counts as dead when
        its silence is longer than its limit:

            _first_s                 before its first beat, whatever its process does
            _dead_s                  on another host (pid None), or if its process is suspended
            STUCK_FACTOR * _dead_s   if its process is watched and runs

        `process_is_stopped(pid)` asks the kernel whether a process is suspended. This method is called for
        each peer that is not lost at each check, so the kernel is asked only where its answer matters.
        """
        # labs:begin 8a
        if peer.heard_s is None:
            silent_s = now - peer.expected_s
            return f"no sign of life in its first {silent_s:.1f} s" if silent_s > self._first_s else ""
        silent_s = now - peer.heard_s
        if silent_s <= self._dead_s:
            return ""
        if peer.pid is not None and process_is_stopped(peer.pid):
            return f"no sign of life for {silent_s:.1f} s, process {peer.pid} is suspended"
        limit_s = self._dead_s * (1 if peer.pid is None else STUCK_FACTOR)
        return f"no sign of life for {silent_s:.1f} s" if silent_s > limit_s else ""
        # labs:end 8a

    def _counts(self, name: str) -> bool:
        return name not in self._lost and name not in self._left

    def _report(self, name: str, reason: str, ended: bool) -> None:
        with self._lock:
            self._lost[name] = reason
        if self._on_lost is not None:
            self._on_lost(name, reason, ended)
