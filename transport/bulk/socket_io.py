"""Whole buffers, frames and the proof of a secret over one TCP connection, each with a deadline.

Used by `sockets` on both sides. Sockets stay blocking and the kernel keeps the time (SO_RCVTIMEO): one
call moves many megabytes, without the interpreter in between. Knows no segments.
Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from transport.bulk.sockets_messages import NONCE_BYTES, PROOF_BYTES
from transport.errors import ChannelError, PeerLost, TransferTimeout
from transport.wire import LENGTH, Decoder, framed

_TIMEVAL = struct.Struct("@ll")

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)
"""Buffers of one system call."""

AHEAD_BYTES = 16 * 1024
"""Bytes that are read ahead with a frame, in the same call. A small request or reply is then complete, and
of a long one no more than this is copied twice."""

SECRET_BYTES = 16
"""Shortest secret: 128 bits cannot be guessed."""


class Connection:
    """One connected socket. Used by one thread at a time; shut() by any.

    name    of the other side, for errors
    """

    def __init__(self, sock: socket.socket, name: str):
        self.socket = sock
        self.name = name
        self._limits: dict[int, float] = {}
        self._ahead = memoryview(b"")
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, views: Sequence[Any], deadline: float) -> None:
        """Send all of these buffers, in order. Raises PeerLost or TransferTimeout."""
        waiting = [memoryview(view).cast("B") for view in views if len(view)]
        waiting.reverse()  # the next one is the last: taking it away is cheap
        while waiting:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self.socket.sendmsg(waiting[: -IOV_MAX - 1 : -1])
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise PeerLost(self.name, f"sending failed: {error.strerror or error}") from None
            _take(waiting, sent)

    def receive(self, views: Sequence[Any], deadline: float) -> None:
        """Fill all of these buffers, in order. Raises PeerLost or TransferTimeout."""
        waiting = [memoryview(view).cast("B") for view in views if len(view)]
        waiting.reverse()
        while waiting and self._ahead:
            count = min(len(waiting[-1]), len(self._ahead))
            waiting[-1][:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            _take(waiting, count)
        while waiting:
            _take(waiting, self._receive_some(waiting[: -IOV_MAX - 1 : -1], deadline, socket.MSG_WAITALL))

    def _receive_some(self, views: list[memoryview], deadline: float, flags: int) -> int:
        """Receive some bytes; return how many, 0 when the time of one call ran out."""
        self._limit(socket.SO_RCVTIMEO, deadline)
        try:
            got = self.socket.recvmsg_into(views, 0, flags)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLost(self.name, f"receiving failed: {error.strerror or error}") from None
        if got == 0:
            raise PeerLost(self.name, "it closed the connection")
        return got

    def send_message(
        self, message: msgspec.Struct, deadline: float, views: Sequence[np.ndarray] = ()
    ) -> None:
        """Send a frame and the bytes that follow it. Raises PeerLost or TransferTimeout."""
        self.send([framed(message), *views], deadline)

    def receive_message(self, decoder: Decoder, deadline: float) -> msgspec.Struct:
        """Return the next frame. Raises PeerLost, TransferTimeout, or WireError when it is malformed."""
        size = decoder.size(self._next(LENGTH.size, deadline))
        message: msgspec.Struct = decoder.decode(self._next(size, deadline))
        return message

    def _next(self, size: int, deadline: float) -> memoryview:
        """Return the next bytes of a frame, valid until the next call. Bytes read ahead wait in _ahead."""
        if len(self._ahead) >= size:
            found, self._ahead = self._ahead[:size], self._ahead[size:]
            return found
        scratch = memoryview(bytearray(max(size, AHEAD_BYTES)))
        have = len(self._ahead)
        scratch[:have] = self._ahead
        while have < size:
            have += self._receive_some([scratch[have:]], deadline, 0)
        self._ahead = scratch[size:have]
        return scratch[:size]

    def _limit(self, option: int, deadline: float) -> None:
        """Let the next call end at the deadline. The option is set again only if that moved by a tenth."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TransferTimeout(f"{self.name}: the transfer is not done in its time")
        if not 0.9 * left_s <= self._limits.get(option, 0.0) <= left_s:
            left_s = max(left_s * 0.95, 0.0001)
            self._limits[option] = left_s
            value = _TIMEVAL.pack(int(left_s), int(left_s % 1 * 1e6))
            self.socket.setsockopt(socket.SOL_SOCKET, option, value)

    def has_ended(self) -> bool:
        """Tell, without waiting, whether the other side has closed it or sent unrequested bytes.

        Between transfers nothing should come.
        """
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return bool(self._ahead)
        except OSError:
            pass
        return True

    def shut(self) -> None:
        """End both directions. Threads in send or receive get PeerLost. Any thread, also twice."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. The owner calls it once, also after shut()."""
        self.shut()
        self.socket.close()


def _take(waiting: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes, which have moved, from the reversed list."""
    while count:
        first = waiting[-1]
        if count < len(first):
            waiting[-1] = first[count:]
            return
        count -= len(first)
        waiting.pop()


def check_secret(secret: bytes) -> None:
    """Raise ChannelError for a secret that is too short."""
    if len(secret) < SECRET_BYTES:
        raise ChannelError(f"a secret of {len(secret)} bytes; use at least {SECRET_BYTES}")


def _proof(secret: bytes, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + client_nonce + server_nonce, "sha256")


def welcome(connection: Connection, secret: bytes, deadline: float) -> bool:
    """Run the server's side of the handshake; tell whether the other side knows the secret."""
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.send([mine], deadline)
    answer = bytearray(NONCE_BYTES + PROOF_BYTES)
    connection.receive([answer], deadline)
    theirs, proof = bytes(answer[:NONCE_BYTES]), bytes(answer[NONCE_BYTES:])
    if not hmac.compare_digest(proof, _proof(secret, b"client", theirs, mine)):
        connection.send([bytes(PROOF_BYTES)], deadline)  # no proof: the client learns why it ends
        return False
    connection.send([_proof(secret, b"server", theirs, mine)], deadline)
    return True


def greet(connection: Connection, secret: bytes, deadline: float) -> bool:
    """Run the client's side of the handshake; tell whether the server knows the secret.

    Raises PeerLost when the server ends the connection.
    """
    theirs = bytearray(NONCE_BYTES)
    connection.receive([theirs], deadline)
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.send([mine + _proof(secret, b"client", mine, bytes(theirs))], deadline)
    proof = bytearray(PROOF_BYTES)
    connection.receive([proof], deadline)
    return hmac.compare_digest(bytes(proof), _proof(secret, b"server", mine, bytes(theirs)))
