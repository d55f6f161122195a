"""BytesServer: lends numbered buffers of this process over TCP, a thread per connection.

Used through `sockets`, which has the other side and explains both. Every range is checked here: the server
trusts no client. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from transport import errors
from transport.bulk import sockets_messages as say
from transport.bulk.lent import LentBuffers
from transport.bulk.socket_io import Connection, check_secret, welcome
from transport.messaging.descriptors import raise_limit
from transport.threads import OnFatal, start_thread
from transport.wire import Decoder

HANDSHAKE_S = 5.0
"""A connection that has not proved the secret by then is closed."""

STALL_S = 30.0
"""A connection is closed when no more of a request comes, or its bytes are not taken, for so long."""

IDLE_S = 3600.0
"""A connection without a request for so long is closed; the client opens another when it needs one."""

SLOWEST_BYTES_PER_S = 10e6
"""A transfer may take STALL_S, and in addition the time of its bytes at this rate.

Any rate works that is far below that of the slowest network in use.
"""

LINGER_S = 0.5
"""Longest wait of close() for transfers of clients."""

MAX_CONNECTIONS = 256
"""Most connections of one server, each with a thread, and at most half of the process's descriptors; more are
closed at once and counted as refused."""

_DRAIN_BYTES = 256 * 1024

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerCounters:
    """Counters of one BytesServer.

    bytes_read, bytes_written   moved completely
    queued_bytes                of requests that are being served now
    refused                     requests, and connections beyond the limit
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


class BytesServer:
    """Lends buffers of this process to clients that know `secret`; a thread per connection.

    host, port  to listen at; port 0 takes a free one, .address has the real one
    lent        the buffers, if another server lends them too; else its own
    on_fatal    called when a thread of this server dies, after its connections have been ended

    Raises ChannelError when it cannot listen there.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        lent: LentBuffers | None = None,
        on_fatal: OnFatal | None = None,
    ):
        check_secret(secret)
        self._most = min(MAX_CONNECTIONS, raise_limit() // 2)
        self._said_full = False
        self._on_fatal = on_fatal
        self._secret = secret
        self._lent = lent if lent is not None else LentBuffers()
        self._connections: set[Connection] = set()
        self._changed = threading.Condition()
        self._counters = ServerCounters()
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.socket(family, socket.SOCK_STREAM)
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(MAX_CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise errors.ChannelError(f"cannot listen at {host}:{port}: {error}") from None
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = start_thread(
            "bytes server", self._accept, on_death=self._stop_listening, on_fatal=on_fatal
        )

    @property
    def counters(self) -> dict[str, int]:
        """Return ServerCounters as plain values."""
        with self._changed:
            self._counters.queued_bytes = self._lent.queued_bytes
            return asdict(self._counters)

    def expose(self, segment: int, buffer: Any, *, writable: bool = True) -> None:
        """Lend a contiguous buffer under a number. It is kept alive, and cannot be resized, until withdrawn.

        Raises BadTransfer when the number is taken or the buffer cannot be used.
        """
        self._lent.expose(segment, buffer, writable=writable)

    def withdraw(self, segment: int, timeout_s: float = 5.0) -> None:
        """Stop lending a segment, and wait until no transfer touches it; cut off longer ones.

        Raises BadTransfer for an unknown number.
        """
        self._lent.withdraw(segment, timeout_s)

    def close(self) -> None:
        """Let transfers under way end within LINGER_S; then end every connection and the threads.

        May be called twice.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + LINGER_S
        while self._lent.queued_bytes and time.monotonic() < deadline:
            time.sleep(0.002)
        with self._changed:
            connections = list(self._connections)
        self._stop_listening()
        for connection in connections:
            connection.shut()
        self._thread.join(timeout=2)
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, 2)

    def check(self) -> None:
        """Assert that the counters agree with the connections (tests)."""
        self._lent.check()
        with self._changed:
            assert len(self._connections) <= self._most
            assert self._counters.connections >= 0

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
            try:
                connection = Connection(sock, f"{address[0]}:{address[1]}")
            except BaseException as error:
                sock.close()
                if isinstance(error, OSError):  # the other side has gone already
                    continue
                raise
            with self._changed:
                full = self._closed or len(self._connections) >= self._most
                if full:
                    self._counters.refused += 1
                else:
                    self._connections.add(connection)
            if full:
                connection.close()
                if not (self._said_full or self._closed):
                    self._said_full = True
                    hint = "see ulimit -n" if self._most < MAX_CONNECTIONS else "that is the limit"
                    _log.warning("more connections are refused: %d are open (%s)", self._most, hint)
                continue
            try:
                start_thread("bytes", self._serve, connection, on_fatal=self._on_fatal)
            except RuntimeError:  # no more threads: as with too many connections
                self._count(refused=1)
                self._end(connection)

    def _serve(self, connection: Connection) -> None:
        decoder = Decoder(say.Request, say.REQUEST_BYTES)
        try:
            if not self._admitted(connection):
                return
            while not self._closed:
                request = connection.receive_message(decoder, time.monotonic() + IDLE_S)
                self._answer(connection, request)  # type: ignore[arg-type]
        except errors.PeerLost:
            return
        except (errors.WireError, errors.TransferTimeout):
            self._count(dropped=1)
        finally:
            self._end(connection)

    def _stop_listening(self, reason: str = "") -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()

    def _end(self, connection: Connection) -> None:
        connection.close()
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def _admitted(self, connection: Connection) -> bool:
        try:
            known = welcome(connection, self._secret, time.monotonic() + HANDSHAKE_S)
        except errors.TransferError:
            known = False
        self._count(connections=int(known), strangers=int(not known))
        return known

    def _answer(self, connection: Connection, request: say.Request) -> None:
        total = sum(length for length in request.lengths if length > 0)
        deadline = time.monotonic() + STALL_S + total / SLOWEST_BYTES_PER_S
        is_read = isinstance(request, say.Read)
        try:
            loan = self._lent.borrow(
                request.segment, request.offsets, request.lengths, is_read, say.MAX_RANGES, connection.shut
            )
        except errors.TransferRefused as refusal:
            self._count(refused=1)
            deadline = time.monotonic() + STALL_S  # the length that was claimed buys no time
            if not is_read and total <= say.EAGER_BYTES:
                _drain(connection, total, deadline)
            connection.send_message(say.Refused(str(refusal)[: say.REASON_CHARS]), deadline)
            return
        moved = False
        try:
            if is_read:
                connection.send_message(say.Coming(), deadline, loan.views)
            else:
                if total > say.EAGER_BYTES:
                    connection.send_message(say.Go(), deadline)
                connection.receive(loan.views, deadline)
            moved = True
        finally:
            self._lent.give_back(loan, moved)
        self._count(requests=1, **{"bytes_read" if is_read else "bytes_written": total})
        if not is_read:
            connection.send_message(say.Done(), deadline)

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, value in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + value)


def _drain(connection: Connection, nbytes: int, deadline: float) -> None:
    """Read the bytes of a refused write from the connection, up to the next request."""
    scratch = np.empty(min(nbytes, _DRAIN_BYTES), np.uint8)
    while nbytes:
        some = min(nbytes, scratch.nbytes)
        connection.receive([scratch[:some]], deadline)
        nbytes -= some
