"""The contract of a queue: the order in which waiting requests begin.

Asked by `scheduler.state` once for each request that joins a line, and told when it leaves. Explained
in docs/explain/conductor.md.
"""

from __future__ import annotations

from typing import Protocol

from scheduler.line import Key
from scheduler.requests import Request


class Queue(Protocol):
    """Gives each request a key when it joins a line; the least key begins first. Every form extends it.

    A key changes while a request waits only where `on_leave` returns a new one, so that a line stays sorted.

    trust   part of the decode slots that go by predicted length instead, 0 to 1; see predicted.py
    """

    name: str
    trust: float = 0.0

    def key(self, request: Request, prefill_s: float, now: float) -> Key:
        """Return the key of a request whose prefill is predicted to take so many seconds."""

    def on_leave(self, request: Request, *, started: bool) -> dict[str, Key]:
        """Note that a request begins, or ends while it waits. Returns {request id: new key} of others."""
        return {}
