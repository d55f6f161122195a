"""BytesServer: lends numbered buffers of this process over TCP, a thread per connection.

Used through `sockets`, where its other side and the whole idea stand. Every range is checked here: a
client is never believed. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from transport.batch import byte_view
from transport.errors import BadTransfer, ChannelError, PeerLost, TransferError, TransferTimeout, WireError
from transport.socket_io import Connection, check_secret, welcome
from transport.sockets_messages import (
    EAGER_BYTES,
    MAX_RANGES,
    REASON_CHARS,
    REQUEST_BYTES,
    Coming,
    Done,
    Go,
    Read,
    Refused,
    Request,
    Write,
)
from transport.wire import Decoder

HANDSHAKE_S = 5.0
"""A connection that has not proved the secret by then is closed."""

STALL_S = 30.0
"""A request of which nothing more comes, or whose bytes nobody takes, holds a connection no longer."""

IDLE_S = 3600.0
"""A connection without a request is closed then; the client opens another when it needs one."""

MAX_CONNECTIONS = 256
"""Of one server; more are closed at once and counted as refused."""

_DRAIN_BYTES = 256 * 1024


@dataclass(slots=True)
class ServerCounters:
    """What one BytesServer has done.

    bytes_read, bytes_written   moved completely
    queued_bytes                of requests that are being served now
    refused                     requests, and connections beyond MAX_CONNECTIONS
    strangers                   connections that did not prove the secret
    dropped                     connections ended for a malformed message or a stall
    """

    connections: int = 0
    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    queued_bytes: int = 0
    refused: int = 0
    strangers: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Exposed:
    view: np.ndarray
    writable: bool
    users: list[Connection] = field(default_factory=list)


class BytesServer:
    """Lends buffers of this process to whoever knows `secret`; a thread per connection.

    host, port  to listen at; port 0 takes a free one, .address has the real one

    Raises ChannelError when it cannot listen there.
    """

    def __init__(self, secret: bytes, host: str = "127.0.0.1", port: int = 0):
        check_secret(secret)
        self._secret = secret
        self._segments: dict[int, _Exposed] = {}
        self._connections: set[Connection] = set()
        self._changed = threading.Condition()
        self._counters = ServerCounters()
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.socket(family, socket.SOCK_STREAM)
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(64)
        except (OSError, OverflowError) as error:
            raise ChannelError(f"cannot listen at {host}:{port}: {error}") from None
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="bytes server", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> dict[str, int]:
        """ServerCounters as plain values."""
        with self._changed:
            return asdict(self._counters)

    def expose(self, segment: int, buffer: Any, *, writable: bool = True) -> None:
        """Lend a contiguous buffer under a number; it is kept alive, and cannot be resized, until withdrawn.

        Raises BadTransfer when the number is taken or the buffer cannot be used.
        """
        try:
            nbytes = memoryview(buffer).nbytes
        except TypeError:
            raise BadTransfer(f"segment {segment}: {type(buffer).__name__} is no buffer") from None
        view = byte_view(buffer, nbytes, writable)
        with self._changed:
            if segment in self._segments:
                raise BadTransfer(f"segment {segment} is exposed already")
            self._segments[segment] = _Exposed(view, writable)

    def withdraw(self, segment: int, timeout_s: float = 5.0) -> None:
        """Lend it no longer, and wait until no transfer touches it; one that goes on longer is cut off.

        Raises BadTransfer for an unknown number.
        """
        with self._changed:
            exposed = self._segments.pop(segment, None)
            if exposed is None:
                raise BadTransfer(f"segment {segment} is not exposed; these are: {sorted(self._segments)}")
            if not self._changed.wait_for(lambda: not exposed.users, timeout_s):
                for connection in exposed.users:
                    connection.shut()
                if not self._changed.wait_for(lambda: not exposed.users, timeout_s):
                    raise TransferTimeout(f"segment {segment} is still in use by {len(exposed.users)}")

    def close(self) -> None:
        """End every connection and the threads. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        for connection in connections:
            connection.shut()
        self._thread.join(timeout=2)
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, 2)

    def check(self) -> None:
        """Raise AssertionError when what is counted contradicts what is there."""
        with self._changed:
            users = [user for exposed in self._segments.values() for user in exposed.users]
            assert set(users) <= self._connections
            assert users or self._counters.queued_bytes >= 0

    # ------------------------------------------------------------------ threads

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.01)  # out of file descriptors: some connection will end
                continue
            connection = Connection(sock, f"{address[0]}:{address[1]}")
            with self._changed:
                full = self._closed or len(self._connections) >= MAX_CONNECTIONS
                if full:
                    self._counters.refused += 1
                else:
                    self._connections.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="bytes", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        decoder = Decoder(Request, REQUEST_BYTES)
        try:
            if not self._admitted(connection):
                return
            while not self._closed:
                request = connection.receive_message(decoder, time.monotonic() + IDLE_S)
                self._answer(connection, request)  # type: ignore[arg-type]
        except PeerLost:
            return
        except (WireError, TransferTimeout):
            self._count(dropped=1)
        finally:
            connection.close()
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()

    def _admitted(self, connection: Connection) -> bool:
        try:
            known = welcome(connection, self._secret, time.monotonic() + HANDSHAKE_S)
        except TransferError:
            known = False
        self._count(connections=int(known), strangers=int(not known))
        return known

    def _answer(self, connection: Connection, request: Request) -> None:
        is_read = isinstance(request, Read)
        total = sum(length for length in request.lengths if length > 0)
        with self._using(connection, request) as granted:
            deadline = time.monotonic() + STALL_S + total / 1e7  # 10 MB/s: slower is a stall
            if isinstance(granted, str):
                self._count(refused=1)
                if not is_read and total <= EAGER_BYTES:
                    _drain(connection, total, deadline)
                connection.send_message(Refused(granted[:REASON_CHARS]), deadline)
            elif is_read:
                connection.send_message(Coming(), deadline, granted)
                self._count(requests=1, bytes_read=total)
            else:
                if total > EAGER_BYTES:
                    connection.send_message(Go(), deadline)
                connection.receive(granted, deadline)
                self._count(requests=1, bytes_written=total)
                connection.send_message(Done(), deadline)

    @contextlib.contextmanager
    def _using(self, connection: Connection, request: Request) -> Iterator[list[np.ndarray] | str]:
        """The ranges of a request, not to be withdrawn meanwhile; or why it is refused."""
        with self._changed:
            exposed = self._segments.get(request.segment)
            reason = _objection(request, exposed)
            if reason or exposed is None:
                exposed = None
            else:
                exposed.users.append(connection)
                self._counters.queued_bytes += sum(request.lengths)
        if exposed is None:
            yield reason
            return
        try:
            ranges = zip(request.offsets, request.lengths, strict=True)
            yield [exposed.view[offset : offset + length] for offset, length in ranges]
        finally:
            with self._changed:
                exposed.users.remove(connection)
                self._counters.queued_bytes -= sum(request.lengths)
                self._changed.notify_all()

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, value in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + value)


def _objection(request: Request, exposed: _Exposed | None) -> str:
    """Why this request is refused; "" when it is not."""
    if exposed is None:
        return f"segment {request.segment} is not exposed"
    if isinstance(request, Write) and not exposed.writable:
        return f"segment {request.segment} is read-only"
    count = len(request.offsets)
    if count != len(request.lengths) or count > MAX_RANGES:
        return f"{count} offsets, {len(request.lengths)} lengths, at most {MAX_RANGES}"
    size = exposed.view.nbytes
    for offset, length in zip(request.offsets, request.lengths, strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            return f"range {offset}+{length} is outside the {size} bytes of segment {request.segment}"
    return ""


def _drain(connection: Connection, nbytes: int, deadline: float) -> None:
    """Take the bytes of a refused write off the connection, so that the next request is found."""
    scratch = np.empty(min(nbytes, _DRAIN_BYTES), np.uint8)
    while nbytes:
        some = min(nbytes, scratch.nbytes)
        connection.receive([scratch[:some]], deadline)
        nbytes -= some
