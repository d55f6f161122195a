"""The end of other processes of this host, told by the kernel (pidfd) or asked for (signal 0).

Used by `membership` alone, from its thread. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


def process_exists(pid: int) -> bool:
    """Whether a process runs under this number; one that has ended but was not collected does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # "PID (NAME) STATE ...": the name may hold anything, also parentheses
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True


class ProcessWatch:
    """A set of named processes; ended() tells of each end once."""

    def __init__(self) -> None:
        self._fds: dict[str, tuple[int, int | None]] = {}

    def add(self, name: str, pid: int) -> int | None:
        """Watch a process. Returns a file descriptor that turns readable at its end, where Linux has them.

        One that is gone already is told of by ended(). The name may not be watched yet.
        """
        assert name not in self._fds
        fd = None
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # no pidfd here, or no such process: asked for by number
            fd = None
        self._fds[name] = (pid, fd)
        return fd

    def ended(self) -> list[tuple[str, int, int | None]]:
        """(name, pid, closed file descriptor) of each that has ended since the last call."""
        gone = [(name, pid, fd) for name, (pid, fd) in self._fds.items() if not self._runs(pid, fd)]
        for name, _, _ in gone:
            self.remove(name)
        return gone

    def close(self) -> None:
        """Watch nobody any more."""
        for name in list(self._fds):
            self.remove(name)

    @staticmethod
    def _runs(pid: int, fd: int | None) -> bool:
        if fd is None:
            return process_exists(pid)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)

    def remove(self, name: str) -> int | None:
        """Watch this name no longer; returns the file descriptor that was closed, if there was one."""
        _, fd = self._fds.pop(name, (0, None))
        if fd is not None:
            os.close(fd)
        return fd
