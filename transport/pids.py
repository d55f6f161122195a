"""The end of other processes of this host, told by the kernel (pidfd) or asked for (signal 0).

Used by `membership` and by the store's master, from one thread. Explained in docs/explain/transport.md.
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
    return _state(pid) not in ("Z", "X")


def process_is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has suspended this process; False where the kernel does not say."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    """The letter that Linux gives for a process's state, "" when there is no such process or no /proc."""
    try:
        # "PID (NAME) STATE ...": the name may hold anything, also parentheses
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class ProcessWatch:
    """A set of named processes; ended() tells of each end once, and looks only at those that have ended.

    fd      turns readable when a process ends that the kernel tells of

    _fds    name -> (pid, its pidfd, or None where it must be asked for by number)
    _named  pidfd -> name
    _asked  names without a pidfd
    """

    def __init__(self) -> None:
        self._fds: dict[str, tuple[int, int | None]] = {}
        self._named: dict[int, str] = {}
        self._asked: set[str] = set()
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()

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
        if fd is None:
            self._asked.add(name)
        else:
            self._named[fd] = name
            self._epoll.register(fd, select.EPOLLIN)
        return fd

    def ended(self) -> list[tuple[str, int, int | None]]:
        """(name, pid, closed file descriptor) of each that has ended since the last call."""
        names = [self._named[fd] for fd, _ in self._epoll.poll(0)]
        names += [name for name in self._asked if not process_exists(self._fds[name][0])]
        gone = [(name, *self._fds[name]) for name in names]
        for name in names:
            self.remove(name)
        return gone

    def close(self) -> None:
        """Watch nobody any more. May be called twice."""
        for name in list(self._fds):
            self.remove(name)
        self._epoll.close()

    def remove(self, name: str) -> int | None:
        """Watch this name no longer; returns the file descriptor that was closed, if there was one."""
        _, fd = self._fds.pop(name, (0, None))
        self._asked.discard(name)
        if fd is not None:
            del self._named[fd]
            self._epoll.unregister(fd)
            os.close(fd)
        return fd
