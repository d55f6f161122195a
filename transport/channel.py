"""Typed messages between processes: one Hub (ROUTER), many Spokes (DEALER), over ipc or tcp.

Used by the conductor, the gateways, the ranks, `membership` and `engine`. Neither side ever blocks in a send,
every queue is bounded, and malformed messages are dropped and counted. Knows no message. A door to
transport/messaging, which has its parts. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import zmq

from transport.errors import ChannelError, WireError
from transport.messaging.curve import CurveKeys
from transport.messaging.descriptors import are_left, raise_limit
from transport.messaging.waker import Waker
from transport.wire import DEFAULT_MAX_BYTES, Decoder, encode

__all__ = ["Counters", "CurveKeys", "Hub", "Spoke"]

QUEUE_MESSAGES = 10_000
"""Most messages that wait per peer and direction, a second of the fastest peer; more are not accepted."""

DRAIN_MESSAGES = 1_000
"""Messages that one receive() returns at most, so that a flood cannot keep a role from its work."""

LINGER_MS = 500
"""Time in which close() still delivers sent messages. Any value well above a round trip works."""

IPC_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux (sun_path, without the zero byte)."""

CHANNEL_DESCRIPTORS = 32
"""Descriptors that must be left for a new channel: twice what one takes, keys and monitor included."""

MAX_PEERS = 65_536
"""Most peers whose return address a hub keeps, 200 bytes each; the longest silent are forgotten first."""

_OVERSIZE_SLACK = 64 * 1024
"""Messages a little too large are read, dropped and counted; beyond this libzmq closes the connection."""

_HANDSHAKE_FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL


@dataclass(slots=True)
class Counters:
    """Counters of one channel since it was opened. Bytes are those of encoded messages.

    dropped     messages that arrived and were malformed, too large, of a wrong type or from a wrong peer
    unsent      messages that were not accepted for sending: the peer is unknown or its queue full
    strangers   connections refused: no CURVE or wrong keys; connections without ZeroMQ are not counted
    """

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: int = 0
    unsent: int = 0
    strangers: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


def _check_endpoint(endpoint: str, curve: CurveKeys | None, plain_loopback: bool = False) -> None:
    """Raise ChannelError for an endpoint that could only fail later, or would be unsafe."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        length = len(os.fsencode(rest))
        if length > IPC_PATH_BYTES:
            raise ChannelError(f"socket path has {length} bytes, Linux allows {IPC_PATH_BYTES}: {rest}")
    elif scheme == "tcp":
        if curve is None and not (plain_loopback and _is_loopback(rest)):
            raise ChannelError(f"{endpoint}: tcp is only used with CURVE keys")
    else:
        raise ChannelError(f"{endpoint!r} is no endpoint; use ipc://PATH or tcp://ADDRESS:PORT")


def _is_loopback(address_and_port: str) -> bool:
    """Tell whether only this machine can reach an address."""
    address = address_and_port.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _bound(socket: zmq.Socket, endpoint: str, max_bytes: int) -> None:
    """Set the limits that every socket here has."""
    socket.set_hwm(QUEUE_MESSAGES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + _OVERSIZE_SLACK)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


class _Channel(contextlib.AbstractContextManager[Any]):
    """The common part of Hub and Spoke: waking, polling, counting. One thread owns it, except wake().

    context   for channels that live as long as this one and share its I/O thread
    """

    def __init__(self, decoder: Decoder, max_send_bytes: int, context: zmq.Context | None):
        if not are_left(CHANNEL_DESCRIPTORS):  # libzmq would end the process
            raise ChannelError(f"fewer than {CHANNEL_DESCRIPTORS} file descriptors are left (ulimit -n)")
        self.counters = Counters()
        self._decoder = decoder
        self._max_send_bytes = max_send_bytes
        self._owns_context = context is None
        self.context = context or zmq.Context()
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._sockets: list[zmq.Socket] = []
        self.closed = False

    @property
    def wake_fd(self) -> int:
        """Return the file descriptor that wake() makes readable until the next receive()."""
        return self._waker.fd

    def wake(self) -> None:
        """Make receive() return. The one method that any thread may call."""
        self._waker.wake()

    def watch_fd(self, fd: int) -> None:
        """Let receive() also return when this file descriptor turns readable."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch_fd(self, fd: int) -> None:
        self._poller.unregister(fd)

    def _poll(self, timeout_s: float) -> set[Any]:
        ready = {entry for entry, _ in self._poller.poll(max(0, round(timeout_s * 1000)))}
        if self._waker.fd in ready:
            self._waker.clear()
        return ready

    def _decode(self, frames: list[bytes]) -> Any | None:
        """Return the message of the last frame, or None after counting it as dropped."""
        data = frames[-1]
        self.counters.messages_in += 1
        self.counters.bytes_in += len(data)
        try:
            return self._decoder.decode(data)
        except WireError:
            self.counters.dropped += 1
            return None

    def _sent(self, frames: list[bytes], socket: zmq.Socket) -> bool:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counters.unsent += 1
            return False
        self.counters.messages_out += 1
        self.counters.bytes_out += len(frames[-1])
        return True

    def close(self) -> None:
        """Close within LINGER_MS; may be called twice."""
        if self.closed:
            return
        self.closed = True
        for socket in self._sockets:
            socket.close()
        if self._owns_context:
            self.context.term()
        self._waker.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Hub(_Channel):
    """The side that is bound. It knows its peers by name once they have sent a message.

    endpoints   "ipc://PATH", "tcp://ADDRESS:PORT" or "tcp://ADDRESS:*"; .endpoints has the real ones
    decoder     of the messages that may arrive
    curve       required for tcp; ipc needs no keys (its folder is readable by one user alone)
    may_join    (name of a peer) -> whether to accept its messages; others are dropped and counted
    plain_loopback   accept tcp without keys at an address that this machine alone can reach; the caller
                must then tell its own user from other users itself

    Raises ChannelError when an endpoint cannot be bound, or no descriptors are left.
    """

    def __init__(
        self,
        endpoints: Iterable[str],
        decoder: Decoder,
        curve: CurveKeys | None = None,
        *,
        may_join: Callable[[str], bool] | None = None,
        plain_loopback: bool = False,
        max_send_bytes: int = DEFAULT_MAX_BYTES,
    ):
        super().__init__(decoder, max_send_bytes, None)
        raise_limit()  # libzmq cannot refuse a connection when there is no descriptor for it
        self._plain_loopback = plain_loopback
        self._may_join = may_join
        self._curve = curve
        self._home: OrderedDict[bytes, zmq.Socket] = OrderedDict()
        self._door: zmq.Socket | None = None
        self._events: zmq.Socket | None = None
        self._routers: dict[str, zmq.Socket] = {}
        self.endpoints: list[str] = []
        try:
            for endpoint in endpoints:
                self.endpoints.append(self._bind(endpoint))
        except BaseException:
            self.close()
            raise

    def _bind(self, endpoint: str) -> str:
        _check_endpoint(endpoint, self._curve, self._plain_loopback)
        router = self._router(endpoint)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            raise ChannelError(f"{endpoint} cannot be bound: {error}") from None
        return router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _router(self, endpoint: str) -> zmq.Socket:
        """Return the socket for an endpoint. CURVE belongs to a socket, so ipc and tcp have one each."""
        scheme = endpoint.partition("://")[0]
        if scheme in self._routers:
            return self._routers[scheme]
        if scheme == "tcp" and self._curve is not None:
            self._open_door()
        router = self._routers[scheme] = self.context.socket(zmq.ROUTER)
        self._sockets.append(router)
        _bound(router, endpoint, self._decoder.max_bytes)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that lost its connection comes back under its name
        if scheme == "tcp" and self._curve is not None:
            self._curve.guard(router)
            self._events = router.get_monitor_socket(_HANDSHAKE_FAILED)
            self._poller.register(self._events, zmq.POLLIN)
        self._poller.register(router, zmq.POLLIN)
        return router

    def _open_door(self) -> None:
        """Open the socket on which the context asks whether to accept a peer (RFC 27, ZAP)."""
        self._door = self.context.socket(zmq.REP)
        self._sockets.append(self._door)
        self._door.setsockopt(zmq.LINGER, 0)
        self._door.bind("inproc://zeromq.zap.01")
        self._poller.register(self._door, zmq.POLLIN)

    def _answer_door(self) -> None:
        assert self._door is not None
        assert self._curve is not None
        welcome, answer = self._curve.answer_of_door(self._door.recv_multipart())
        self.counters.strangers += not welcome
        self._door.send_multipart(answer)

    def _read_events(self) -> None:
        """Read all waiting events, at most QUEUE_MESSAGES.

        2,000 unread events stop libzmq's I/O thread, and with it every connection and close().
        """
        assert self._events is not None
        with contextlib.suppress(zmq.Again):
            for _ in range(QUEUE_MESSAGES):
                self._events.recv_multipart(zmq.NOBLOCK)
                self.counters.strangers += 1

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        """Return (peer, message) pairs in order, at most DRAIN_MESSAGES; [] after timeout_s or wake()."""
        ready = self._poll(timeout_s)
        if self._door in ready:
            self._answer_door()
        if self._events in ready:
            self._read_events()
        received: list[tuple[str, Any]] = []
        for router in self._routers.values():
            if router in ready:
                self._drain(router, received)
        return received

    def _drain(self, router: zmq.Socket, received: list[tuple[str, Any]]) -> None:
        while len(received) < DRAIN_MESSAGES:
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer = self._name(frames[0])
            message = self._decode(frames)
            if message is None:
                continue
            if peer is None or len(frames) != 2:
                self.counters.dropped += 1
                continue
            self._remember(frames[0], router)
            received.append((peer, message))

    def _remember(self, identity: bytes, router: zmq.Socket) -> None:
        """Note the socket on which to answer this peer; the last one heard from stands last."""
        self._home[identity] = router
        self._home.move_to_end(identity)
        if len(self._home) > MAX_PEERS:
            self._home.popitem(last=False)

    def _name(self, identity: bytes) -> str | None:
        """Return the peer's name, or None when it has none or may not join."""
        try:
            name = identity.decode()
        except UnicodeDecodeError:
            return None
        if not name.isprintable() or (self._may_join is not None and not self._may_join(name)):
            return None
        return name

    def send(self, peer: str, message: msgspec.Struct) -> bool:
        """Queue a message. False, and counted, when the peer is unknown, gone, or its queue is full.

        Never blocks. Raises WireError when the message is too large.
        """
        data = encode(message, self._max_send_bytes)
        identity = peer.encode()
        router = self._home.get(identity)
        if router is None:
            self.counters.unsent += 1
            return False
        return self._sent([identity, data], router)

    def close(self) -> None:
        """Close every socket; waiting messages have the linger time of each. May be called twice."""
        if self._events is not None and not self.closed:
            self._read_events()
            self._poller.unregister(self._events)
            self._routers["tcp"].disable_monitor()
            self._events.close(linger=0)  # one that stays open would keep the context from its end
            self._events = None
        super().close()


class Spoke(_Channel):
    """The side that connects, under a name. Its messages wait in its queue until the hub is there.

    identity    this side's name at the hub, printable, at most 200 bytes
    context     share the context of a channel that is closed after this one
    plain_loopback   as for the Hub

    Raises ChannelError when the endpoint or the identity cannot be used, or no descriptors are left.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str,
        decoder: Decoder,
        curve: CurveKeys | None = None,
        *,
        context: zmq.Context | None = None,
        plain_loopback: bool = False,
        max_send_bytes: int = DEFAULT_MAX_BYTES,
    ):
        _check_endpoint(endpoint, curve, plain_loopback)
        if not identity or not identity.isprintable() or len(identity.encode()) > 200:
            raise ChannelError(f"identity {identity!r} must be 1 to 200 printable bytes")
        super().__init__(decoder, max_send_bytes, context)
        self.endpoint, self._identity, self._curve = endpoint, identity, curve
        self._connect()

    def renew(self) -> None:
        """Connect anew. What waits in either direction, or is on its way, is lost."""
        self._poller.unregister(self._socket)
        self._sockets.remove(self._socket)
        self._socket.close(linger=0)
        self._connect()

    def _connect(self) -> None:
        endpoint, identity, curve = self.endpoint, self._identity, self._curve
        socket = self._socket = self.context.socket(zmq.DEALER)
        self._sockets.append(socket)
        _bound(socket, endpoint, self._decoder.max_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if endpoint.startswith("tcp://"):  # on this host a try costs nothing, and a new hub is found at once
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt_string(zmq.IDENTITY, identity)
        if curve is not None and endpoint.startswith("tcp://"):
            socket.curve_serverkey = curve.server_public.encode()
            socket.curve_publickey = curve.client_public.encode()
            socket.curve_secretkey = curve.client_secret.encode()
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ChannelError(f"{endpoint} cannot be connected: {error}") from None
        self._poller.register(socket, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[Any]:
        """Return messages in order of arrival, at most DRAIN_MESSAGES; [] after timeout_s or wake()."""
        received: list[Any] = []
        if self._socket not in self._poll(timeout_s):
            return received
        while len(received) < DRAIN_MESSAGES:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._decode(frames)
            if message is not None:
                received.append(message)
        return received

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message; False, and counted, when the queue is full. Never blocks.

        Raises WireError when the message is too large.
        """
        return self._sent([encode(message, self._max_send_bytes)], self._socket)
