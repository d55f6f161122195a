"""Bulk bytes over plain TCP: a BytesServer lends numbered buffers, BytesClients read and write their ranges.

Used by `engine` between nodes, and by processes that are no MPI ranks. Knows neither keys nor MPI.
A client proves that it knows a shared secret. Like MPI's, the bytes themselves are not encrypted.
The conversation is in `sockets_messages`. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transport import errors
from transport.bulk import sockets_messages as say
from transport.bulk.batch import byte_view
from transport.bulk.socket_io import Connection, check_secret, greet
from transport.bulk.sockets_server import BytesServer
from transport.wire import Decoder

__all__ = ["BytesClient", "BytesServer"]


class BytesClient:
    """Reads and writes ranges of the buffers of one BytesServer; any thread may call it.

    timeout_s    for connecting and the handshake
    connections  most connections, opened as needed; a transfer uses one
    at_once      open the first one now

    Raises PeerLost when no server listens, TransferRefused when the other side does not know the secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        *,
        timeout_s: float,
        connections: int = 4,
        at_once: bool = True,
    ):
        check_secret(secret)
        self.address = (host, port)
        self._secret = secret
        self._timeout_s = timeout_s
        self._most = connections
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._opening = 0
        self._changed = threading.Condition()
        self._closed = False
        if at_once:
            self.connect()

    def connect(self) -> None:
        """Open a connection unless one is idle, to see that the server is there.

        Raises PeerLost when no server listens, TransferRefused when the other side does not know the secret,
        EngineClosed.
        """
        with self._connection(time.monotonic() + self._timeout_s):
            pass

    @property
    def name(self) -> str:
        """Return HOST:PORT, the name in errors."""
        return f"{self.address[0]}:{self.address[1]}"

    def read(
        self, segment: int, ranges: Sequence[tuple[int, int]], into: Sequence[Any], timeout_s: float
    ) -> None:
        """Fill `into` with these (offset, nbytes) ranges of a segment.

        into        a writable contiguous buffer per range, of at least nbytes
        Raises BadTransfer, TransferRefused, PeerLost, TransferTimeout, EngineClosed. After an error nothing
        more is written into the buffers.
        """
        views = _local_views(ranges, into, writable=True)
        deadline = time.monotonic() + timeout_s
        with self._connection(deadline) as connection:
            for first in range(0, len(views), say.MAX_RANGES):
                some = slice(first, first + say.MAX_RANGES)
                offsets, lengths = _columns(ranges[some])
                connection.send_message(say.Read(segment, offsets, lengths), deadline)
                self._expect(connection, say.Coming, deadline)
                connection.receive(views[some], deadline)

    def write(
        self, segment: int, ranges: Sequence[tuple[int, int]], source: Sequence[Any], timeout_s: float
    ) -> None:
        """Put the bytes of `source` into these (offset, nbytes) ranges of a segment.

        Returns when they are in place. After an error any part of them may be in place, and error.may_land
        tells whether more may land. Raises the same errors as read().
        """
        views = _local_views(ranges, source, writable=False)
        deadline = time.monotonic() + timeout_s
        unconfirmed = False  # bytes have left, and the server has not answered
        try:
            with self._connection(deadline) as connection:
                for first in range(0, len(views), say.MAX_RANGES):
                    some = slice(first, first + say.MAX_RANGES)
                    offsets, lengths = _columns(ranges[some])
                    request = say.Write(segment, offsets, lengths)
                    if sum(lengths) > say.EAGER_BYTES:
                        connection.send_message(request, deadline)
                        self._expect(connection, say.Go, deadline)
                        unconfirmed = True
                        connection.send(views[some], deadline)
                    else:
                        unconfirmed = True
                        connection.send_message(request, deadline, views[some])
                    self._expect(connection, say.Done, deadline)
                    unconfirmed = False
        except errors.TransferError as error:
            # A server that refuses has taken the bytes off the connection and put them nowhere.
            error.may_land = unconfirmed and not isinstance(error, errors.TransferRefused)
            raise

    def close(self) -> None:
        """End every connection; transfers under way fail with EngineClosed. May be called twice."""
        with self._changed:
            self._closed = True
            for connection in self._all:
                connection.shut()
            for connection in self._idle:
                connection.close()
                self._all.discard(connection)
            self._idle.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Assert that the pool of connections agrees with itself (tests)."""
        with self._changed:
            assert set(self._idle) <= self._all
            assert len(self._all) + self._opening <= self._most
            assert not (self._closed and self._idle)

    def _expect(self, connection: Connection, kind: type, deadline: float) -> None:
        reply = connection.receive_message(_REPLIES, deadline)
        if isinstance(reply, say.Refused):
            raise errors.TransferRefused(f"{self.name} refused: {reply.reason}")
        if not isinstance(reply, kind):
            raise errors.WireError(f"{self.name} answered {type(reply).__name__} instead of {kind.__name__}")

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[Connection]:
        """Yield a connection for one transfer.

        After a failed transfer its state is unknown, so it is closed, and late bytes land nowhere.
        """
        connection = None
        usable = False
        try:
            connection = self._idle_one(deadline) or self._opened(deadline)
            yield connection
            usable = True
        except errors.TransferRefused:
            usable = True
            raise
        except errors.WireError as error:
            raise errors.TransferError(f"{self.name}: {error}") from None
        except errors.PeerLost:
            if self._closed:
                raise errors.EngineClosed(f"the client of {self.name} was closed") from None
            raise
        finally:
            if connection is not None:
                self._put_back(connection, usable)

    def _put_back(self, connection: Connection, usable: bool) -> None:
        with self._changed:
            if usable and not self._closed:
                self._idle.append(connection)
            else:
                self._all.discard(connection)
                connection.close()
            self._changed.notify()

    def _idle_one(self, deadline: float) -> Connection | None:
        """Return the next idle connection that the server has not closed; None: a new one may be opened."""
        with self._changed:
            while not self._closed:
                while self._idle:
                    connection = self._idle.pop()
                    if not connection.has_ended():
                        return connection
                    self._all.discard(connection)
                    connection.close()
                if len(self._all) + self._opening < self._most:
                    self._opening += 1
                    return None
                left_s = deadline - time.monotonic()
                if left_s <= 0:  # not before the last look: a wait that ends late has used up its wake-up
                    raise errors.TransferTimeout(f"{self.name}: {self._most} connections stayed in use")
                self._changed.wait(left_s)
            raise errors.EngineClosed(f"the client of {self.name} is closed")

    def _opened(self, deadline: float) -> Connection:
        """Open a connection, in the place that _idle_one() has reserved for it."""
        deadline = min(deadline, time.monotonic() + self._timeout_s)
        connection = None
        try:
            left_s = max(0.001, deadline - time.monotonic())
            connection = Connection(socket.create_connection(self.address, left_s), self.name)
        except (OSError, OverflowError) as error:
            lost = errors.PeerLost(self.name, f"cannot connect: {error}")
            lost.nobody_listens = isinstance(error, ConnectionRefusedError)
            raise lost from None
        finally:
            with self._changed:
                self._opening -= 1
                if connection is not None:
                    self._all.add(connection)
                    if self._closed:
                        connection.shut()
                self._changed.notify()
        try:
            known = greet(connection, self._secret, deadline)
        except BaseException:
            self._put_back(connection, usable=False)
            raise
        if not known:
            self._put_back(connection, usable=False)
            raise errors.TransferRefused(f"{self.name} does not have the same secret")
        return connection


_REPLIES = Decoder(say.Reply, say.REPLY_BYTES)


def _local_views(
    ranges: Sequence[tuple[int, int]], buffers: Sequence[Any], writable: bool
) -> list[np.ndarray]:
    if len(ranges) != len(buffers):
        raise errors.BadTransfer(f"{len(ranges)} ranges and {len(buffers)} buffers")
    views = []
    for (offset, nbytes), buffer in zip(ranges, buffers, strict=True):
        if offset < 0 or nbytes < 0:
            raise errors.BadTransfer(f"range {offset}+{nbytes} cannot be")
        views.append(byte_view(buffer, nbytes, writable))
    return views


def _columns(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [int(offset) for offset, _ in ranges], [int(nbytes) for _, nbytes in ranges]
