"""Typed messages between processes of one user on one machine, over a Unix socket: half the time of ZeroMQ.

Used where a caller waits for a round trip. A channel's message passes two more threads on each side; here the
client wakes the server itself. The server has no thread: a channel's poll watches its `fd`. Knows no message.
Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from transport.errors import ChannelError, WireError
from transport.messaging.descriptors import EXHAUSTED, Reserve, raise_limit
from transport.wire import LENGTH, Decoder, framed

_CREDENTIALS = struct.Struct("3i")
_READ_BYTES = 64 * 1024
"""Bytes of one read, more than most messages have. A longer message takes several."""

MAX_LINES = 4096
"""Most connections of one server. Any value works that exceeds the clients of one machine."""

DOOR_CLOSED_S = 0.1
"""Pause after a connection that could be neither accepted nor refused: a full server must not spin."""

CONNECT_S = 3.0
"""Longest wait for a connection. A running server accepts at once, unless its backlog is full."""


@dataclass(slots=True)
class _Line:
    """One connection at the server. read: bytes of an unfinished message; unsent: bytes of an answer.

    Invariant: while there is unsent, and only then, is_full is set, and the server polls for space to send
    and not for messages.
    """

    socket: socket.socket
    peer: str
    is_full: bool = False
    read: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class LineServer:
    """The side that accepts connections. One thread watches `fd` and then calls receive().

    name       of its socket, in the abstract namespace: no file, nothing left behind
    decoder    of the messages that may arrive

    Peers get names that no channel's peer can have: they begin with a zero byte. Other users are refused, and
    all connections while the process has no descriptor left.

    refused    connections for which there was no descriptor
    """

    def __init__(self, decoder: Decoder, max_send_bytes: int):
        self.name = f"mooncake-lite-{secrets.token_hex(16)}"
        self.dropped = self.strangers = self.refused = 0
        raise_limit()
        self._reserve = Reserve()
        self._door_opens_s = 0.0  # when the door is watched again; 0: it is watched
        self._decoder = decoder
        self._max_send_bytes = max_send_bytes
        self._lines: dict[int, _Line] = {}
        self._peers: dict[str, _Line] = {}
        self._ended: list[str] = []
        self._count = 0
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._door.bind(f"\0{self.name}")
            self._door.listen(64)
        except OSError as error:
            self._door.close()
            self._reserve.close()
            raise ChannelError(f"a Unix socket cannot be bound: {error}") from None
        self._door.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._door, select.EPOLLIN)
        self.fd = self._epoll.fileno()

    def receive(self) -> list[tuple[str, Any]]:
        """Return (peer, message) pairs that have arrived, at most one of each peer, without waiting."""
        received: list[tuple[str, Any]] = []
        if self._door_opens_s and time.monotonic() >= self._door_opens_s:
            self._door_opens_s = 0.0
            self._epoll.register(self._door, select.EPOLLIN)
        for fd, events in self._epoll.poll(0):
            if fd == self._door.fileno():
                self._accept()
                continue
            line = self._lines[fd]
            try:
                if events & select.EPOLLOUT:
                    self._flush(line)
                elif (message := self._read(line)) is not None:
                    received.append((line.peer, message))
            except (OSError, WireError) as error:
                self.dropped += isinstance(error, WireError)
                self._end(line)
        return received

    def ended(self) -> list[str]:
        """Return the peers whose connection has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def send(self, peer: str, message: msgspec.Struct) -> bool:
        """Send a message, and keep the bytes that the socket does not take yet.

        Until a peer has read them, nothing is read from it. False for an unknown peer. Raises WireError when
        the message is too large.
        """
        line = self._peers.get(peer)
        if line is None:
            return False
        line.unsent += framed(message, self._max_send_bytes)
        try:
            self._flush(line)
        except OSError:
            self._end(line)
            return False
        return True

    def close(self) -> None:
        """End all connections. May be called twice."""
        for line in list(self._lines.values()):
            self._end(line)
        if not self._epoll.closed:
            self._epoll.close()
            self._door.close()
            self._reserve.close()

    def _refuse(self) -> None:
        """End a connection for which there is no descriptor, or watch the door again later."""
        self.refused += 1
        try:
            with self._reserve.lent():
                self._door.accept()[0].close()
        except OSError:
            self._door_opens_s = time.monotonic() + DOOR_CLOSED_S
            self._epoll.unregister(self._door)

    def _accept(self) -> None:
        try:
            sock, _ = self._door.accept()
        except OSError as error:  # else it is gone again
            if error.errno in EXHAUSTED:
                self._refuse()
            return
        with contextlib.suppress(OSError):
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.geteuid() or len(self._lines) >= MAX_LINES:
                self.strangers += 1
                sock.close()
                return
            sock.setblocking(False)
            self._count += 1
            line = _Line(sock, f"\0{self._count}")
            self._lines[sock.fileno()] = self._peers[line.peer] = line
            self._epoll.register(sock, select.EPOLLIN)

    def _read(self, line: _Line) -> Any | None:
        """Return the message that is complete now. Raises OSError at the end, or WireError."""
        data = line.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("closed")
        line.read += data
        if len(line.read) < LENGTH.size:
            return None
        size = self._decoder.size(line.read)
        if len(line.read) < LENGTH.size + size:
            return None
        if len(line.read) > LENGTH.size + size:
            raise WireError("a message before the answer to the last one")
        message = self._decoder.decode(bytes(memoryview(line.read)[LENGTH.size :]))
        line.read.clear()
        return message

    def _flush(self, line: _Line) -> None:
        with contextlib.suppress(BlockingIOError):
            while line.unsent:
                del line.unsent[: line.socket.send(line.unsent)]
        if bool(line.unsent) != line.is_full:
            line.is_full = not line.is_full
            self._epoll.modify(line.socket, select.EPOLLOUT if line.is_full else select.EPOLLIN)

    def _end(self, line: _Line) -> None:
        del self._lines[line.socket.fileno()], self._peers[line.peer]
        self._ended.append(line.peer)
        with contextlib.suppress(OSError):
            self._epoll.unregister(line.socket)
        line.socket.close()


class Line:
    """The side that connects and asks, from one thread at a time. One request is open at a time.

    wake_fd    ends a wait in is_ready() when it turns readable; -1: none

    Raises ChannelError when no server listens under this name.
    """

    def __init__(self, name: str, decoder: Decoder, max_send_bytes: int, wake_fd: int = -1):
        self._decoder = decoder
        self._max_send_bytes = max_send_bytes
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(f"\0{name}")
        except OSError as error:
            self._socket.close()
            raise ChannelError(f"nobody listens at {name}: {error}") from None
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if wake_fd >= 0:
            self._poll.register(wake_fd, select.POLLIN)

    def send(self, message: msgspec.Struct, timeout_s: float) -> None:
        """Send a message. Raises ChannelError if the server is gone or reads nothing, or WireError."""
        data = framed(message, self._max_send_bytes)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelError(f"the other side does not take a message: {error}") from None

    def receive(self, timeout_s: float) -> Any:
        """Return the answer. Raises ChannelError when none comes in time or the server is gone, WireError."""
        deadline = time.monotonic() + timeout_s
        got = self._some(deadline)
        while len(got) < LENGTH.size:
            got += self._some(deadline)
        size = self._decoder.size(got)
        while len(got) < LENGTH.size + size:
            got += self._some(deadline)
        return self._decoder.decode(bytes(memoryview(got)[LENGTH.size :]))

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Tell whether an answer, or the end, begins to arrive within this time."""
        own = self._socket.fileno()
        return any(fd == own for fd, _ in self._poll.poll(1000 * timeout_s))

    def _some(self, deadline: float) -> bytearray:
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ChannelError(f"no answer: {error}") from None
        if not data:
            raise ChannelError("the other side has ended")
        return bytearray(data)

    def close(self) -> None:
        """End the connection. May be called twice."""
        self._socket.close()
