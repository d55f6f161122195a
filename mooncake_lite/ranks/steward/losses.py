"""Losses, as the steward's monitor sees them: processes and hearts that have ended, and threads that died.

Explained in docs/explain/failures.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Loss(NamedTuple):
    """A process that is lost: its name at the monitor, why, and whether it was seen to end."""

    name: str
    reason: str
    ended: bool = True


class LossQueue:
    """Keeps losses until the steward takes them. wake makes its loop look; any thread may call it."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lost: deque[Loss] = deque()

    def on_fatal(self, thread: str, reason: str) -> None:
        """Note that a thread of this process has died. Called on that thread."""
        self.on_lost("rank-0", f"failed: thread {thread} died: {reason}", True)

    def on_lost(self, name: str, reason: str, ended: bool) -> None:
        """Note that a process is lost. Called on the monitor's thread."""
        self._lost.append(Loss(name, reason, ended))
        self._wake()

    def take(self) -> Loss | None:
        """Return the next loss, once."""
        return self._lost.popleft() if self._lost else None
