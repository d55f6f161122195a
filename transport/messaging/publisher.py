"""Numbered messages to all listeners, and replays to those that missed some: PUB and ROUTER.

Used by the conductor for KV events. A send never waits: a listener that cannot keep up loses messages, sees a
gap in the numbers, and asks for a replay. Knows no message. Explained in docs/explain/transport.md.

    PUB      topic | number, 8 bytes big-endian | payload
    ROUTER   a listener sends: empty | number of the first message it wants
             and gets, for each that is still kept: empty | number | payload; then empty | -1 | empty
"""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path

import zmq

from transport.errors import ChannelError

END = (-1).to_bytes(8, "big", signed=True)
_MAX_REPLAYS = 16
"""Most replays that one serve() begins, so that it ends soon; more wait in the socket."""


def check_local(endpoint: str) -> None:
    """Raise ChannelError unless only this machine can reach the endpoint: listeners have no keys."""
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or (scheme == "tcp" and (host in ("localhost", "::1") or host.startswith("127."))):
        return
    raise ChannelError(
        f"{endpoint!r}: use tcp://127.0.0.1:PORT or ipc://PATH; listeners are not authenticated"
    )


class Publisher:
    """Owned by one thread.

    endpoint, replay_endpoint   to bind, on this machine only. Empty replay_endpoint: no replays
    kept                        messages that can be replayed
    hwm                         messages that wait for a slow listener before it loses some

    Raises ChannelError when an endpoint cannot be bound or could be reached from elsewhere.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        *,
        kept: int = 10_000,
        hwm: int = 100_000,
    ):
        self._topic = topic.encode()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._next = 0
        self._context = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, endpoint, hwm)
            self._replay = self._bound(zmq.ROUTER, replay_endpoint, hwm) if replay_endpoint else None
        except ChannelError:
            self._context.destroy(linger=0)
            raise

    def _bound(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket:
        check_local(endpoint)
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 1024)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ChannelError(f"{endpoint} cannot be bound: {error.strerror or error}") from None
        return socket

    @property
    def endpoints(self) -> list[str]:
        """Return the bound endpoints of messages and replays, with wildcard ports resolved."""
        sockets = [self._pub] if self._replay is None else [self._pub, self._replay]
        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets]

    def publish(self, payload: bytes) -> None:
        """Send one message to all present listeners, and keep it for replays."""
        number = self._next
        self._next += 1
        self._sent.append((number, payload))
        with contextlib.suppress(zmq.Again):
            self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def serve(self) -> None:
        """Answer the replay requests since the last call; drop other messages."""
        for _ in range(_MAX_REPLAYS if self._replay is not None else 0):
            assert self._replay is not None
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and frames[1] == b"" and len(frames[2]) == 8:
                self._answer(self._replay, frames[0], int.from_bytes(frames[2], "big"))

    def _answer(self, replay: zmq.Socket, listener: bytes, first: int) -> None:
        with contextlib.suppress(zmq.Again):  # its queue is full: it asks once more
            for number, payload in self._sent:
                if number >= first:
                    replay.send_multipart([listener, b"", number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            replay.send_multipart([listener, b"", END, b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Close at once, and delete the file of an ipc endpoint. May be called twice."""
        if self._context.closed:
            return
        paths = [path for scheme, _, path in (e.partition("://") for e in self.endpoints) if scheme == "ipc"]
        self._context.destroy(linger=0)
        for path in paths:
            Path(path).unlink(missing_ok=True)
