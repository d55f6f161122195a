"""Lanes: how slices are laid out, so that those of one lane never cross.

Used by whatever traces a process. A Timeline is one thread's work and waits. Spans are things that overlap,
such as requests and transfers: each has a lane to itself while it lasts. See docs/how-to/trace.md.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Literal

from mooncake_lite.tracing.tracer import Args, Tracer


class Timeline:
    """What one thread does: work, and the waits between. Waits of one kind that follow each other are one."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._lane = tracer.lane(name)
        self._waiting = ""
        self._since_ns = 0

    def work(self, name: str, began_ns: int, args: Args = None, *, ended_ns: int = 0) -> None:
        """Note work that ends now, or has ended at ended_ns."""
        self._end_wait(began_ns)
        self._tracer.slice(self._lane, name, began_ns, ended_ns or self._tracer.now_ns(), args)

    def wait(self, name: str, began_ns: int) -> None:
        """Note a wait that goes on until the next work, or until a wait of another name."""
        if name != self._waiting:
            self._end_wait(began_ns)
            self._waiting, self._since_ns = name, began_ns

    def close(self) -> None:
        """End the wait that goes on."""
        self._end_wait(self._tracer.now_ns())

    def _end_wait(self, ended_ns: int) -> None:
        if self._waiting:
            self._tracer.slice(self._lane, self._waiting, self._since_ns, ended_ns)
            self._waiting = ""


class _Span:
    """An open span: its lane, and the name of its open stage ("" before the first)."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.stage = ""


class Spans:
    """Slices that overlap. Any thread may call this.

    A key names an open span. Each has the first lane that is free, so that there are as many lanes as spans
    were open at once. Calls with an unknown key do nothing: what began before the trace is not in it.
    """

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Span] = {}
        self._free: dict[int, int] = {}  # lane: when its last span ended, in ns

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: Hashable, name: str, began_ns: int = 0, args: Args = None) -> int:
        """Open a span now, or at began_ns. Returns its lane. A key that is open already stays as it is."""
        with self._lock:
            if key in self._open:
                return self._open[key].lane
            began_ns = began_ns or self._tracer.now_ns()
            lane = self._first_free(began_ns)
            self._open[key] = _Span(lane)
            self._tracer.begin(lane, name, began_ns, args)
            return lane

    def stage(self, key: Hashable, name: str, args: Args = None) -> None:
        """End the span's stage, if one is open, and begin the next one. The same one again goes on."""
        with self._lock:
            span = self._open.get(key)
            if span is None or span.stage == name:
                return
            now_ns = self._tracer.now_ns()
            if span.stage:
                self._tracer.end(span.lane, now_ns)
            span.stage = name
            self._tracer.begin(span.lane, name, now_ns, args)

    def instant(self, key: Hashable, name: str, args: Args = None) -> None:
        """Add an instant to a span."""
        with self._lock:
            span = self._open.get(key)
            if span is not None:
                self._tracer.instant(span.lane, name, self._tracer.now_ns(), args)

    def follow(self, key: Hashable, request_id: str, *, first: bool = False, last: bool = False) -> None:
        """Lead the arrow of a request through this span. first, last: the arrow starts or ends here."""
        with self._lock:
            span = self._open.get(key)
            if span is not None:
                step: Literal["s", "t", "f"] = "s" if first else "f" if last else "t"
                self._tracer.follow(step, span.lane, request_id, self._tracer.now_ns())

    def close(self, key: Hashable, args: Args = None) -> None:
        """End a span, and its stage. args are added to those of its beginning."""
        with self._lock:
            span = self._open.pop(key, None)
            if span is None:
                return
            now_ns = self._tracer.now_ns()
            if span.stage:
                self._tracer.end(span.lane, now_ns)
            self._tracer.end(span.lane, now_ns, args)
            self._free[span.lane] = now_ns

    def _first_free(self, began_ns: int) -> int:
        """Return the first lane whose last span has ended by then; a new one if there is none."""
        lane = min((lane for lane, ended_ns in self._free.items() if ended_ns <= began_ns), default=0)
        if lane:
            del self._free[lane]
            return lane
        number = len(self._free) + len(self._open) + 1
        return self._tracer.lane(self._name if number == 1 else f"{self._name} {number}")
