"""Tracer: collects the events of one process as lines of JSON, in Chrome's trace event format.

Used by every traced process, through `lanes.py`. Each line is an event that needs nothing else, ended by a
comma, so that `merge.py` only has to join parts. Memory and size are bounded. See docs/how-to/trace.md.

    {"ph":"X","pid":1,"tid":2,"ts":81.5,"dur":20.25,"name":"prefill","args":{...}},
      ph    M names a process or a lane; X a slice with a duration; B, E begin and end of a slice;
            i an instant; s, t, f begin, continue and end an arrow that follows a request
      pid   rank, or the number after the last rank for the gateway;  tid   lane
      ts    microseconds of CLOCK_MONOTONIC on rank 0's host
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from xxhash import xxh3_64_intdigest

from mooncake_lite.errors import TracingError

RUN_NBYTES = 256 << 20
"""Longest trace of a whole run; Perfetto opens it in a browser. Each process has an equal share."""

FLUSH_NBYTES = 256 << 10
FLUSH_S = 0.5
"""Longest time between writes while a process works. `kill -9` loses the events since the last write."""

BUFFER_NBYTES = 4 << 20
"""Most that waits in memory. A longer buffer means that the sink takes nothing: the trace ends."""

REQUEST_BITS = 53
"""Arrow ids are numbers in JSON, which JavaScript reads as doubles."""

Sink = Callable[[bytes], None]
"""Takes whole lines. Raises OSError when it can take no more."""

Args = Mapping[str, Any] | None
"""Details of an event: plain values, shown when it is selected."""


class Tracer:
    """Writes the events of one process. Any thread may add events.

    number      of the process: its rank, or the number after the last rank
    now_ns      reads this host's clock
    ahead_ns    what is added to this host's clock to get that of rank 0's host
    problem     why the trace has ended early, or ""
    dropped     events that came after that end

    Invariant: every B in the part has its E, once `close` has been called.
    """

    def __init__(
        self,
        number: int,
        name: str,
        sink: Sink,
        limit_nbytes: int = RUN_NBYTES,
        *,
        ahead_ns: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.number = number
        self.problem = ""
        self.dropped = 0
        self._name = name
        self._sink = sink
        self._limit_nbytes = limit_nbytes
        self._ahead_ns = ahead_ns
        self.now_ns = clock
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._written_nbytes = 0
        self._flushed_ns = clock()
        self._num_lanes = 0
        self._open: Counter[int] = Counter()
        self._ended = False
        self._meta("process_name", 0, {"name": name})
        self._meta("process_sort_index", 0, {"sort_index": number})

    # ------------------------------------------------------------------------------ events

    def lane(self, name: str) -> int:
        """Add a lane and return its number. Lanes are shown in the order in which they are added."""
        with self._lock:
            self._num_lanes += 1
            number = self._num_lanes
        self._meta("thread_name", number, {"name": name})
        self._meta("thread_sort_index", number, {"sort_index": number})
        return number

    def slice(self, lane: int, name: str, began_ns: int, ended_ns: int, args: Args = None) -> None:
        """Add something that has taken from began_ns to ended_ns."""
        dur = {"dur": (ended_ns - began_ns) / 1000}
        with self._lock:
            self._add({**self._event("X", lane, began_ns), **dur, "name": name}, args)

    def begin(self, lane: int, name: str, now_ns: int, args: Args = None) -> None:
        """Begin a slice. It lies within the slices of this lane that are open."""
        with self._lock:
            if self._add({**self._event("B", lane, now_ns), "name": name}, args):
                self._open[lane] += 1

    def end(self, lane: int, now_ns: int, args: Args = None) -> None:
        """End the newest open slice of this lane. args are added to those of its beginning."""
        with self._lock:
            if self._open[lane]:
                self._open[lane] -= 1
                self._add(self._event("E", lane, now_ns), args)

    def instant(self, lane: int, name: str, now_ns: int, args: Args = None) -> None:
        """Add something without a duration."""
        with self._lock:
            self._add({**self._event("i", lane, now_ns), "s": "t", "name": name}, args)

    def follow(self, step: Literal["s", "t", "f"], lane: int, request_id: str, now_ns: int) -> None:
        """Lead the arrow of a request to the slice that is open on this lane. s: its start; f: its end."""
        number = xxh3_64_intdigest(request_id.encode()) >> (64 - REQUEST_BITS)
        arrow = {"cat": "request", "id": number, "name": "request", "bp": "e"}
        with self._lock:
            self._add({**self._event(step, lane, now_ns), **arrow}, None)

    # ------------------------------------------------------------------------------ writing

    def flush_when_due(self) -> None:
        """Pass events to the sink if there are many, or if the last time was half a second ago."""
        due = self.now_ns() - self._flushed_ns > FLUSH_S * 1e9
        if len(self._buffer) >= FLUSH_NBYTES or (due and self._buffer):
            self.flush()

    def flush(self) -> None:
        """Pass all events to the sink. A sink that fails ends the trace, not the process."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """End all open slices, say how many events were dropped, and write the rest. May be called twice."""
        with self._lock:
            self._end(self.now_ns())
            if self.dropped:
                text = f"{self.dropped} events dropped: {self.problem}"
                self._put(self._event("M", 0) | {"name": "process_labels", "args": {"labels": text}})
                self.dropped = 0
            self._flush()

    def _meta(self, kind: str, lane: int, args: dict[str, Any]) -> None:
        with self._lock:
            self._add({**self._event("M", lane), "name": kind}, args)

    def _event(self, kind: str, lane: int, at_ns: int | None = None) -> dict[str, Any]:
        event: dict[str, Any] = {"ph": kind, "pid": self.number, "tid": lane}
        if at_ns is not None:
            event["ts"] = (at_ns + self._ahead_ns) / 1000
        return event

    def _add(self, event: dict[str, Any], args: Args) -> bool:
        """Add an event unless the trace has ended. Returns whether it was added."""
        if self._ended:
            self.dropped += bool(self.problem)
            return False
        if args:
            event["args"] = args
        self._put(event)
        if self._written_nbytes + len(self._buffer) > self._limit_nbytes:
            self._fail(f"the trace of this process has reached {self._limit_nbytes >> 20} MiB")
        elif len(self._buffer) > BUFFER_NBYTES:
            self._fail("events came faster than they could be written")
        return True

    def _put(self, event: dict[str, Any]) -> None:
        self._buffer += self._encoder.encode(event)
        self._buffer += b",\n"

    def _fail(self, why: str) -> None:
        self.problem = why
        now_ns = self.now_ns()
        self._put(
            self._event("i", 0, now_ns) | {"s": "p", "name": "the trace ends here", "args": {"why": why}}
        )
        self._end(now_ns)
        print(f"mooncake-lite: {self._name}: {why}; the cluster continues", file=sys.stderr, flush=True)

    def _end(self, now_ns: int) -> None:
        """Take no more events, and end what is open."""
        self._ended = True
        for lane, depth in self._open.items():
            for _ in range(depth):
                self._put(self._event("E", lane, now_ns))
        self._open.clear()

    def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        self._flushed_ns = self.now_ns()
        if not data:
            return
        try:
            self._sink(data)
            self._written_nbytes += len(data)
        except OSError as error:
            self._sink = lambda data: None
            if not self.problem:
                self._fail(f"the trace cannot be written: {error.strerror}")


class PartFile:
    """A sink: the part of one process, and of those that take its place."""

    def __init__(self, trace: Path, number: int, *, again: bool = False) -> None:
        """Create the part, and the folder of all parts if it is missing. Raises TracingError.

        again   continue the part of the process before
        """
        path = part_path(trace, number)
        how = os.O_APPEND if again else os.O_EXCL
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TracingError(
                f"trace={str(trace)!r}: {path} cannot be made ({error.strerror}); "
                "choose another file with --trace"
            ) from None

    def __call__(self, data: bytes) -> None:
        """Append lines. Raises OSError when the disk is full."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]


def parts_folder(trace: Path) -> Path:
    """Return where the parts of a trace are until they are joined."""
    return trace.with_name(f"{trace.name}.parts")


def part_path(trace: Path, number: int) -> Path:
    """Return where the process of this number writes its part."""
    return parts_folder(trace) / f"{number}.part"


def share_nbytes(num_processes: int) -> int:
    """Return how long the part of one process may become."""
    return RUN_NBYTES // num_processes
