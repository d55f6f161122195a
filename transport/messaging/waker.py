"""A pipe that any thread can write to, so that another thread's poll returns.

Used by `channel` alone. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """wake() makes `fd` readable until clear(); after close() it does nothing."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()  # so that no byte goes to a file that took over a closed number
        self._open = True

    def wake(self) -> None:
        """Make fd readable. Any thread may call it; it never waits, and does nothing after close."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: the poll returns anyway
            if self._open:
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """Clear all wakes until now. The polling thread calls it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends. The owner calls it once."""
        with self._lock:
            self._open = False
            os.close(self._write)
            os.close(self.fd)
