"""The limit on file descriptors: a server raises it, and keeps one descriptor to refuse connections with.

Used by every side that others connect to. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` that a later try may not meet. The connection still waits."""


def raise_limit() -> int:
    """Raise the soft limit on descriptors, of which each connection takes one, to the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def are_left(count: int) -> bool:
    """Tell whether this process can open so many descriptors now."""
    reserve = Reserve(count)
    left = len(reserve.fds)
    reserve.close()
    return left == count


class Reserve:
    """Descriptors that are kept for the moment in which the process has no others left."""

    def __init__(self, count: int = 1):
        self._count = count
        self.fds: list[int] = []
        self._take()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let the block open as many. It must close as many, or the reserve stays empty for now."""
        self.close()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while len(self.fds) < self._count:
                self.fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Give the descriptors back. May be called twice."""
        while self.fds:
            os.close(self.fds.pop())
