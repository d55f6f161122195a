"""The ends of other processes of this host, reported by the kernel (pidfd) or polled (signal 0).

Used by `membership` and by the store's master, from one thread. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path


def process_exists(pid: int) -> bool:
    """Tell whether a process runs under this number; one that has ended but was not reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state(pid) not in ("Z", "X")


def process_is_stopped(pid: int) -> bool:
    """Tell whether a signal or a debugger has suspended this process; False if the kernel does not say."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    """Return Linux's letter for a process's state; "" without such a process or without /proc."""
    try:
        # "PID (NAME) STATE ...": the name may hold anything, also parentheses
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class ProcessWatch:
    """A set of named processes. ended() reports each end once, and looks only at processes that have ended.

    fd      turns readable when a process with a pidfd ends

    _fds    name -> (pid, its pidfd, or None if it must be polled by number)
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

        ended() reports a process that is gone already. The name must not be watched yet.
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

    def kill(self, name: str) -> None:
        """Kill a process that is watched, and no other one that has got its number since."""
        pid, fd = self._fds[name]
        with contextlib.suppress(ProcessLookupError):
            if fd is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def ended(self) -> list[tuple[str, int, int | None]]:
        """Return (name, pid, closed file descriptor) of each process that has ended since the last call."""
        names = [self._named[fd] for fd, _ in self._epoll.poll(0)]
        names += [name for name in self._asked if not process_exists(self._fds[name][0])]
        gone = [(name, *self._fds[name]) for name in names]
        for name in names:
            self.remove(name)
        return gone

    def close(self) -> None:
        """Stop watching all processes. May be called twice."""
        for name in list(self._fds):
            self.remove(name)
        self._epoll.close()

    def remove(self, name: str) -> int | None:
        """Stop watching this name; return the file descriptor that was closed, if there was one."""
        _, fd = self._fds.pop(name, (0, None))
        self._asked.discard(name)
        if fd is not None:
            del self._named[fd]
            self._epoll.unregister(fd)
            os.close(fd)
        return fd
